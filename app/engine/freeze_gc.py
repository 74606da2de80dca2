"""Keeps objects that live as long as the engine out of Python's garbage collections.

vLLM, torch and transformers leave more than 600,000 objects behind in the gateway's process. A full
collection walks them all: 0.3 to 0.6 s in which no stream moves and nobody is answered, whenever
enough requests have come and gone (bench/LOG.md). vLLM's own server freezes its heap for the same
reason (vllm/utils/gc_utils.py), and so do its engine core and its workers on a GPU.
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Collect garbage once, then freeze the survivors out of later collections.

    Called again for the next engine, which then collects what the engine before it left behind.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
