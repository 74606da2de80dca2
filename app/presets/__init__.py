"""One TOML file per target and head: settings, and a table `about` of what is known of the pair."""
