"""Parallel drafting: heads, training, control and the vLLM integration."""
