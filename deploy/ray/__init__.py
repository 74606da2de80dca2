"""Gateways behind Ray Serve: see docs/scale.md."""
