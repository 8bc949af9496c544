from pathlib import Path

from fedspan.remote.flower import client_app

app = client_app(Path(__file__).with_name("spec.toml"))
