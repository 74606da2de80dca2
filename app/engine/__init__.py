"""The vLLM engine behind the gateway: options, life cycle, proof of drafting, protocol adapter.

Together with `drafters.vllm` this is the only package that imports vllm, and it does so
lazily: the HTTP side answers /livez and /readyz while vllm is still being imported.
"""
