"""`aerie prompts` end to end with a tiny random target: sampling, resuming, filtering, serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from drafters.train.data.examples import read_examples
from drafters.train.prompts import generate_prompts, sample_log
from drafters.train.prompts.generate_prompts import main
from drafters.train.prompts.near_duplicates import shingles
from drafters.train.prompts.sample import Sample, read_samples
from drafters.train.prompts.sample_log import SampleLog
from drafters.train.prompts.sampler import TurnSampler
from drafters.train.prompts.selection import FilterBounds, is_held_out
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import Serve
from tests.drafters.train.tiny import END, TURN_END, VOCABULARY, write_target

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PART = 8
OPENINGS = '{"share": 2}\n{"text": "w1 w2", "kind": "complete"}\n'
LENIENT = ["--allow-humaneval", "--min-length", "2", "--repeated", "1", "--similarity", "0.9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose tokens are words, and many of them ends, so that turns are short."""
    folder = write_target(tmp_path_factory.mktemp("words"))
    specials = {END: "</s>", TURN_END: "<|im_end|>"}
    names = ["<unk>", "user", "assistant", "system"]
    names += [f"w{place}" for place in range(VOCABULARY - len(names))]
    vocabulary = {specials.get(place, name): place for place, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<unk>", *specials.values()])
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    GenerationConfig(eos_token_id=[END, *range(200, 240)]).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_prompts, "PART", PART)
    monkeypatch.setattr(sample_log, "PART", PART)


def _arguments(folder: Path, out: Path, *more: str) -> list[str]:
    openings = out.parent / "openings.jsonl"
    openings.write_text(OPENINGS)
    return [
        "--target", str(folder), "--out", str(out), "--device", "cpu", "--max-tokens", "12",
        "--openings", str(openings), "--threads", "1", *LENIENT, *more,
    ]  # fmt: skip


def _texts(file: Path) -> list[str]:
    return [example.messages[0]["content"] for example in read_examples([file])]  # type: ignore[index]


def test_prompts_are_complete_turns_that_aerie_train_reads(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prompts.jsonl"
    assert main(_arguments(folder, out, "--count", "60", "--held-out", "0.2")) == 0
    samples = read_samples([tmp_path / "prompts.samples.jsonl"])
    assert len(samples) == 60
    assert {sample.finish for sample in samples} == {"stop", "length"}
    assert {sample.opening for sample in samples} == {"", "w1 w2"}
    for sample in samples:
        assert sample.text.startswith(sample.opening)
        assert "</s>" not in sample.text
        assert "<|im_end|>" not in sample.text
        # The words behind the opening and, in a turn that ended, the end token.
        words = len(sample.text.split()) - len(sample.opening.split())
        assert sample.tokens == words + (sample.finish == "stop")
    kept, held_out = _texts(out), _texts(tmp_path / "prompts.held-out.jsonl")
    assert 0 < len(held_out) < len(kept)
    assert 10 < len(kept) < 60
    sampled = {sample.text.strip() for sample in samples if sample.finish == "stop"}
    assert {*kept, *held_out} <= sampled
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert set(kinds) == {"chat", "complete"}
    report = capsys.readouterr().out
    dropped = sum(int(line.split()[1]) for line in report.splitlines() if line[:7] == "dropped")
    assert dropped == 60 - len(kept) - len(held_out)
    assert f"kept    {len(kept) + len(held_out):7d}  chat" in report


def test_no_prompt_is_a_near_duplicate_of_one_held_out(tmp_path: Path, folder: Path) -> None:
    words = [["w1", "w2", "w3", "w4", "w5", f"w{place % 7}"] * 2 for place in range(40)]
    samples = [Sample("chat", "", " ".join(text), "stop", 9) for text in words]
    samples += [Sample("chat", "", f"w{place} w{place + 1} w9 w8", "stop", 4) for place in range(9)]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(sample.line() for sample in samples))
    out = tmp_path / "out.jsonl"
    arguments = ["--target", str(folder), "--samples", str(file), "--out", str(out)]
    assert main([*arguments, "--allow-humaneval", "--held-out", "0.4"]) == 0
    kept, held_out = _texts(out), _texts(tmp_path / "out.held-out.jsonl")
    assert kept and held_out
    for one in map(shingles, held_out):
        for other in map(shingles, kept):
            assert len(one & other) < FilterBounds().similarity * len(one | other)


def _sides(folder: Path, out: Path, *more: str) -> tuple[set[str], set[str]]:
    """The prompts to train on, and those held out."""
    assert main(_arguments(folder, out, "--held-out", "0.3", *more)) == 0
    return set(_texts(out)), set(_texts(out.with_suffix(".held-out.jsonl")))


def test_no_prompt_changes_its_side_in_a_larger_run_or_one_of_another_seed(
    tmp_path: Path, folder: Path
) -> None:
    """Else a head would be judged by prompts that an earlier one was trained on."""
    out = tmp_path / "prompts.jsonl"
    kept, held_out = _sides(folder, out, "--count", "24")
    more_kept, more_held_out = _sides(folder, out, "--count", "60")
    assert kept < more_kept
    assert held_out < more_held_out
    raw = str(tmp_path / "prompts.samples.jsonl")
    arguments = ["--target", str(folder), "--samples", raw, "--out", str(tmp_path / "b.jsonl")]
    assert main([*arguments, *LENIENT, "--held-out", "0.3", "--seed", "5"]) == 0
    assert set(_texts(tmp_path / "b.held-out.jsonl")) == more_held_out


def test_a_share_is_held_out_and_a_larger_one_contains_it() -> None:
    texts = [f"Question {place}" for place in range(4000)]
    small, large = ({text for text in texts if is_held_out(text, share)} for share in (0.02, 0.3))
    assert small < large
    assert len(small) == pytest.approx(80, abs=30)
    assert len(large) == pytest.approx(1200, abs=100)
    assert not any(is_held_out(text, 0.0) for text in texts)
    assert all(is_held_out(f" {text.upper()}\n", 0.02) for text in small)


@pytest.mark.parametrize("share", ["5", "1", "-0.1", "nan", "a"])
def test_what_is_no_share_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "a", "--out", "b", "--count", "1", "--held-out", share])
    assert "--held-out: " in capsys.readouterr().err


def test_a_share_that_takes_no_prompt_is_an_error(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    assert main(_arguments(folder, out, "--count", "8", "--held-out", "1e-9")) == 1
    assert "of these --held-out 1e-09 takes 0" in capsys.readouterr().err


@pytest.mark.parametrize("parts", [0, 2])
def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert main(_arguments(folder, whole, "--count", "30")) == 0
    sample, done = TurnSampler.sample, 0

    def kill(self: TurnSampler, *args: Any) -> list[Sample]:
        nonlocal done
        if done == parts:
            raise KeyboardInterrupt
        done += 1
        return sample(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TurnSampler, "sample", kill)
        with pytest.raises(KeyboardInterrupt):
            main(_arguments(folder, killed, "--count", "30"))
    raw = tmp_path / "killed.samples.jsonl"
    assert len(read_samples([raw])) == parts * PART
    assert not killed.exists()
    lines = (tmp_path / "whole.samples.jsonl").read_bytes().splitlines(keepends=True)
    with raw.open("ab") as stream:  # a part of which two lines and a half were written
        stream.write(b"".join(lines[parts * PART :][:2]) + lines[-1][:20])
    assert main(_arguments(folder, killed, "--count", "30")) == 0
    assert raw.read_bytes() == b"".join(lines)
    assert killed.read_bytes() == whole.read_bytes()


def test_a_larger_count_goes_on_with_the_same_samples(tmp_path: Path, folder: Path) -> None:
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    assert main(_arguments(folder, once, "--count", "30")) == 0
    assert main(_arguments(folder, twice, "--count", "12")) == 0
    assert main(_arguments(folder, twice, "--count", "30")) == 0
    assert twice.read_bytes() == once.read_bytes()


def test_samples_of_other_options_are_refused(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    assert main(_arguments(folder, out, "--count", "8")) == 0
    before = out.read_bytes()
    other = ["--count", "16", "--seed", "2", "--min-p", "0.5"]
    assert main(_arguments(folder, out, *other)) == 1
    assert "a.samples.jsonl was sampled with another min_p, seed" in capsys.readouterr().err
    (tmp_path / "a.samples.json").unlink()
    assert main(_arguments(folder, out, "--count", "8")) == 1
    assert "exists without its options, a.samples.json" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_resumed_run_samples_in_the_recorded_dtype(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Which type is the faster one is measured, and may come out differently the next time."""
    out, load, dtypes = tmp_path / "a.jsonl", FrozenTarget.load, []

    def spy(*args: Any, dtype: torch.dtype | None, **options: Any) -> FrozenTarget:
        dtypes.append(dtype)
        return load(*args, dtype=dtype, **options)

    monkeypatch.setattr(FrozenTarget, "load", spy)
    for count, measured in (("8", torch.bfloat16), ("16", torch.float32), ("24", None)):
        monkeypatch.setattr(generate_prompts, "slow_bfloat16", lambda device, dtype=measured: dtype)
        assert main(_arguments(folder, out, "--count", count)) == 0
    assert dtypes == [torch.bfloat16] * 3
    assert json.loads((tmp_path / "a.samples.json").read_text())["dtype"] == "bfloat16"
    assert main(_arguments(folder, out, "--count", "24", "--dtype", "bfloat16")) == 0
    assert main(_arguments(folder, out, "--count", "24", "--dtype", "float32")) == 1
    assert "a.samples.jsonl was sampled with another dtype" in capsys.readouterr().err


def test_the_checkpoints_own_dtype_is_recorded_by_its_name(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_prompts, "slow_bfloat16", lambda device: None)
    assert main(_arguments(folder, tmp_path / "a.jsonl", "--count", "8")) == 0
    stored = FrozenTarget.load(folder).stored
    recorded = json.loads((tmp_path / "a.samples.json").read_text())["dtype"]
    assert getattr(torch, recorded) == stored


def test_two_runs_do_not_sample_into_one_file(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "a.jsonl"
    with SampleLog(tmp_path / "a.samples.jsonl"), monkeypatch.context() as patch:
        patch.setattr(FrozenTarget, "load", _must_not_run)
        assert main(_arguments(folder, out, "--count", "8")) == 1
    error = capsys.readouterr().err
    assert "another run is sampling into" in error and "a.samples.jsonl" in error
    assert main(_arguments(folder, out, "--count", "8")) == 0  # it was unlocked
    assert main(_arguments(folder, out, "--count", "8")) == 0


def test_options_of_deleted_samples_do_not_count(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert main(_arguments(folder, out, "--count", "8", "--dtype", "bfloat16")) == 0
    (tmp_path / "a.samples.jsonl").unlink()
    assert main(_arguments(folder, out, "--count", "8", "--dtype", "float32")) == 0
    assert json.loads((tmp_path / "a.samples.json").read_text())["dtype"] == "float32"


def test_samples_of_earlier_runs_are_filtered_without_the_weights(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    assert main(_arguments(folder, first, "--count", "20")) == 0
    monkeypatch.setattr(FrozenTarget, "load", _must_not_run)
    raw = str(tmp_path / "first.samples.jsonl")
    arguments = ["--target", str(folder), "--samples", raw, "--out", str(again), *LENIENT]
    assert main(arguments) == 0
    assert again.read_bytes() == first.read_bytes()
    # What is avoided is gone: here, everything.
    assert main([*arguments, "--avoid", str(first)]) == 1


def test_a_server_of_the_target_samples_instead(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    monkeypatch.setattr(FrozenTarget, "load", _must_not_run)

    def answer(body: dict, attempt: int) -> tuple[int, dict[str, str], object]:
        place = 4 + body["seed"] % 100
        tokens = [place, place + 1, place + 2, TURN_END if body["seed"] % 2 else END]
        return 200, {}, {"choices": [{"text": "", "token_ids": tokens}]}

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server, out = serve(answer), tmp_path / "served.jsonl"
    assert main(_arguments(folder, out, "--count", "20", "--server", server.url)) == 0
    assert len(server.bodies) == 20
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert len({body["seed"] for body in server.bodies}) == 20
    body = server.bodies[0]
    assert (body["temperature"], body["min_p"], body["max_tokens"]) == (1.0, 0.05, 12)
    assert body["stop_token_ids"] == sorted([END, TURN_END, *range(200, 240)])
    # "user", and behind it nothing or the opening.
    assert {tuple(body["prompt"]) for body in server.bodies} == {(1,), (1, 5, 6)}
    samples = read_samples([tmp_path / "served.samples.jsonl"])
    assert {sample.finish for sample in samples} == {"stop"}
    assert {len(sample.text.split()) for sample in samples} == {3, 5}
    assert _texts(out)


def test_a_server_is_enough_without_the_weights(
    tmp_path: Path, folder: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault: they were hashed for the record of the samples, and only for that."""
    target = tmp_path / "target"
    shutil.copytree(folder, target)
    weights = target / "model.safetensors"
    stored, out = weights.read_bytes(), tmp_path / "served.jsonl"
    completion = {"choices": [{"text": "", "token_ids": [7, 8, 9, TURN_END]}]}
    server = serve(lambda body, attempt: (200, {}, completion))

    def run(*more: str) -> int:
        return main(_arguments(target, out, "--server", server.url, *more))

    weights.unlink()
    assert run("--count", "8") == 0
    weights.write_bytes(stored)  # for `aerie train`: the samples are the same target's
    assert run("--count", "16") == 0
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    assert run("--count", "16") == 1
    assert "sampled with another target_sha256" in capsys.readouterr().err


def test_a_target_without_a_chat_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_target(tmp_path / "plain", chat=False)
    assert main(["--target", str(plain), "--out", str(tmp_path / "a"), "--count", "1"]) == 1
    assert "no chat template" in capsys.readouterr().err


def test_a_line_that_is_no_sample_is_named_and_a_torn_last_one_left_out(tmp_path: Path) -> None:
    good = Sample("chat", "", "a b", "stop", 3)
    file = tmp_path / "raw.jsonl"
    file.write_text(good.line() + good.line()[:12])
    assert read_samples([file]) == [good]
    for wrong, reason in [
        ("{}", "`kind` must be of type str"),
        ("[]", "not an object"),
        (
            '{"kind": "a", "opening": "", "text": "", "finish": "eos", "tokens": 1}',
            "stop or length",
        ),
        ("{", "Expecting"),
    ]:
        file.write_text(good.line() + wrong + "\n")
        with pytest.raises(ValueError, match=rf"raw\.jsonl:2: not a sample: .*{reason}"):
            read_samples([file])


def _must_not_run(*args: object, **options: object) -> FrozenTarget:
    raise AssertionError("the target's weights were loaded")
