"""The engine's options, from the settings and this machine."""
