"""The embedded models from nothing: corpus, tokenizer, target, and the prompts of their heads."""
