"""User turns that the target writes itself, as prompts to train a head on: `aerie prompts`."""
