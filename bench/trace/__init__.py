"""A moving load: the same requests for adaptive K and every fixed K, and how long each took."""
