"""Benchmarks: load generator, sweeps, reports, and benches of single parts; results in LOG.md."""
