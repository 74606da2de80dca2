"""P-EAGLE and EAGLE-3 heads on vLLM's V2 model runner."""
