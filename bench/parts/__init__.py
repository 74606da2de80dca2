"""Benches of single parts, each in processes of its own and without a server."""
