"""Checkpoints whose matrices are stored in 8 bits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.model.checkpoint import WEIGHTS, load_head, save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.round_weights import main
from tests.drafters.model.test_checkpoint import random_head


def stored_head(config: HeadConfig, folder: Path, std: float) -> DraftHead:
    config = replace(config, draft_vocab_size=25, path_selector=SelectorConfig(4))
    head = random_head(config, std)
    save_head(head, folder)
    return head


def test_a_rounded_head_loads_in_its_own_type_and_differs_by_a_few_percent(
    config: HeadConfig, tmp_path: Path
) -> None:
    head = stored_head(config, tmp_path, 0.1)
    file = tmp_path / WEIGHTS
    file.chmod(0o644)
    before = file.stat().st_size
    assert main([str(tmp_path)]) == 0
    assert file.stat().st_size < 0.8 * before
    assert file.stat().st_mode & 0o777 == 0o644
    again = load_head(tmp_path)
    assert {weight.dtype for weight in again.parameters()} == {torch.bfloat16}
    for name, old in head.state_dict().items():
        lost = float((again.state_dict()[name].float() - old.float()).norm() / old.float().norm())
        rounded = old.ndim == 2 and len(old) > 1 and not name.startswith("selector.")
        assert lost <= (0.03 if rounded else 0.0), name
    assert load_file(tmp_path / WEIGHTS)["fc.weight"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("std", [1e-3, 1e4], ids=["too small", "too large"])
def test_weights_outside_the_range_are_refused_and_left_as_they_are(
    config: HeadConfig, tmp_path: Path, std: float, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_head(config, tmp_path, std)
    before = (tmp_path / WEIGHTS).read_bytes()
    assert main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"would be off by .* in torch\.float8_e4m3fn", line)
    assert (tmp_path / WEIGHTS).read_bytes() == before


def test_what_is_no_head_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / WEIGHTS).write_bytes(b"")
    for folder in (tmp_path / "none", tmp_path / "damaged"):
        assert main([str(folder)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(folder / WEIGHTS) in line
