"""Calls that fail: what they leave behind, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan


def data(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, 3, generator=draw) for _ in range(3)]
    return [(one, (one[:, 0] > 0).long()) for one in inputs]


def fit(run_dir: Path | None = None, model: nn.Module | None = None, **settings: Any) -> fedspan.Result:
    torch.manual_seed(0)
    settings = {"method": {"name": "fedavg", "lr": 0.1}, "rounds": 2, "test": data(1)[0], "progress": False} | settings
    return fedspan.fit(model or nn.Linear(3, 2), data(), run_dir=run_dir, **settings)


class Raises(fedspan.Callback):
    """A callback with a mistake in one of its functions."""

    def __init__(self, where: str) -> None:
        setattr(self, where, self.fail)

    def fail(self, *_: Any) -> None:
        raise ZeroDivisionError("a mistake")


def none(outputs: Any, targets: Any) -> Any:
    return None


BAD: dict[str, dict[str, Any]] = {
    "metric": {"metrics": ["r2"]},
    "none": {"metrics": [none]},
    "early_stopping": {"callbacks": [fedspan.callbacks.EarlyStopping("acuracy")]},
    "callback": {"callbacks": [Raises("on_run_start")]},
    "states": {"callbacks": [Raises("on_run_start")], "method": {"name": "scaffold", "lr": 0.1}},
    "search": {"callbacks": [Raises("on_run_start")], "method": {"name": "fedavg", "lr": "search"}},
    "seeds": {"callbacks": [Raises("on_run_start")], "seeds": 2},
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_fails_before_its_first_round_leaves_nothing(name: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", dict(BAD[name])
    if name == "states":
        settings["engine"] = fedspan.Engine(states_dir=str(tmp_path / "states"))
    with pytest.raises(Exception):  # noqa: B017, PT011
        fit(out, **settings)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    settings.pop("callbacks", None)
    settings.pop("metrics", None)
    assert fit(out, **settings).finished


def test_a_failed_call_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[Raises("on_run_start")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
