"""How many tokens to draft: cost, acceptance and policy. Standard library only."""
