"""A federated model over tables: `spec.toml` beside this package says how it is trained."""
