"""What builds the embedded models: corpus, tokenizer, target, and prompts for their heads."""

from pathlib import Path

EMBEDDED = Path(__file__).parents[3] / "models" / "embedded"  # what they are built into
