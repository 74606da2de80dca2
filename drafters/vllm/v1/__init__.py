"""P-EAGLE and EAGLE-3 heads on vLLM's V1 model runner."""
