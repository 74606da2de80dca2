"""No subclass of a class of vLLM gives another meaning to an attribute that vLLM has there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache

import app.llm
import app.serving
import drafters.vllm
from tests.drafters.vllm.test_hooks import MIXED_INTO

PACKAGES = (app.llm, app.serving, drafters.vllm)
# "Class.attribute" -> what it is to vLLM, and is here too.
SAME_MEANING = {
    "ChatCorrections.parser_cls": "the class of the parser, with this project's corrections",
    "DeferringSpeculator.draft_max_seq_len": "longest text that a pass attends to, at each pass",
    "DeferringSpeculator.max_model_len": "longest request, which the runner may have lowered",
    "DraftingScheduler.dynamic_sd_lookup": "from batch size to K; `_choose` replaces what it gives",
    "DraftingScheduler.num_lookahead_tokens": "slots behind a step that its drafts need",
    "DraftingScheduler.vllm_config": "a copy, whose K is the one that a step is charged for",
    "DraftingWorker.model_runner": "the runner, with this project's corrections",
    "HermesToolParser._sent_content_idx": "end of the text that a stream has sent",
    "ParallelSpeculator.num_extra_query_per_req": "tokens of a pass beside those of the step",
    "ParallelSpeculator.num_query_per_req": "tokens of a request in a pass",
    "ParallelSpeculator.supports_mm_inputs": "whether the head is given images itself",
    "Renderer.exclude_tools_when_tool_choice_none": "whether such prompts name no tools",
    "Renderer.parser": "the class of the parser, with this project's corrections",
    "ResponsesServing.parser": "the class of the parser, with this project's corrections",
    "V1DraftingRunner.drafter": "what drafts",
    "V2DraftingRunner.rejection_sampler": "what verifies drafts",
    "V2DraftingRunner.speculator": "what drafts",
}


@cache
def assigned(kind: type) -> frozenset[str]:
    """Attributes that the methods of a class assign to `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def classes() -> Iterator[tuple[type, tuple[type, ...]]]:
    """Our classes, each with the classes of vLLM whose attributes its instances have."""
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(found.name)
            for name, kind in vars(module).items():
                if not isinstance(kind, type) or kind.__module__ != found.name:
                    continue
                short = f"{found.name.removeprefix('drafters.vllm.')}:{name}"
                for base in MIXED_INTO.get(short, (kind,)):
                    yield kind, tuple(each for each in base.__mro__ if package_of(each) == "vllm")


def package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def shadowed(ours: type, theirs: type) -> set[str]:
    """Attributes of vLLM's class that ours sets anew. Methods that override others are in the table
    of hooks."""
    names = {name for name in vars(ours) if not name.startswith("__")}
    return (assigned(ours) & (assigned(theirs) | vars(theirs).keys())) | (names & assigned(theirs))


def test_an_attribute_of_vllms_keeps_its_meaning() -> None:
    """The fault: the policy that chooses K was `Scheduler.policy`, by which vLLM's scheduler
    decides whom it preempts."""
    found = {
        f"{ours.__name__}.{name}"
        for kind, bases in classes()
        for base in bases
        for ours in kind.__mro__
        if package_of(ours) in ("app", "drafters")
        for name in shadowed(ours, base)
    }
    assert found == SAME_MEANING.keys()
