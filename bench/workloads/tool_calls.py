"""Tool calls: an editor's agent is shown a file and has to call one of its tools.

The tools are strict, and in turn any of them has to be called (`tool_choice` required) or the one
that is named. The server needs a tool parser (`--tool-call-parser`). The tools are described in the
system's turn too, since chat templates of small models leave them out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from bench.workloads.code_edits import source_files
from bench.workloads.embedded import fenced
from bench.workloads.prompt import Prompt

_TEXT, _NAME = ({"type": "string", "maxLength": most} for most in (120, 60))
_LINE = {"type": "integer", "minimum": 1, "maximum": 999}


def _tool(name: str, description: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "strict": True, "parameters": schema}


TOOLS = (
    _tool("read_file", "Read lines of a file.", path=_NAME, first_line=_LINE, last_line=_LINE),
    _tool(
        "rename_function", "Rename a function in a file.",
        path=_NAME, old_name=_NAME, new_name=_NAME, update_callers={"type": "boolean"},
    ),
    _tool(
        "insert_comment", "Insert a comment above a line of a file.",
        path=_NAME, above_line=_TEXT, comment=_TEXT,
    ),
    _tool(
        "search_code", "Search a pattern in the files of a folder.",
        pattern=_NAME, folder=_NAME, scope={"enum": ["names", "text", "comments"]},
        case_sensitive={"type": "boolean"},
    ),
    _tool(
        "run_tests", "Run tests of a module.",
        module=_NAME, tests={"type": "array", "items": _NAME, "maxItems": 3},
        stop_at_first_failure={"type": "boolean"},
    ),
)  # fmt: skip
_SYSTEM = "You are an agent in a code editor. Answer with one call of a tool. The tools are:\n" + (
    "\n".join(
        json.dumps({name: tool[name] for name in ("name", "description")})
        + f" with {', '.join(tool['parameters']['properties'])}"
        for tool in TOOLS
    )
)
_REQUESTS = (
    "Read the lines of {path} that hold {name}.",
    "Rename the function {name} in {path} to {name}_renamed, and its callers.",
    "Insert the comment `{name} begins here` above the line `{line}` of {path}.",
    "Search the callers of {name} in the folder of {path}.",
    "Run the tests of {module} that call {name}.",
)


def tool_calls() -> list[Prompt]:
    """A prompt for each file; requests for the five tools take turns. Raises ValueError without
    HumanEval's package."""
    prompts = []
    for number, file in enumerate(source_files()):
        name, line = _definition(file)
        module = f"{name.strip('_').lower()}_module"
        request = _REQUESTS[number % len(TOOLS)].format(
            name=name, line=line, module=module, path=f"src/{module}.py"
        )
        content = f"src/{module}.py is:\n{fenced(file)}\n{request}"
        chosen = TOOLS[number % len(TOOLS)]["name"]
        named = {"type": "function", "function": {"name": chosen}}
        prompts.append(
            Prompt(
                messages=(
                    {"role": "system", "content": _SYSTEM},
                    {"role": "user", "content": content},
                ),
                extra_body={
                    "tools": [{"type": "function", "function": tool} for tool in TOOLS],
                    "tool_choice": named if number // len(TOOLS) % 2 else "required",
                    "parallel_tool_calls": False,
                },
            )
        )
    return prompts


def _definition(file: str) -> tuple[str, str]:
    """Name of a file's last function, and the line that defines it."""
    line = [line for line in file.splitlines() if line.startswith("def ")][-1]
    name = re.match(r"def (\w+)", line)
    assert name is not None, f"a line that defines a function: {line!r}"
    return name[1], line
