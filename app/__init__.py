"""The gateway: OpenAI-compatible HTTP around an in-process vLLM engine."""
