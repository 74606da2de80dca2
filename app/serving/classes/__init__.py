"""vLLM's serving classes that generate, corrected: a module for each API."""
