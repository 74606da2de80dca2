"""Checks of request bodies before vLLM's request models see them. No vllm import."""
