"""What travels to a GPU machine without a network: the source tree and an archive of packages."""
