"""All that has to be seen on a GPU, in parts, without a network."""
