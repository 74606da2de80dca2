"""Who may come in, how much of it at once, and in which order. No vllm, no HTTP."""
