"""The training of a head: its first weights, losses, updates and the loop over them."""
