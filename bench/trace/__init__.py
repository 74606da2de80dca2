"""A moving load: the time that adaptive K and every fixed K take for the same requests."""
