"""A Flower app that runs spec.toml."""
