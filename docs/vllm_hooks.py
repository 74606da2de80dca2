"""Write docs/vllm-hooks.md from drafters/vllm/hooks.py: python -m docs.vllm_hooks"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from drafters.vllm.hooks import HOOKS, PUBLIC, Hook

PAGE = Path(__file__).with_name("vllm-hooks.md")
TEXT = """\
# Hooks into vLLM

Made from `drafters/vllm/hooks.py` by `python -m docs.vllm_hooks`; a test keeps it so.

vLLM is not forked. Where it has a place for somebody else's code, that is used: a plugin, the
options `worker_cls` and `scheduler_cls`, its registries of models and of speculators'
configurations, subclasses of its engine client. Where it has none, its code is replaced or a
private method is overridden. Each such place is a hook, which a new release of vLLM may break. Most
are there so that [draft heads](glossary.md#draft-head) run with a [K](glossary.md#k) that changes
at every step.

    python -m drafters.vllm.hooks     # checks every hook against the vLLM that is installed

The engine does not start on another vLLM than the one it is made for, and then names the hooks
that this one breaks. There are {patches} patches and {private} private methods. The gateway's own
subclasses of vLLM's serving classes (`app/serving`, `app/llm`) are not among them. Below, vLLM's
names come without `vllm.` before them.

## Patches

vLLM's function is replaced in each of its processes (`drafters/vllm/patches.py`).

{patch_rows}
## Private methods

Overridden in subclasses that vLLM is told to use.

{private_rows}
## Public methods

Overridden in the same subclasses, {public} of them. They are listed because their parameters matter
as much; a new vLLM seldom changes them.

{public_rows}"""


def counts() -> dict[str, int]:
    """Kind of hook -> number of vLLM's functions and methods."""
    found = {"patch": 0, "private": 0, "public": 0}
    for hook in HOOKS:
        found[hook.kind] += len(hook.targets)
    return found


def page() -> str:
    """The page as it should be."""
    found = counts()
    rows = {
        f"{kind}_rows": "\n".join(_entry(hook) for hook in HOOKS if hook.kind == kind)
        for kind in found
    }
    counted = {"patches": found["patch"], "private": found["private"], "public": found["public"]}
    return TEXT.format(**counted, **rows).rstrip() + "\n"


def _entry(hook: Hook) -> str:
    """What replaces it and why, when it can go, and vLLM's names."""
    until = "" if hook.until == PUBLIC else f" Until: {hook.until}"
    text = f"**`{hook.ours.replace(':', '.')}`**: {hook.why}{until}"
    names = (target.replace(":", ".").removeprefix("vllm.") for target in hook.targets)
    places = [f"`{name}`" for name in names]
    lines = [_wrapped("- ", text), *(_wrapped("  - ", place) for place in places)]
    return "\n".join(lines) + "\n"


def _wrapped(mark: str, text: str) -> str:
    return fill(
        text, 100, initial_indent=mark, subsequent_indent=" " * len(mark),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(" ".join(f"{kind}: {count}" for kind, count in counts().items()))
