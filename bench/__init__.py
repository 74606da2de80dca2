"""Measurements: load generator, sweeps, reports, and benches of single parts (LOG.md)."""
