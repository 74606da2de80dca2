"""Benches of single parts of an engine or a training step, mostly without a server."""
