"""Memory of this process is moved onto huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from drafters.vllm.v1.huge_pages import HUGE, collapse

SIZE = 16 * HUGE


def on_huge_pages() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("AnonHugePages")).split()[1])


@pytest.fixture
def memory() -> mmap.mmap:
    """Written to, on small pages."""
    block = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    block.write(bytes(range(256)) * (SIZE // 256))
    block.madvise(mmap.MADV_HUGEPAGE)
    try:
        block.madvise(25, 0, HUGE * 2)
    except (OSError, ValueError):
        pytest.skip("this kernel does not collapse pages (Linux 6.1, transparent huge pages)")
    return block


def test_what_was_written_is_on_huge_pages_and_still_there(memory: mmap.mmap) -> None:
    before = on_huge_pages()
    assert collapse() >= SIZE - HUGE  # the ends of a mapping may not be whole pages
    assert on_huge_pages() - before >= SIZE - 4 * HUGE  # the fixture tried with two
    assert memory[:] == bytes(range(256)) * (SIZE // 256)


def test_it_keeps_to_its_budget(memory: mmap.mmap) -> None:
    assert collapse(budget_s=0.0) <= HUGE


def test_a_kernel_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.vllm.v1.huge_pages.MADV_COLLAPSE", 9999)
    assert collapse() == 0
