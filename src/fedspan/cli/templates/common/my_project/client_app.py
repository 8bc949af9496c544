"""The client of a Flower deployment: `flwr run`."""

from pathlib import Path

from fedspan.remote.flower import client_app

app = client_app(Path(__file__).parents[1] / "spec.toml")
