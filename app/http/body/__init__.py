"""Request bodies: their limits, their content encoding, their JSON."""
