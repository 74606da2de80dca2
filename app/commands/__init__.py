"""Options of the `aerie` command, and those of its commands that need no gateway."""
