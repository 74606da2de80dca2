"""Prompts: the embedded workloads, and published data sets read from files."""
