"""What builds the embedded models: corpus, tokenizer, target, and prompts for their heads."""
