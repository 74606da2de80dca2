"""K by expected tokens per second: a cost table, an acceptance curve, rare bounded trials."""
