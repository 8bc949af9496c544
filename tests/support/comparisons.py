"""A spec for comparisons, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from support.loops import SMALL

GAUSSIAN = {"name": "gaussian", "rank": 3}
BASE: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "method": {"name": "ssf", "lr": 0.02, "local_steps": 2}
    | {"local": {"name": "sgd", "momentum": 0.5}, "space": GAUSSIAN, "drift": {"name": "controls"}},
    "task": SMALL,
    "batch_size": 4,
    "clients_per_round": 3,
}


def spec_file(place: Path, name: str = "base.toml", **changes: Any) -> Path:
    path = place / name
    path.write_text(tomli_w.dumps(BASE | changes))
    return path
