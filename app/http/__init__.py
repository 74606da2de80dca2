"""HTTP without vLLM: middleware, the state of a request, errors, server-sent events."""
