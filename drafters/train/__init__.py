"""Training of the embedded target and of its draft heads."""
