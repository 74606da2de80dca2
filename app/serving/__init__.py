"""vLLM's serving classes and request models, corrected, behind one adapter."""
