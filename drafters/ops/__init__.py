"""The drafting path's own tensor operations; `reference` specifies those that have kernels."""
