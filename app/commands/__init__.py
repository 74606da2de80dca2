"""What commands of `aerie` are made of: their options, and commands that need no gateway."""
