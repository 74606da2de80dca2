"""Prompts: the embedded workloads, installed sets, and published ones read from files."""
