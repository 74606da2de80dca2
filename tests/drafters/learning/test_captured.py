from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.learning.captured import Captured, read

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
STEPS = st.lists(st.tuples(st.integers(0, 32), st.integers(0, 32)), max_size=8)


@given(IDS, IDS, STEPS, st.text(max_size=10))
def test_a_line_is_read_as_it_was_written(prompt, answer, steps, tenant):
    written = Captured(12.5, tenant, 3, prompt, answer, steps)
    line = written.line()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    found = Captured.of_line(line)
    assert (list(found.prompt), list(found.answer), list(found.steps)) == (prompt, answer, steps)
    assert (found.at, found.tenant, found.generation) == (12.5, tenant, 3)


def test_files_are_read_in_order_without_what_is_no_sequence(tmp_path: Path):
    lines = [Captured(float(n), "", 0, [n], [n], []).line() for n in range(3)]
    (tmp_path / "b.jsonl").write_bytes(lines[2])
    (tmp_path / "a.jsonl").write_bytes(lines[0] + b"{}\nnothing\n" + lines[1] + lines[2][:-9])
    for file in tmp_path.iterdir():  # written in one tick of the clock: names decide
        os.utime(file, (9.0, 9.0))
    assert [found.at for found in read(tmp_path)] == [0.0, 1.0, 2.0]


def test_a_clock_that_was_ahead_makes_no_file_the_newest(tmp_path: Path):
    """The fault: files were ordered by the time in their names, which is never corrected."""
    for name, modified in (("20270101", 7.0), ("20261127", 8.0), ("20261128", 9.0)):
        file = tmp_path / f"{name}T194500-0001.jsonl"
        file.write_bytes(Captured(modified, "", 0, [1], [1], []).line())
        os.utime(file, (modified, modified))
    assert [found.at for found in read(tmp_path)] == [7.0, 8.0, 9.0]
    assert [found.at for found in read(tmp_path, since=7.5)] == [8.0, 9.0]


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"at": 1}', b"null"])
def test_a_line_that_is_none_raises_value_error(line):
    with pytest.raises(ValueError, match=r"not a captured sequence|Expecting"):
        Captured.of_line(line)
