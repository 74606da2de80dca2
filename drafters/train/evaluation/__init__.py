"""Acceptance length of a head on prompts: workloads, greedy replay, confidence intervals."""
