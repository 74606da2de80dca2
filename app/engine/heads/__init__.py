"""Generations of the draft head in service: which one drafts, and trials of new ones."""
