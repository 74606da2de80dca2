"""What a head is trained on: prompts, the target's responses and its hidden states."""
