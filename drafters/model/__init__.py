"""Draft heads as plain torch modules, and their checkpoint formats."""
