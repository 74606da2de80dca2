"""The training data of a head: prompts, the target's responses and its hidden states."""
