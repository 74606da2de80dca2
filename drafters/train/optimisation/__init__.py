"""The training of a head: its initial weights, losses, updates and the training loop."""
