"""Three ways in which vLLM's V2 model runner does not start: the gateway falls back, and says why.

Real engines, on a CPU: V2 runs in Triton's interpreter, and a plugin of vLLM's breaks it
(v2_on_cpu/v2_faults.py). A V2 that does not start leaves V1, or no drafts if the head is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from .gateway import MODEL, Gateway

pytest.importorskip("triton", reason="V2 needs Triton")
START_S = 480.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * START_S)]
V2_ON_CPU = Path(__file__).with_name("v2_on_cpu")


def launch(log: Path, fault: str, *arguments: str) -> Gateway:
    environ: Mapping[str, str] = {
        "PYTHONPATH": str(V2_ON_CPU),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "V2_FAULT": fault,
    }
    # V2 has no limit of the drafter's context, which the embedded pair's preset sets. With fewer
    # drafts than the preset's eleven the interpreter takes less long.
    always = ["--enforce-eager", "--draft-context", "0", "--k", "6"]
    return Gateway.launch(log, [*always, *arguments], environ)


@pytest.mark.parametrize(
    ("fault", "path", "reason", "message"),
    [
        ("backend", "v1", "refused", "FLASHINFER decodes at most 6 tokens of a request at once"),
        ("shape", "no-drafts", "head", "the head does not load: AssertionError in "),
        ("nan", "v1", "non_finite", "logits are not finite with drafts, and finite at K = 0"),
        ("", "v2", "none", ""),
    ],
)
def test_a_v2_that_does_not_start_is_left_for_what_works(
    fault: str, path: str, reason: str, message: str, tmp_path: Path
) -> None:
    gateway = launch(tmp_path / "gateway.log", fault)
    try:
        gateway.wait_ready(START_S)
        with httpx.Client(base_url=gateway.url, timeout=120, trust_env=False) as http:
            state = http.get("/v1/speculation").json()
            ready = http.get("/readyz").json()
            sample = f'aerie_speculation_path_info{{path="{path}",reason="{reason}"}} 1.0'
            assert sample in http.get("/metrics").text.splitlines()
            body = {"model": MODEL, "prompt": "def read(", "max_tokens": 4, "temperature": 0}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert state["path"] == path
        assert state["enabled"] == (path != "no-drafts")
        assert ready["path"] == {"name": path, "reason": reason}
        if fault:
            assert (state["fallback"]["failed"], state["fallback"]["reason"]) == ("v2", reason)
            assert message in state["fallback"]["message"]
            told = [line for line in gateway.text().splitlines() if message in line]
            assert any(f"speculation path: {path}" in line for line in told), gateway.tail()
            print("\n".join(told[-2:]))
        else:
            assert state["fallback"] is None
        assert gateway.stop() == 0
        assert gateway.leftovers() == []
    finally:
        gateway.kill()


def test_a_target_that_cannot_be_loaded_is_tried_once(tmp_path: Path) -> None:
    """Whatever the runner: there is nothing that another path would cure."""
    arguments = ["--engine-args", '{"load_format": "mistral"}']
    gateway = launch(tmp_path / "gateway.log", "", *arguments)
    try:
        assert gateway.wait_exit(START_S) == 1
    finally:
        gateway.kill()
    assert "starting once more" not in gateway.text()
    assert "See root cause above" not in gateway.text().splitlines()[-1]
