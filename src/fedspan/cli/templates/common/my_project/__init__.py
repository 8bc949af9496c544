"""A federated model: `task.py` has the model and the data, `spec.toml` beside this package how it is trained."""
