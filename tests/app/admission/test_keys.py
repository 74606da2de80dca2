"""The keys file: what is in it, what changes it, and when it is read again."""

from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path

import pytest

from app.admission.store import KeyStore
from app.admission.tenants import digest_of, parse
from app.cli import main
from app.errors import SettingsError
from app.settings import AdmissionSettings

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
    assert main(["keys", "create", "search", *file]) == 0
    second = capsys.readouterr().out.split()[-1]
    assert second != secret
    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert key_id in listed and "max_concurrent=3" in listed
    assert secret not in listed

    assert main(["keys", "revoke", key_id, *file]) == 0
    text = path.read_text()
    assert text.startswith("# a comment stays")
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


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.a]\n")
    store = KeyStore(AdmissionSettings(keys_file=str(path), keys_poll_s=0.01))
    assert store.ring.find(SECRET) is None

    async def until(found: bool) -> None:
        async with asyncio.timeout(10):
            while (store.ring.find(SECRET) is not None) is not found:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        watching = asyncio.create_task(store.watch())
        path.write_text(FILE)
        await until(True)
        path.write_text(FILE + "[broken")
        await asyncio.sleep(0.1)
        assert store.ring.find(SECRET) is not None
        path.unlink()
        await asyncio.sleep(0.1)
        assert store.ring.find(SECRET) is not None
        path.write_text("[tenants.a]\n")
        await until(False)
        watching.cancel()

    asyncio.run(scenario())


def test_keys_from_the_environment() -> None:
    store = KeyStore(AdmissionSettings(keys=FILE))
    assert store.guarded
    assert store.ring.find(SECRET) is not None


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="keys_file"):
        KeyStore(AdmissionSettings(keys_file=str(tmp_path / "none")))
