"""P-EAGLE on vLLM's V2 model runner, which VLLM_USE_V2_MODEL_RUNNER=1 chooses."""
