"""vLLM's AsyncLLM, corrected, and what is measured where every request passes."""
