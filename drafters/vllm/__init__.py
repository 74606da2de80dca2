"""The only room of `drafters` that imports vllm: what runs inside the engine's processes."""
