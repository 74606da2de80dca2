"""The keys file: what is in it, what changes it, and when it is read again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from app.admission import key_file
from app.admission.checksum import with_checksum
from app.admission.key_store import KeyStore
from app.admission.tenants import digest_of, parse, parse_in_force
from app.cli import main
from app.errors import SettingsError
from app.settings import AdmissionSettings
from tests.waiting import soon

SECRET = b"sk-aerie-secret"
FILE = f"""
# our own note
[tenants.search]
requests_per_minute = 60
models = ["m"]
priority = -1

[[keys]]
id = "one"
tenant = "search"
sha256 = "{digest_of(SECRET)}"
admin = true
"""


def test_a_key_is_found_with_its_tenant() -> None:
    identity = parse(FILE, "test").find(SECRET)
    assert identity is not None
    assert (identity.tenant.name, identity.key, identity.admin) == ("search", "one", True)
    assert identity.tenant.models == ("m",)
    assert identity.tenant.max_concurrent is None


@pytest.mark.parametrize(
    "secret",
    [
        b"",
        SECRET.upper(),
        SECRET + b" ",
        SECRET + b"\0",
        b"\0" + SECRET,
        SECRET[:-1],
        b'" or 1=1 --',
        "schlüssel".encode(),
        b"x" * 2**20,
        digest_of(SECRET).encode(),  # whoever reads the file must not get in with it
    ],
)
def test_nothing_else_is_a_key(secret: bytes) -> None:
    assert parse(FILE, "test").find(secret) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.a]\nrequests_per_minuet = 1", "requests_per_minuet"),
        ("[tenants.a]\nrequests_per_minute = 0", "requests_per_minute"),
        ("[tenants.a]\nrequests_per_minute = '5'", "requests_per_minute"),
        ('[tenants."a b"]', "name"),
        ("[teams.a]", "teams"),
        ("[[keys]]\nid = 'x'\ntenant = 'gone'\nsha256 = '" + "0" * 64 + "'", "gone"),
        ("[tenants.a]\n[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = 'short'", "sha256"),
        (FILE + FILE.split("priority = -1")[1], "twice"),
        ("[tenants", "table declaration"),
    ],
)
def test_a_wrong_file_is_refused_and_says_where(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse(text, "test")


def test_create_list_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    file = ["--keys-file", str(path)]
    assert main(["keys", "create", "search", "--max-concurrent", "3", "--admin", *file]) == 0
    first = capsys.readouterr().out.split()
    key_id, secret = first[1], first[-1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    identity = parse(path.read_text(), "test").find(secret.encode())
    assert identity is not None and identity.admin
    assert identity.tenant.max_concurrent == 3

    path.write_text("# a comment stays\n" + path.read_text())
    assert main(["keys", "create", "search", *file]) == 2
    assert "aerie keys checksum" in capsys.readouterr().err, "changed by hand, or torn?"
    assert main(["keys", "checksum", *file]) == 0
    assert main(["keys", "create", "search", *file]) == 0
    second = capsys.readouterr().out.split()[-1]
    assert second != secret
    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert key_id in listed and "max_concurrent=3" in listed
    assert secret not in listed

    assert main(["keys", "revoke", key_id, *file]) == 0
    text = path.read_text()
    assert "\n# a comment stays\n" in text
    ring = parse(text, "test")
    assert ring.find(secret.encode()) is None
    assert ring.find(second.encode()) is not None


@pytest.mark.parametrize(
    "arguments",
    [
        ["revoke", "none"],
        ["create", "a b"],
        ["create", "new", "--max-k", "-1"],
        ["create", "known", "--max-k", "1"],
    ],
)
def test_what_cannot_be_done_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.known]\n")
    assert main(["keys", *arguments, "--keys-file", str(path)]) == 2
    assert capsys.readouterr().err.startswith("aerie: ")
    assert path.read_text() == "[tenants.known]\n"


def test_keys_made_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.toml")
    makers = [
        threading.Thread(target=main, args=(["keys", "create", f"t{i}", "--keys-file", path],))
        for i in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(parse(Path(path).read_text(), "test").keys) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change a file's owner")
def test_the_gateway_can_still_read_a_file_that_root_changed(tmp_path: Path) -> None:
    """Catches: a new file of root's with mode 0600, so that a revoked key stays in force."""
    file, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    link.symlink_to(file)
    key_id, _ = key_file.create(link, "a", {}, admin=False, now=datetime.now(UTC))
    os.chown(file, 10001, 10002)
    file.chmod(0o660)  # which the umask would narrow
    key_file.create(file, "b", {}, admin=False, now=datetime.now(UTC))
    key_file.revoke(link, key_id)
    assert link.is_symlink()
    assert [key.tenant for key in parse(file.read_text("utf-8"), "test").keys] == ["b"]
    status, lock = file.stat(), (tmp_path / ".keys.toml.lock").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (10001, 10002, 0o660)
    assert (lock.st_uid, lock.st_gid) == (10001, 10002)


def test_an_owner_that_cannot_be_kept_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    key_id, _ = key_file.create(path, "a", {}, admin=False, now=datetime.now(UTC))
    before = path.read_bytes()
    status = os.stat_result((*path.stat()[:4], 10001, 10001, *path.stat()[6:]))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "fstat", lambda _: status)
    with pytest.raises(SettingsError, match="cannot keep its owner"):
        key_file.revoke(path, key_id)
    assert path.read_bytes() == before


def keys_file(tenant: str, *secrets: bytes) -> str:
    """A complete file with the keys of one tenant; its limits stand behind them."""
    keys = "".join(
        f'[[keys]]\nid = "{secret.decode()}"\ntenant = "{tenant}"\nsha256 = "{digest_of(secret)}"\n'
        for secret in secrets
    )
    return with_checksum(f"{keys}[tenants.{tenant}]\nrequests_per_minute = 600\n")


@contextmanager
def stored(path: Path, text: str) -> Iterator[KeyStore]:
    path.write_text(text)
    yield KeyStore(AdmissionSettings(keys_file=str(path), keys_poll_s=0.01))


def looks(store: KeyStore) -> None:
    """One look of the watching task."""
    asyncio.run(store.refresh())


async def test_the_watching_task_takes_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with stored(path, keys_file("a", b"one")) as store:
        watching = asyncio.create_task(store.watch())
        path.write_text(keys_file("a", b"one", b"two"))
        await soon(lambda: store.ring.find(b"two") is not None)
        watching.cancel()


async def test_a_read_that_hangs_is_a_problem_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a file on a server that is gone, whose keys look as if they were the newest ones,
    and a thread that each further look leaves in such a read."""
    path, answers, reads = tmp_path / "keys.toml", threading.Event(), list[Path]()

    def hang(path: Path) -> str:
        reads.append(path)
        answers.wait(60)
        return path.read_text("utf-8")

    with stored(path, keys_file("a", b"one")) as store:
        monkeypatch.setattr("app.admission.key_store.LEAST_READ_S", 0.01)
        monkeypatch.setattr("app.admission.key_store._read", hang)
        path.write_text(keys_file("a", b"two"))
        try:
            for _ in range(3):
                await asyncio.wait_for(store.refresh(), 30)
                assert (store.stale, stale()) == (True, 1)
            assert len(reads) == len(caplog.records) == 1
            assert "reading it takes more than" in caplog.text
        finally:
            answers.set()
        await soon(lambda: store._reading is not None and store._reading.done())
        await store.refresh()
        assert (store.stale, stale()) == (False, 0)
        assert store.ring.find(b"two") is not None


DEEP = "x = " + "[" * 3000 + "]" * 3000
BAD_FILES = {
    "empty": "",
    "blank": " \n\n",
    "comments": "# nothing else\n",
    "no keys": "[tenants.a]\n",
    "broken": "[broken",
    "deep": DEEP,
    "deep and complete": with_checksum(DEEP),
    "zeros": "\0" * 100,
    "another's checksum": with_checksum("").strip() + "\n" + FILE,
    "two checksums": 2 * with_checksum(FILE),
    "a digit for a number": with_checksum(FILE).replace("= 60", "= 6"),
}


@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_changes_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    path = tmp_path / "keys.toml"
    with stored(path, keys_file("a", b"one")) as store:
        before, failed = store.ring, reloads("failed")
        path.write_text(bad)
        looks(store)
        looks(store)
        assert store.ring is before
        assert (store.stale, stale()) == (True, 1)
        assert reloads("failed") - failed == 1, "once for each bad file, not at each look"
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        path.write_text(keys_file("a", b"two"))
        looks(store)
        assert (store.stale, stale()) == (False, 0)
        assert (store.ring.find(b"one"), store.ring.find(b"two")) != (None, None)
        assert store.ring.find(b"one") is None


@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES)
def test_no_gateway_starts_with_a_bad_file(tmp_path: Path, bad: str) -> None:
    with pytest.raises(SettingsError, match="keys"), stored(tmp_path / "keys.toml", bad):
        pass
    with pytest.raises(SettingsError, match="keys"):
        KeyStore(AdmissionSettings(keys=bad))


@pytest.mark.parametrize("bad", [*BAD_FILES.values(), None], ids=[*BAD_FILES, "missing"])
def test_the_list_says_what_is_wrong_with_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str | None
) -> None:
    """What a gateway does not accept, `aerie keys list` does not either, an empty file included."""
    path = tmp_path / "keys.toml"
    if bad is not None:
        path.write_text(bad)
    assert main(["keys", "list", "--keys-file", str(path)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "keys.toml: " in shown.err


def test_who_makes_a_key_in_a_file_without_any_is_told_that_it_is_the_only_one() -> None:
    with pytest.raises(SettingsError, match="restore it from a copy, or make"):
        parse_in_force("", "test")


@pytest.mark.parametrize("name", ["empty", "blank", "comments", "no keys"])
def test_no_checksum_makes_an_emptied_file_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(BAD_FILES[name])
    assert main(["keys", "checksum", "--keys-file", str(path)]) == 2
    assert "holds no key" in capsys.readouterr().err
    assert path.read_text() == BAD_FILES[name]


def test_limits_can_be_changed_after_the_last_key_was_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key_id, _ = key_file.create(path, "a", {"max_k": 1}, admin=False, now=datetime.now(UTC))
    key_file.revoke(path, key_id)
    path.write_text(path.read_text().replace("max_k = 1", "max_k = 2"))
    assert main(["keys", "checksum", "--keys-file", str(path)]) == 0
    assert parse_in_force(path.read_text(), "test").tenants["a"].max_k == 2


def test_a_file_that_is_gone_or_none_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    good = keys_file("a", b"one")
    with stored(path, good) as store:
        before = store.ring
        for replace in (path.unlink, path.mkdir, path.rmdir, lambda: os.mkfifo(path)):
            replace()
            looks(store)
            assert (store.ring, store.stale) == (before, True)
        path.unlink()
        path.write_text(good)
        looks(store)
        assert (store.ring, store.stale) == (before, False), "the same content again"


def test_a_parser_that_fails_in_any_way_costs_nobody_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    with stored(path, keys_file("a", b"one")) as store:

        def fail(text: str, source: str) -> None:
            raise MemoryError

        path.write_text(keys_file("a", b"two"))
        with monkeypatch.context() as patch:
            patch.setattr("app.admission.key_store.parse_in_force", fail)
            looks(store)
        assert store.stale and store.ring.find(b"one") is not None


def test_two_writes_that_leave_the_same_stamp_are_told_apart(tmp_path: Path) -> None:
    """The clock of a file system ticks every few milliseconds; some copies keep times."""
    path = tmp_path / "keys.toml"
    with stored(path, keys_file("a", b"one")) as store:
        found = path.stat()
        path.write_text(keys_file("a", b"two"))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert (path.stat().st_mtime_ns, path.stat().st_size) == (found.st_mtime_ns, found.st_size)
        looks(store)
        assert store.ring.find(b"one") is None


def test_the_last_key_can_be_revoked(tmp_path: Path) -> None:
    """An empty file shuts nobody out; the command does."""
    path = tmp_path / "keys.toml"
    key_id, secret = key_file.create(path, "a", {}, admin=False, now=datetime.now(UTC))
    with stored(path, path.read_text()) as store:
        assert store.ring.find(secret.encode()) is not None
        key_file.revoke(path, key_id)
        looks(store)
        assert store.ring.find(secret.encode()) is None
        assert not store.stale


VERSIONS = (
    keys_file("a", b"first", b"revoked", b"second"),
    keys_file("a", b"first", b"second"),
    keys_file("a", b"second", b"first", b"third"),
)


def torn(version: int, cut: int, rest: str) -> str:
    """A file of which only the first `cut` characters were written: over what it held before, or
    into blocks of zeros, or with nothing behind them."""
    now, before = VERSIONS[version], VERSIONS[version - 1]
    return now[:cut] + {"": "", "zeros": "\0" * len(now[cut:]), "before": before[cut:]}[rest]


async def test_a_thousand_torn_files_let_no_revoked_key_in_and_shut_no_valid_one_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes that are seen, or cut off for good, in part before they are complete."""
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "keys.toml"
    dice = random.Random(1)
    for _ in range(500):
        path.write_text(VERSIONS[0])
        store = KeyStore(AdmissionSettings(keys_file=str(path)))
        for version in (1, 2):
            cut = dice.randrange(len(VERSIONS[version]))
            path.write_text(torn(version, cut, dice.choice(("", "zeros", "before"))))
            await store.refresh()
            check(store, revoked=version == 1)
            path.write_text(VERSIONS[version])
            await store.refresh()
            check(store, revoked=False)
        assert limits_of(store, b"third") == 600


def check(store: KeyStore, *, revoked: bool) -> None:
    """Valid keys are in force with their own names and limits; `revoked`: may the other be?"""
    for secret in (b"first", b"second"):
        assert limits_of(store, secret) == 600
    assert revoked or store.ring.find(b"revoked") is None


def limits_of(store: KeyStore, secret: bytes) -> int | None:
    identity = store.ring.find(secret)
    assert identity is not None, secret
    assert identity.key == secret.decode(), "another key's entry"
    return identity.tenant.requests_per_minute


def reloads(result: str) -> float:
    return REGISTRY.get_sample_value("aerie_key_reloads_total", {"result": result}) or 0.0


def stale() -> float | None:
    return REGISTRY.get_sample_value("aerie_keys_file_stale")


def test_a_checksum_stands_what_shells_and_editors_do_to_ends() -> None:
    text = keys_file("a", b"one")
    for changed in (text.rstrip(), text.replace("\n", "\r\n"), text + "\n\n"):
        assert parse(changed, "test").find(b"one") is not None


def test_keys_from_the_environment() -> None:
    store = KeyStore(AdmissionSettings(keys=FILE))
    assert store.guarded
    assert store.ring.find(SECRET) is not None


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="keys_file"):
        KeyStore(AdmissionSettings(keys_file=str(tmp_path / "none")))


@pytest.mark.parametrize("secret", [b"", b"x" * 257], ids=["empty", "long"])
def test_a_key_that_is_empty_or_too_long_opens_nothing(secret: bytes) -> None:
    """Even if the file holds its hash."""
    key = f'id = "one"\ntenant = "one"\nsha256 = "{digest_of(secret)}"'
    assert parse(f"[tenants.one]\n[[keys]]\n{key}\n", "keys").find(secret) is None
