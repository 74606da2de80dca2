"""Other people's tools, each in an environment of its own, against a gateway over HTTP.

`python -m tests.clients.environments DIR` makes the environments, AERIE_CLIENTS=DIR names them.
What is not there is skipped by name. Tests of what only a model can tell want the address of a
gateway that serves the default model with drafts: AERIE_CLIENTS_URL=http://HOST:PORT. What was run
is in docs/clients.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from drafters.packaged import resolve
from tests.app.fake_engine import TARGET

from .environments import NODE, PYTHON

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = os.environ.get("AERIE_CLIENTS")
URL = os.environ.get("AERIE_CLIENTS_URL")
# The command `vllm` asks for the version of a distribution that the CPU build does not have.
_VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
CLI = ("lm-eval", "guidellm", "aiperf", "promptfoo")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        ENVIRONMENTS is None,
        reason="AERIE_CLIENTS names no folder of environments (docs/clients.md)",
    ),
]


def environment(name: str) -> Path:
    """The folder of a tool's environment. Skips where it could not be had."""
    folder = Path(ENVIRONMENTS or "").resolve() / name
    if not (folder / ".done").exists():
        pytest.skip(f"{name} is not in {ENVIRONMENTS}")
    return folder


@pytest.fixture
def live() -> str:
    """http://HOST:PORT of a gateway with a real engine."""
    if URL is None:
        pytest.skip("AERIE_CLIENTS_URL names no gateway of the default model")
    return URL.rstrip("/")


def run(command: list[str], folder: Path, **variables: str) -> str:
    """What a command printed. It sees nothing of this process's Python, and no proxy."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True,
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in PYTHON if name not in CLI])
def test_a_python_library(base: str, name: str) -> None:
    python = environment(name) / "bin" / "python"
    # From a copy: a script may be called as the package that it imports.
    run([str(python), "-P", str(SCRIPTS / f"{name}.py")], SCRIPTS, BASE=base)


@pytest.mark.parametrize("name", [name for name in NODE if name not in CLI])
def test_a_node_library(base: str, name: str) -> None:
    folder = environment(name)
    script = shutil.copy(SCRIPTS / f"{name}.mjs", folder / "script.mjs")
    run(["node", str(script)], folder, BASE=base)


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK (Debian's default-jdk-headless)")
def test_the_jdk(base: str, tmp_path: Path) -> None:
    """It comes with the system, so it has no environment of its own."""
    run(["java", str(SCRIPTS / "jdk.java")], tmp_path, BASE=base)


LM_EVAL_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""


def lm_eval(
    folder: Path, base: str, model: str, tokenizer: str, name: str, rows: list[Any], more: str
) -> dict[str, Any]:
    """What local-completions finds over a task of its own: nothing is downloaded."""
    python = environment("lm-eval") / "bin" / "python"
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "task.yaml").write_text(LM_EVAL_TASK.format(name=name, folder=folder, more=more))
    arguments = f"model={model},base_url={base}/v1/completions,tokenizer={tokenizer}"
    run(
        [str(python), "-m", "lm_eval", "--model", "local-completions", "--tasks", name,
         "--include_path", str(folder), "--model_args", f"{arguments},num_concurrent=2",
         "--output_path", str(folder / "results")],
        folder, HF_HOME=str(folder), HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    [file] = (folder / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text("utf-8"))["results"][name]
    return results


def test_lm_eval(base: str, tmp_path: Path) -> None:
    rows = [{"question": "Hi", "answer": "Hello"}] * 3
    more = """
output_type: generate_until
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
    found = lm_eval(tmp_path, base, "stand-in", str(TARGET), "greeting", rows, more)
    assert "exact_match,none" in found


def test_lm_eval_log_likelihoods(live: str, tmp_path: Path) -> None:
    """Of two ends of a sentence the model must find the right one likelier."""
    rows = [
        {"question": f"The capital of {country} is", "choices": [city, "banana"], "answer": 0}
        for country, city in (("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"))
    ]
    more = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
    tokenizer = resolve(f"packaged:{served(live)}")
    found = lm_eval(tmp_path, live, served(live), tokenizer, "capitals", rows, more)
    assert found["acc,none"] == 1.0


def served(base: str) -> str:
    """The id of the served model."""
    return str(httpx.get(f"{base}/v1/models").json()["data"][0]["id"])


def test_guidellm(base: str, tmp_path: Path) -> None:
    guidellm = environment("guidellm") / "bin" / "guidellm"
    run(
        [str(guidellm), "run", "--backend", f"kind=openai_http,target={base}",
         "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
         "--tokenizer", f"kind=hf_auto,model={TARGET}",
         "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
         "--output", f"kind=json,path={tmp_path}/report.json",
         "--disable-console-interactive"],
        tmp_path, HF_HOME=str(tmp_path), COLUMNS="200",
    )  # fmt: skip
    assert '"successful": 4' in (tmp_path / "report.json").read_text("utf-8")


def aiperf(folder: Path, base: str, model: str, tokenizer: str, tokens: int) -> dict[str, Any]:
    """What AIPerf writes of four streamed chats."""
    command = environment("aiperf") / "bin" / "aiperf"
    run(
        [str(command), "profile", "--model", model, "--url", base, "--endpoint-type", "chat",
         "--streaming", "--tokenizer", tokenizer, "--request-count", "4", "--concurrency", "2",
         "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", str(tokens),
         "--ui", "none"],
        folder, HF_HOME=str(folder), COLUMNS="200",
    )  # fmt: skip
    [file] = folder.rglob("profile_export_aiperf.json")
    figures: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return figures


def test_aiperf(base: str, tmp_path: Path) -> None:
    figures = aiperf(tmp_path, base, "stand-in", str(TARGET), 8)
    assert figures["request_throughput"]["avg"] > 0


def test_aiperf_tells_acceptance(live: str, tmp_path: Path) -> None:
    model = served(live)
    figures = aiperf(tmp_path, live, model, resolve(f"packaged:{model}"), 48)
    assert figures["spec_decode_acceptance_length"]["avg"] > 1.0
    assert 0.0 < figures["spec_decode_overall_draft_acceptance_rate"]["avg"] <= 100.0


def test_promptfoo(base: str, tmp_path: Path) -> None:
    commands = environment("promptfoo") / "node_modules" / ".bin"
    options = {"apiBaseUrl": f"{base}/v1", "apiKey": "none", "max_tokens": 16}
    config = {
        "prompts": ["Say {{word}}"],
        "providers": [{"id": "openai:chat:stand-in", "config": options}],
        "tests": [{"vars": {"word": "hi"}, "assert": [{"type": "contains", "value": "Hello"}]}],
    }
    file = tmp_path / "promptfooconfig.json"
    file.write_text(json.dumps(config))
    run(
        [str(commands / "node"), str(commands / "promptfoo"), "eval", "--no-cache",
         "--no-progress-bar", "--config", str(file)],
        tmp_path, PROMPTFOO_CONFIG_DIR=str(tmp_path), PROMPTFOO_DISABLE_TELEMETRY="1",
        PROMPTFOO_DISABLE_UPDATE="1",
    )  # fmt: skip


def test_vllm_bench_serve(base: str, tmp_path: Path) -> None:
    printed = run(
        [sys.executable, "-c", _VLLM, "--backend", "openai-chat",
         "--base-url", base, "--endpoint", "/v1/chat/completions", "--model", "stand-in",
         "--tokenizer", str(TARGET), "--dataset-name", "random", "--random-input-len", "16",
         "--random-output-len", "8", "--num-prompts", "4"],
        tmp_path, VLLM_PLUGINS="none", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    assert "Successful requests:" in printed


def test_a_page_of_another_origin(base: str) -> None:
    """What a browser asks before it sends the page's request, and what it looks for after it."""
    origin = {"Origin": "https://page.example"}
    asked = httpx.options(
        f"{base}/v1/chat/completions",
        headers={
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert asked.status_code < 300
    assert "POST" in asked.headers["access-control-allow-methods"]
    answer = httpx.post(
        f"{base}/v1/chat/completions",
        headers=origin,
        json={"model": "stand-in", "messages": [{"role": "user", "content": "Hi"}]},
    )
    assert answer.headers["access-control-allow-origin"] in ("*", origin["Origin"])
