"""Files of captured sequences: private, bounded, whole up to their last line."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.learning.captured_files import FILE_S, CapturedFiles
from app.settings import REPOSITORY
from drafters.learning.captured import Captured, read
from tests.clock import Clock

DAY = 86_400.0


def line(tenant: str, number: int, tokens: int = 20) -> bytes:
    return Captured(float(number), tenant, 0, [number] * tokens, [1] * 4, []).line()


def files(folder: Path, budget: int = 2**20, **changes: Clock) -> CapturedFiles:
    made = CapturedFiles(folder, budget, 30 * DAY, **changes)
    made.tidy()
    return made


def of_tenants(folder: Path) -> Counter[str]:
    return Counter(sequence.tenant for sequence in read(folder))


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_each_tenants_sequences_have_files_of_their_own(tmp_path: Path) -> None:
    """So that `rm captured/*-search.jsonl` deletes all of a tenant's."""
    made = files(tmp_path, clock=Clock(0.0))
    for number, tenant in enumerate(["search", "", "mail-x.y", "search", "(anonymous)"]):
        made.append(tenant, line(tenant, number))
    assert [(file.name, file.stat().st_mode & 0o777) for file in sorted(tmp_path.iterdir())] == [
        ("19700101T000000-0001-search.jsonl", 0o600),
        ("19700101T000000-0002.jsonl", 0o600),
        ("19700101T000000-0003-mail-x.y.jsonl", 0o600),
        ("19700101T000000-0004-(anonymous).jsonl", 0o600),
    ]
    assert of_tenants(tmp_path) == {"search": 2, "": 1, "mail-x.y": 1, "(anonymous)": 1}
    assert made.total_bytes == on_disk(tmp_path)
    again = files(tmp_path)
    assert again._sizes == made._sizes


def test_the_oldest_go_first_and_the_bytes_are_never_exceeded(tmp_path: Path) -> None:
    clock = Clock(0.0)
    made = files(tmp_path, 20_000, clock=clock)
    for number in range(1000):
        clock.now += 1.0
        made.append("", line("", number))
        assert made.total_bytes == on_disk(tmp_path) <= 20_000
    kept = [int(sequence.at) for sequence in read(tmp_path)]
    assert kept == list(range(kept[0], 1000))
    assert len(kept) > 60  # no more than an eighth is deleted at a time


def test_a_flood_of_one_tenant_leaves_the_others_what_they_have(tmp_path: Path) -> None:
    """The fault: with one file for all, a few hundred long prompts drive everybody out."""
    made = files(tmp_path, 40_000)
    for number in range(20):
        made.append("quiet", line("quiet", number))
    for number in range(2000):
        made.append("loud", line("loud", number, tokens=200))
    assert of_tenants(tmp_path)["quiet"] == 20
    assert on_disk(tmp_path) <= 40_000


def test_many_tenants_share_what_is_kept(tmp_path: Path) -> None:
    made, random = files(tmp_path, 100_000), Random(1)
    for number in range(4000):
        tenant = f"t{random.randrange(40)}"
        made.append(tenant, line(tenant, number))
        assert made.total_bytes <= 100_000
    counts = of_tenants(tmp_path)
    assert len(counts) == 40
    assert min(counts.values()) > 0.4 * max(counts.values())


def test_files_are_closed_after_an_hour(tmp_path: Path) -> None:
    steady = Clock(5.0)
    made = files(tmp_path, steady=steady)
    for seconds in (0.0, FILE_S - 1, 1.0, 1.0):
        steady.now += seconds
        made.append("", line("", 1))
    assert [file.read_bytes().count(b"\n") for file in sorted(tmp_path.iterdir())] == [2, 2]


def test_what_is_too_old_is_deleted_whoever_wrote_it(tmp_path: Path) -> None:
    clock = Clock(100 * DAY)
    made = files(tmp_path, clock=clock)
    for name, age in (("20260101T000000-0001-a.jsonl", 31), ("b.jsonl", 29), ("notes.txt", 99)):
        (tmp_path / name).write_bytes(line("", 1))
        os.utime(tmp_path / name, (clock.now - age * DAY,) * 2)
    made.tidy()
    assert {file.name for file in tmp_path.iterdir()} == {"b.jsonl", "notes.txt"}
    clock.now += 2 * DAY
    made.tidy()
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt"}


def test_what_an_excluded_tenant_sent_before_is_deleted_and_no_one_elses(tmp_path: Path) -> None:
    """Or the head would be trained on it, and judged by it, for a month."""
    excluded: set[str] = set()
    made = CapturedFiles(tmp_path, 2**20, 30 * DAY, lambda: excluded)
    for tenant in ("search", "law", "", "x-law"):
        made.append(tenant, line(tenant, 1))
    made.tidy()
    assert of_tenants(tmp_path).total() == 4
    excluded |= {"law", ""}
    made.append("law", line("law", 2))  # which waited for the disk
    made.tidy()
    assert of_tenants(tmp_path) == {"search": 1, "x-law": 1}
    assert made.total_bytes == on_disk(tmp_path)
    excluded.clear()
    made.append("law", line("law", 3))
    assert of_tenants(tmp_path)["law"] == 1


def test_jumps_of_the_clock_keep_nothing_for_longer(tmp_path: Path) -> None:
    """Written in the year after next, by a wrong clock, and found when it is right again."""
    clock = Clock(800 * DAY)
    made = files(tmp_path, clock=clock)
    made.append("", line("", 1))
    (file,) = tmp_path.iterdir()
    os.utime(file, (clock.now,) * 2)
    clock.now = 70 * DAY
    made.append("", line("", 2))
    made.tidy()
    assert len(list(read(tmp_path))) == 2
    clock.now = 101 * DAY
    made.tidy()
    assert list(tmp_path.iterdir()) == []


def test_what_a_clock_that_was_ahead_has_named_is_not_deleted_last(tmp_path: Path) -> None:
    clock = Clock(400 * DAY)
    made = files(tmp_path, 20_000, clock=clock)
    made.append("", line("", 0))
    clock.now = 35 * DAY
    (file,) = tmp_path.iterdir()
    os.utime(file, (clock.now,) * 2)
    made.tidy()
    made._open.clear()
    for number in range(1, 400):
        clock.now += 1.0
        made.append("", line("", number))
    assert not file.exists()
    assert next(iter(read(tmp_path))).at > 200


def test_names_are_not_taken_twice_by_a_clock_that_goes_back(tmp_path: Path) -> None:
    for _ in range(3):  # three gateways, one after the other
        files(tmp_path, clock=Clock(9.0)).append("a", line("a", 1))
    assert len(list(tmp_path.iterdir())) == 3


def test_the_documented_command_finds_all_files_of_a_tenant_and_no_others(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text()
    found = re.search(r"rm DIR/captured/(\S*TENANT\S*)`", text)
    assert found is not None
    made = files(tmp_path)
    for number in (7, 9_998, 9_999, 10_000):
        made._number = number
        made._open.clear()
        for tenant in ("search", "acme-2024-search"):
            made.append(tenant, line(tenant, number))
    those = list(tmp_path.glob(found[1].replace("TENANT", "search")))
    assert len(those) == 4
    assert {Captured.of_line(file.read_bytes()).tenant for file in those} == {"search"}


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    made = files(tmp_path)
    made.append("", line("", 1))
    (file,) = tmp_path.iterdir()
    target = tmp_path / "target"
    target.touch()
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        made.append("", line("", 2))
    assert target.read_bytes() == b""


def test_files_that_are_deleted_meanwhile_are_no_error(tmp_path: Path) -> None:
    made = files(tmp_path, 2_000)
    for number in range(50):
        made.append("a", line("a", number))
        for file in tmp_path.iterdir():
            file.unlink()
    made.tidy()
    assert made.total_bytes == 0


def test_a_file_that_is_deleted_while_the_folder_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(tmp_path)
    for tenant in "ab":
        made.append(tenant, line(tenant, 1))
    found = CapturedFiles._found

    def deleted_before(entry: os.DirEntry[str], now: float) -> Any:
        if entry.name.endswith("-a.jsonl"):
            os.unlink(entry.path)
        return found(entry, now)

    monkeypatch.setattr(CapturedFiles, "_found", staticmethod(deleted_before))
    made.tidy()
    assert [sequence.tenant for sequence in read(tmp_path)] == ["b"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(tmp_path)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_cuts_one_line_off_and_no_other(small_disk: Path) -> None:
    made, number = files(small_disk), 0
    with suppress(OSError):
        while number < 1000:
            made.append("a", line("a", number, tokens=200) * 3)
            number += 1
    assert 0 < number < 1000
    whole = len(list(read(small_disk)))
    assert whole >= 3 * number
    with pytest.raises(OSError, match="No space"):
        made.append("b", line("b", 0))
    (small_disk / min(os.listdir(small_disk))).unlink()  # room again
    made.append("a", line("a", 1))
    made.tidy()
    assert of_tenants(small_disk) == {"a": 1}


def test_what_an_error_left_is_the_end_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(tmp_path)
    made.append("", line("", 1))
    whole = os.write

    def cut_off(file: int, content: bytes) -> int:
        if len(content) > 30:
            return whole(file, content[:30])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", cut_off)
    with pytest.raises(OSError, match="No space"):
        made.append("", line("", 2))
    monkeypatch.setattr(os, "write", whole)
    made.append("", line("", 3))
    assert [sequence.at for sequence in read(tmp_path)] == [1.0, 3.0]
    assert made.total_bytes == on_disk(tmp_path)
