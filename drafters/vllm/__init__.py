"""The only package of `drafters` that imports vllm: what runs inside the engine's processes."""
