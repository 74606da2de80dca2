"""All that has to be seen on a GPU, in parts that fit into ten minutes, without a network."""
