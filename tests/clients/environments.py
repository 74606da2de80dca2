"""Environments of other people's tools, each apart: python -m tests.clients.environments DIR

Made with uv and npm from their registries. `AERIE_CLIENTS=DIR pytest tests/clients` then runs what
is there and skips the others by name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Name -> packages. The scripts of scripts/ have the same names.
PYTHON: dict[str, tuple[str, ...]] = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "langchain-openai": ("langchain-openai",),
    "litellm": ("litellm",),
    "instructor": ("instructor",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "llama-index": ("llama-index-llms-openai-like",),
    "openai-agents": ("openai-agents",),
    "lm-eval": ("lm-eval[api]", "transformers"),
    "guidellm": ("guidellm",),
    "aiperf": ("aiperf",),
}
NODE: dict[str, tuple[str, ...]] = {
    "openai-node": ("openai",),
    "ai-sdk": ("ai", "@ai-sdk/openai", "zod"),
    "promptfoo": ("promptfoo", "node@22"),  # with the Node that it wants, which few systems have
}


def make(folder: Path) -> None:
    """Make what is not there yet; a tool that cannot be had is said and left out."""
    for name, packages in PYTHON.items():
        python = folder / name / "bin" / "python"
        commands = [
            [sys.executable, "-m", "uv", "venv", "--quiet", str(folder / name)],
            [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python),
             *packages],
        ]  # fmt: skip
        _run(name, folder, commands)
    for name, packages in NODE.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
        _run(name, folder, [["npm", "init", "--yes"], install])


def _run(name: str, folder: Path, commands: list[list[str]]) -> None:
    done = folder / name / ".done"
    if done.exists():
        return
    place = folder / name
    for command in commands:
        here = place if command[0] == "npm" else folder
        result = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"{name}: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return
    done.touch()
    print(f"{name}: {place}")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    make(target)
