"""Other people's tools, each in an environment of its own, against a gateway over HTTP.

`python -m tests.clients.environments DIR` makes the environments, AERIE_CLIENTS=DIR names them.
What is not there is skipped by name. What was run is in docs/clients.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.engine.conftest import TARGET

from .environments import NODE, PYTHON

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = os.environ.get("AERIE_CLIENTS")
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


def test_lm_eval(base: str, tmp_path: Path) -> None:
    """local-completions over a task of its own: nothing is downloaded."""
    python = environment("lm-eval") / "bin" / "python"
    (tmp_path / "data.jsonl").write_text('{"question": "Hi", "answer": "Hello"}\n' * 3)
    (tmp_path / "task.yaml").write_text(
        f"""
task: greeting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
    )
    arguments = f"model=stand-in,base_url={base}/v1/completions,tokenizer={TARGET},num_concurrent=2"
    printed = run(
        [str(python), "-m", "lm_eval", "--model", "local-completions", "--tasks", "greeting",
         "--include_path", str(tmp_path), "--model_args", arguments],
        tmp_path, HF_HOME=str(tmp_path), HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    assert "exact_match" in printed


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


def test_aiperf(base: str, tmp_path: Path) -> None:
    aiperf = environment("aiperf") / "bin" / "aiperf"
    printed = run(
        [str(aiperf), "profile", "--model", "stand-in", "--url", base, "--endpoint-type", "chat",
         "--streaming", "--tokenizer", str(TARGET), "--request-count", "4", "--concurrency", "2",
         "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--ui", "none"],
        tmp_path, HF_HOME=str(tmp_path), COLUMNS="200",
    )  # fmt: skip
    assert "Request Throughput" in printed


def test_promptfoo(base: str, tmp_path: Path) -> None:
    folder = environment("promptfoo")
    options = {"apiBaseUrl": f"{base}/v1", "apiKey": "none", "max_tokens": 16}
    config = {
        "prompts": ["Say {{word}}"],
        "providers": [{"id": "openai:chat:stand-in", "config": options}],
        "tests": [{"vars": {"word": "hi"}, "assert": [{"type": "contains", "value": "Hello"}]}],
    }
    file = tmp_path / "promptfooconfig.json"
    file.write_text(json.dumps(config))
    run(
        ["node", str(folder / "node_modules" / ".bin" / "promptfoo"), "eval", "--no-cache",
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
    import httpx

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
