"""Acceptance length of a head on prompts: workloads, replay and confidence intervals."""
