"""The methods of a comparison, by the names they have on the command line.

    none       vLLM's own server without speculation
    eagle3:K   vLLM's own server with the EAGLE-3 head
    vllm:K     vLLM's own server with the P-EAGLE head
    plain      this gateway, started without a head (--k 0)
    off        this gateway, objective off: a head is loaded, nothing is drafted
    k:K        this gateway, objective fixed
    adaptive   this gateway, objective throughput, drafts of every source that it has
    adaptive:S the same with drafts of some sources: head, lookup or grammar, joined by +
    ours-eagle3:K, ours-eagle3:off, ours-eagle3:adaptive
               this gateway with the EAGLE-3 head
    other:NAME a server of OpenAI's API that runs already: --attach NAME=URL

`off`, `k:K` and `adaptive` share one gateway, started with the largest K; a PATCH of
/v1/speculation switches between them. `ours-eagle3` has a gateway of its own, with the same K.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drafters.config import SOURCES

Kind = Literal["none", "eagle3", "vllm", "plain", "off", "k", "adaptive", "other"]
DEFAULT = "none,eagle3:3,off,k:1,k:3,k:5,k:7,adaptive"
GATEWAY = "gateway"
OURS_EAGLE3 = "ours-eagle3"  # prefix of methods, and name of their gateway
_WITH_K = ("eagle3", "vllm", "k")
RUN = secrets.token_hex(4)  # names the run of this process in a server's prefix cache


def cache_salt(*cell: object) -> dict[str, str]:
    """The field of a request with which it finds only the prompts of its own `cell` and run in a
    prefix cache."""
    return {"cache_salt": " ".join(map(str, (RUN, *cell)))}


@dataclass(frozen=True, slots=True)
class Method:
    """One of the methods that are compared."""

    kind: Kind
    k: int = 0
    title: str = ""  # the server's name, for kind "other" only
    # The head that a gateway drafts with if it is not its `drafter` setting.
    head: Literal["", "eagle3"] = ""
    sources: tuple[str, ...] = ()  # of drafts, for kind "adaptive" only; all if there are none

    @property
    def name(self) -> str:
        """The method's name on the command line and in results."""
        if self.kind == "other":
            return f"other:{self.title}"
        if self.head:
            return f"{OURS_EAGLE3}:{self.k or self.kind}"
        if self.sources:
            return f"{self.kind}:{'+'.join(self.sources)}"
        return f"{self.kind}:{self.k}" if self.kind in _WITH_K else self.kind

    @property
    def label(self) -> str:
        """The method's name in tables."""
        label = {
            "none": "none",
            "eagle3": f"EAGLE-3 K={self.k}",
            "vllm": f"vLLM P-EAGLE K={self.k}",
            "plain": "gateway, no head",
            "off": "K=0",
            "k": f"K={self.k}",
            "adaptive": f"adaptive {'+'.join(self.sources)}".strip(),
            "other": self.title,
        }[self.kind]
        return f"our EAGLE-3 {label}" if self.head else label

    @property
    def server(self) -> str:
        """Name of the server that it runs on; methods of one gateway share a server."""
        if self.kind == "other":
            return self.title
        if self.head:
            return OURS_EAGLE3
        return GATEWAY if self.kind in ("off", "k", "adaptive") else self.name

    @property
    def ours(self) -> bool:
        """Whether it runs on this gateway, not on another server."""
        return self.server in (GATEWAY, OURS_EAGLE3) or self.kind == "plain"

    def cache_fields(self, *cell: object) -> dict[str, str]:
        """Fields of a request that keep what it caches of prompts from the requests of any other
        method, `cell` or run; none for servers that are not this gateway. Without them, the method
        that asks first reads the prompts for all that ask the same after it."""
        return cache_salt(self.name, *cell) if self.ours else {}

    @property
    def changes(self) -> dict[str, Any] | None:
        """Body of the PATCH that switches to the method; None if its server has no other one."""
        if self.kind == "k":
            return {"objective": "fixed", "k": self.k}
        changes: dict[Kind, dict[str, Any]] = {
            "off": {"objective": "off"},
            # A gateway keeps its sources where a PATCH does not name them; none stands for all.
            "adaptive": {"objective": "throughput", "sources": list(self.sources)},
        }
        return changes.get(self.kind)


def parse(text: str) -> list[Method]:
    """Parse methods such as `none,k:3,adaptive`. Raises ValueError naming what is wrong."""
    methods = [_one(part.strip()) for part in text.split(",") if part.strip()]
    if not methods:
        raise ValueError("no methods")
    if len(set(methods)) < len(methods):
        raise ValueError(f"a method twice in {text!r}")
    return methods


def _one(text: str) -> Method:
    kind, colon, k = text.partition(":")
    if kind == OURS_EAGLE3:
        if k in ("off", "adaptive"):
            return Method(k, head="eagle3")  # type: ignore[arg-type]
        if not re.fullmatch(r"[1-9][0-9]?", k):
            raise ValueError(f"{text!r}: give K, off or adaptive, like {OURS_EAGLE3}:3")
        return Method("k", int(k), head="eagle3")
    if kind in _WITH_K:
        if not re.fullmatch(r"[1-9][0-9]?", k):
            raise ValueError(f"{text!r}: give K, like {kind}:3")
        return Method(kind, int(k))  # type: ignore[arg-type]
    if kind == "other":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", k):
            raise ValueError(f"{text!r}: name the attached server, like other:llama.cpp")
        return Method("other", title=k)
    if kind == "adaptive" and colon:
        sources = tuple(k.split("+"))
        if len(set(sources)) < len(sources) or not set(sources) <= set(SOURCES):
            raise ValueError(f"{text!r}: give some of {', '.join(SOURCES)}, like adaptive:head")
        return Method("adaptive", sources=sources)
    if colon or kind not in ("none", "plain", "off", "adaptive"):
        known = (
            "none, eagle3:K, vllm:K, plain, off, k:K, adaptive, adaptive:SOURCES, ours-eagle3:K, "
            "other:NAME"
        )
        raise ValueError(f"no method {text!r}: {known}")
    return Method(kind)  # type: ignore[arg-type]


def servers(methods: Iterable[Method]) -> dict[str, list[Method]]:
    """Server -> its methods, in the order given."""
    found: dict[str, list[Method]] = {}
    for method in methods:
        found.setdefault(method.server, []).append(method)
    return found


def largest_k(methods: Sequence[Method]) -> int:
    """The largest K of these methods, with which gateways are started; 0 if none has a K."""
    return max((method.k for method in methods if method.kind == "k"), default=0)
