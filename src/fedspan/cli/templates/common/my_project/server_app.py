"""The server of a Flower deployment: `flwr run`."""

from pathlib import Path

from fedspan.remote.flower import server_app

app = server_app(Path(__file__).parents[1] / "spec.toml")
