"""A comparison is continued only with what it was begun with: other code or data of the user's is run again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

import fedspan
from fedspan.core import registry
from fedspan.core.plugins import load_plugin
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.study import conduct
from fedspan.study.jobs import _of_tasks, fingerprint
from fedspan.study.request import requested
from support.comparisons import spec_file

METHOD = """
from dataclasses import dataclass
import fedspan
from fedspan.methods.fedavg import FedAvg

SCALE = {scale}

@fedspan.register
@dataclass(frozen=True, kw_only=True)
class Scaled(FedAvg):
    def rate(self, rnd):
        return SCALE * super().rate(rnd)
"""
MODULE = """
import torch

def model():
    return torch.nn.Linear(3, 2)

def data(client):
    return torch.full((8, 3), {value}), torch.arange(8) % 2

test = lambda: data(0)
"""


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    registry._known["method"].pop("scaled_method", None)
    sys.modules.pop("scaled_method", None)
    _forget_module()


def _forget_module() -> None:
    _of_tasks.clear()
    for name in [name for name in sys.modules if name.startswith("fedspan_custom")]:
        del sys.modules[name]


def make(path: Path, out: Path, **options: Any) -> None:
    """A comparison is made or continued."""
    study = requested(path, seeds=1, **options)
    conduct.conduct(study, out, resume=True, line="", console=Console(quiet=True))


def runs(out: Path) -> set[str]:
    return {path.parent.parent.name for path in (out / "runs").rglob(history.NAME)}


@pytest.mark.usefixtures("clean")
def test_a_plugin_that_changed_is_run_again_and_the_others_are_not(tmp_path: Path) -> None:
    plugin, out = tmp_path / "scaled_method.py", tmp_path / "out"
    for scale in (1.0, 1.0, 0.5):
        plugin.write_text(METHOD.format(scale=scale))
        load_plugin(plugin)
        before = runs(out)
        make(spec_file(tmp_path), out, methods=["fedavg,scaled_method"])
    added = runs(out) - before
    assert [name.partition("-")[0] for name in added] == ["scaled_method"]


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("change", ["data", "source"])
def test_a_data_module_that_changed_is_run_again(change: str, tmp_path: Path) -> None:
    module, out, spec = tmp_path / "own.py", tmp_path / "out", tmp_path / "spec.toml"
    task = {"name": "custom", "module": str(module), "clients": 2}
    spec.write_text(
        tomli_w.dumps({"rounds": 2, "method": {"name": "fedavg", "lr": 0.1}, "task": task})
    )
    texts = [MODULE.format(value=1.0)] * 2
    texts += [
        MODULE.format(value=2.0)
        if change == "data"
        else MODULE.format(value=1.0) + "# another line\n"
    ]
    for text in texts:
        module.write_text(text)
        _forget_module()
        make(spec, out)
    assert len(runs(out)) == 2


def test_what_comes_with_fedspan_has_no_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(Spec.load(spec_file(tmp_path))) == ""
    assert runs(tmp_path) == set()


@pytest.mark.usefixtures("clean")
def test_a_methods_own_memory_is_compared(tmp_path: Path) -> None:
    """A plugin that holds d numbers in every local step is not shown with the memory of FedAvg."""
    from support.digits import CLIENTS, MODEL, SETTINGS

    path = tmp_path / "scaled_method.py"
    path.write_text(METHOD.format(scale=1.0) + HOLDS)
    load_plugin(path)
    methods = {"own": {"name": "scaled_method", "lr": 0.1}, "FedAvg": {"name": "fedavg", "lr": 0.1}}
    own, plain = fedspan.compare(methods, MODEL, CLIENTS, rounds=2, seeds=1, **SETTINGS).rows
    size = 4 * sum(p.numel() for p in MODEL.parameters())
    assert own["client_memory_bytes"] - plain["client_memory_bytes"] == size


HOLDS = """
    def client_step(self, client, down, f, rnd):
        pull = 0.1 * down.x
        y = self.descend(down.x, f.direction(pull), self.rate(rnd))
        state, up = super().client_step(client, down, f, rnd)
        return state, up
"""
