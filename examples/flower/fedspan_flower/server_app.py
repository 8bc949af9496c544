from pathlib import Path

from fedspan.remote.flower import server_app

app = server_app(Path(__file__).with_name("spec.toml"))
