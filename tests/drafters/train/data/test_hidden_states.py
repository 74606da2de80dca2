"""The store of hidden states: right with any part on disk, within its limit, safe against kills."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.train.data import hidden_states as module
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.target import FrozenTarget, States
from tests.drafters.train.tiny import VOCABULARY, load_target

TAPS = (0, 2, 3)
LENGTHS = [12, 5, 9, 5, 20, 7, 16, 3, 11, 8]
TOKEN_BYTES = (len(TAPS) + 1) * 16 * 4  # with final states, fp32
ALL = 10**9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return _texts(0)


def _texts(seed: int) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    return Texts.of(
        Text(torch.randint(VOCABULARY, (length,), generator=generator), 2) for length in LENGTHS
    )


def _store(target: FrozenTarget, texts: Texts, folder: Path, **options: object) -> StateStore:
    settings = {"limit_bytes": ALL, "with_final": True, "batch_tokens": 24, **options}
    return StateStore(target, texts, TAPS, folder=folder, **settings)  # type: ignore[arg-type]


def _prepared(target: FrozenTarget, texts: Texts, folder: Path, **options: object) -> StateStore:
    store = _store(target, texts, folder, **options)
    store.prepare()
    return store


def _check(store: StateStore, target: FrozenTarget, texts: Texts, rows: Sequence[int]) -> None:
    """What the store gives equals one pass over each text alone, and zeros behind it."""
    got = store.fetch(rows)
    longest = max(LENGTHS[index] for index in rows)
    assert got.taps.shape == (len(rows), longest, len(TAPS) * 16)
    assert got.final.shape[:2] == (len(rows), longest)
    for row, index in enumerate(rows):
        wanted, length = target.states(texts[index].tokens[None], TAPS), LENGTHS[index]
        torch.testing.assert_close(got.taps[row, :length], wanted.taps[0])
        if got.final.shape[2]:
            torch.testing.assert_close(got.final[row, :length], wanted.final[0])
        assert not got.taps[row, length:].any()
        assert not got.final[row, length:].any()


def _used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.exists() else 0


class Counting:
    """A target that counts the texts it is asked about."""

    def __init__(self, target: FrozenTarget) -> None:
        self._target, self.rows = target, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def states(self, tokens: torch.Tensor, taps: Sequence[int]) -> States:
        self.rows += len(tokens)
        return self._target.states(tokens, taps)


@settings(max_examples=25)
@given(
    limit=st.integers(0, sum(LENGTHS) * TOKEN_BYTES + 6000),
    rows=st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=6),
)
def test_states_are_right_and_within_any_limit(
    tmp_path_factory: pytest.TempPathFactory,
    target: FrozenTarget,
    texts: Texts,
    limit: int,
    rows: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    store = _prepared(target, texts, folder, limit_bytes=limit)
    assert _used(folder) <= limit
    assert store.bytes == sum(sorted(LENGTHS)[: store.cached]) * TOKEN_BYTES
    room = limit - 4096 - store.bytes
    assert store.cached == len(LENGTHS) or room < sorted(LENGTHS)[store.cached] * TOKEN_BYTES
    _check(store, target, texts, rows)


def test_a_complete_cache_spares_the_target(
    tmp_path: Path, target: FrozenTarget, texts: Texts
) -> None:
    told: list[int] = []
    store = _store(target, texts, tmp_path)
    store.prepare(told.append)
    assert sum(told) == sum(LENGTHS)
    assert store.cached == len(LENGTHS)
    store.close()
    counting, told = Counting(target), []
    again = _store(counting, texts, tmp_path)  # type: ignore[arg-type]
    again.prepare(told.append)
    again.fetch(range(len(LENGTHS)))
    assert counting.rows == 0
    assert sum(told) == sum(LENGTHS)
    _check(again, target, texts, [4, 0, 7])


def test_no_limit_means_no_file(tmp_path: Path, target: FrozenTarget, texts: Texts) -> None:
    store = _prepared(target, texts, tmp_path / "cache", limit_bytes=0)
    assert (store.cached, store.bytes) == (0, 0)
    assert not (tmp_path / "cache").exists()
    _check(store, target, texts, [0, 1])


def test_without_final_states(tmp_path: Path, target: FrozenTarget, texts: Texts) -> None:
    store = _prepared(target, texts, tmp_path, with_final=False)
    assert store.bytes == sum(LENGTHS) * len(TAPS) * 16 * 4
    assert store.fetch([1, 4]).final.shape == (2, 20, 0)
    _check(store, target, texts, [1, 4])


def test_half_precision_is_kept_bit_for_bit(tmp_path: Path, texts: Texts) -> None:
    target = load_target(tmp_path / "target", dtype=torch.bfloat16)
    store = _prepared(target, texts, tmp_path / "cache", batch_tokens=1)
    assert store.cached == len(LENGTHS)
    got, wanted = store.fetch([6]), target.states(texts[6].tokens[None], TAPS)
    assert got.taps.dtype == torch.bfloat16
    assert torch.equal(got.taps, wanted.taps)
    assert torch.equal(got.final, wanted.final)


def _die(store: StateStore, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """In a child: kill -9 at the third pass of the target, or before the third index."""
    calls = 0
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "_FLUSH_BYTES", 1)
    owner = store._target if at == "states" else module
    genuine = getattr(owner, at)

    def mortal(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return genuine(*args)

    monkeypatch.setattr(owner, at, mortal)
    store.prepare()


@pytest.mark.parametrize("at", ["states", "_replace"])
def test_a_killed_run_is_continued(
    tmp_path: Path, target: FrozenTarget, texts: Texts, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    target.fingerprint  # noqa: B018 - computed here, not in the child
    killed = _store(target, texts, tmp_path)
    child = multiprocessing.get_context("fork").Process(target=_die, args=(killed, monkeypatch, at))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    (index,) = tmp_path.glob("*.json")
    done = json.loads(index.read_text())
    assert 0 < done["texts"] < len(LENGTHS)
    if at == "_replace":  # died with bytes on disk that no index counts
        assert index.with_suffix(".bin").stat().st_size > done["bytes"]
    counting = Counting(target)
    store = _prepared(counting, texts, tmp_path)  # type: ignore[arg-type]
    assert counting.rows == len(LENGTHS) - done["texts"]
    assert store.cached == len(LENGTHS)
    _check(store, target, texts, range(len(LENGTHS)))


def _spoil_json(index: Path) -> None:
    index.write_text(index.read_text()[:-9])


def _spoil_count(index: Path) -> None:
    index.write_text(index.read_text().replace(f'"texts": {len(LENGTHS)}', '"texts": 3'))


def _spoil_name(index: Path) -> None:
    document = json.loads(index.read_text())
    index.write_text(json.dumps({**document, "fingerprint": "0" * 64}))


def _spoil_data(index: Path) -> None:
    data = index.with_suffix(".bin")
    os.truncate(data, data.stat().st_size - 1)


@pytest.mark.parametrize(
    "spoil", [_spoil_json, _spoil_count, _spoil_name, _spoil_data, Path.unlink]
)
def test_a_cache_that_cannot_be_trusted_is_made_again(
    tmp_path: Path, target: FrozenTarget, texts: Texts, spoil: object
) -> None:
    store = _prepared(target, texts, tmp_path)
    store.close()
    (index,) = tmp_path.glob("*.json")
    spoil(index)  # type: ignore[operator]
    counting = Counting(target)
    again = _prepared(counting, texts, tmp_path)  # type: ignore[arg-type]
    assert counting.rows == again.cached == len(LENGTHS)
    _check(again, target, texts, [4, 9])


def test_a_limit_that_changes_cuts_or_continues(
    tmp_path: Path, target: FrozenTarget, texts: Texts
) -> None:
    _prepared(target, texts, tmp_path).close()
    limit = 4096 + 30 * TOKEN_BYTES
    small = _prepared(target, texts, tmp_path, limit_bytes=limit)
    assert small.cached == 5  # 3 + 5 + 5 + 7 + 8 = 28 tokens
    assert _used(tmp_path) <= limit
    _check(small, target, texts, range(len(LENGTHS)))
    small.close()
    counting = Counting(target)
    large = _prepared(counting, texts, tmp_path)  # type: ignore[arg-type]
    assert counting.rows == len(LENGTHS) - 5
    _check(large, target, texts, range(len(LENGTHS)))
    large.close()
    _prepared(target, texts, tmp_path, limit_bytes=4096)
    assert _used(tmp_path) == 0


def test_whatever_states_depend_on_gets_a_file_of_its_own(
    tmp_path: Path, target: FrozenTarget, texts: Texts
) -> None:
    double = FrozenTarget.load(target._folder, dtype=torch.float64)
    other = load_target(tmp_path / "other", seed=9)
    folder = tmp_path / "cache"
    for variant in (target, double, other):
        _prepared(variant, texts, folder).close()
    _prepared(target, _texts(1), folder).close()
    _prepared(target, texts, folder, with_final=False).close()
    StateStore(target, texts, (2,), folder=folder, limit_bytes=ALL, with_final=True).prepare()
    assert len(list(folder.glob("*.bin"))) == 6
    _check(_prepared(target, texts, folder), target, texts, [0, 3])


def test_the_oldest_caches_make_room(tmp_path: Path, target: FrozenTarget) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    stores = [_prepared(target, _texts(seed), tmp_path) for seed in range(3)]
    size = _used(tmp_path)
    files = [store._path() for store in stores]
    for store, file, when in zip(stores, files, (300, 100, 200), strict=True):
        store.close()
        os.utime(file, (when, when))
    _prepared(target, _texts(3), tmp_path, limit_bytes=size + 4096).close()
    assert [file.exists() for file in files] == [True, False, True]
    assert [file.with_suffix(".json").exists() for file in files] == [True, False, True]
    assert _used(tmp_path) <= size + 4096
    assert (tmp_path / "notes.txt").exists()
    # Use makes young: the cache of 200 is used now, so that of 300 goes next.
    _prepared(target, _texts(2), tmp_path).close()
    _prepared(target, _texts(4), tmp_path, limit_bytes=size + 4096).close()
    assert [file.exists() for file in files] == [False, False, True]


def test_a_cache_in_use_is_not_evicted_and_counts(
    tmp_path: Path, target: FrozenTarget, texts: Texts
) -> None:
    held = _prepared(target, texts, tmp_path)
    limit = _used(tmp_path) + 4096 + 30 * TOKEN_BYTES
    second = _prepared(target, _texts(1), tmp_path, limit_bytes=limit)
    assert held._path().exists()
    assert second.cached == 5
    assert _used(tmp_path) <= limit
    _check(held, target, texts, [0, 5])


def test_two_runs_share_a_cache_and_one_writes(
    tmp_path: Path, target: FrozenTarget, texts: Texts
) -> None:
    reports: list[str] = []
    first = _prepared(target, texts, tmp_path, limit_bytes=4096 + 30 * TOKEN_BYTES)
    second = _prepared(target, texts, tmp_path, report=reports.append)
    assert second.cached == first.cached == 5
    assert "not continued" in reports[0]
    _check(second, target, texts, range(len(LENGTHS)))
    first.close()
    second.prepare()
    assert second.cached == len(LENGTHS)
    # While one writes, the other computes.
    genuine, seen = module._replace, []

    def during(file: Path, text: str) -> None:
        third = _prepared(target, texts, tmp_path, report=reports.append)
        seen.append(third.cached)
        _check(third, target, texts, [2])
        genuine(file, text)

    second.close()
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_replace", during)
        second.prepare()
    assert seen == [0]
    assert "being written by another run" in reports[1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_rest_to_the_target(
    tmp_path: Path,
    target: FrozenTarget,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(module, "_FLUSH_BYTES", 1)
    genuine, reports, written = os.pwrite, [], 0

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        nonlocal written
        if written > 30 * TOKEN_BYTES:
            raise OSError(number, os.strerror(number))
        count = genuine(file, data[:1000], offset)  # a short write is no error
        written += count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    store = _prepared(target, texts, tmp_path, report=reports.append)
    assert 0 < store.cached < len(LENGTHS)
    assert os.strerror(number) in reports[0]
    assert f"{len(LENGTHS) - store.cached} of {len(LENGTHS)} texts are computed" in reports[0]
    assert store._path().stat().st_size == store.bytes
    _check(store, target, texts, range(len(LENGTHS)))
    store.close()
    monkeypatch.undo()
    assert _prepared(target, texts, tmp_path).cached == len(LENGTHS)


def test_other_errors_of_the_disk_are_not_hidden(
    tmp_path: Path, target: FrozenTarget, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*args: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="broken"):
        _prepared(target, texts, tmp_path)


def test_passes_of_the_target_keep_to_the_budget(
    tmp_path: Path, target: FrozenTarget, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[torch.Size] = []
    genuine = target.states
    monkeypatch.setattr(
        target, "states", lambda tokens, taps: shapes.append(tokens.shape) or genuine(tokens, taps)
    )
    _prepared(target, texts, tmp_path)
    _store(target, texts, tmp_path).fetch(range(len(LENGTHS)))
    assert all(shape.numel() <= 24 or len(shape) == 1 for shape in shapes)
    assert len(shapes) < 2 * len(LENGTHS)  # and are batches


def test_nothing_to_store_is_refused(tmp_path: Path, target: FrozenTarget, texts: Texts) -> None:
    with pytest.raises(ValueError, match="nothing to keep"):
        StateStore(target, texts, (), folder=tmp_path, limit_bytes=1, with_final=False)
    with pytest.raises(ValueError, match="negative"):
        _store(target, texts, tmp_path, limit_bytes=-1)
