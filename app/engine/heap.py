"""What lives as long as the engine, kept from Python's garbage collector.

vLLM, torch and transformers leave more than 600,000 objects behind in the gateway's process. A full
collection walks them all: 0.3 to 0.6 s in which no stream moves and nobody is answered, whenever
enough requests have come and gone (bench/LOG.md). vLLM's own server freezes its heap for the same
reason (vllm/utils/gc_utils.py), and so do its engine core and its workers on a GPU.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect once, then take what is left for permanent. Again for the next engine: what the one
    before has left behind is collected then."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
