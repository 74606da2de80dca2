"""Admission of requests: API keys, rate limits, the queue for the engine. No vllm, no HTTP."""
