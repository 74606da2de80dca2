"""`aerie prompts`: the target writes user turns itself, as prompts to train a head on."""
