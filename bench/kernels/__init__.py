"""The drafting path's operations beside vLLM's own: arms to time, and the clock."""
