"""What a newcomer tried first: a plain metric class, metrics by name, saving, and the step size that was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.core import registry
from fedspan.core.errors import SpecError
from fedspan.methods import FedAvg

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)
CLIENTS = [(X[i::3], Y[i::3]) for i in range(3)]


class Share(fedspan.Metric):
    """The share of examples of class 0, counted without a dataclass."""

    def __init__(self) -> None:
        self.first = self.count = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.first, self.count = self.first + int((targets == 0).sum()), self.count + len(targets)

    def compute(self) -> float:
        return self.first / self.count


def fit(**settings: Any) -> fedspan.Result:
    return fedspan.fit(torch.nn.Linear(8, 4), CLIENTS, **({"method": FedAvg(lr=0.1), "rounds": 2} | settings))


def test_a_metric_by_name_needs_no_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._known["metric"], "share", Share)
    result = fit(test=(X, Y), metrics=["share"])
    assert result.history[-1]["share"] == pytest.approx(float((Y == 0).float().mean()))


def test_one_metric_may_be_a_text() -> None:
    assert "accuracy" in fit(test=(X, Y), metrics="accuracy").history[-1]


def test_metrics_without_data_are_refused() -> None:
    with pytest.raises(SpecError, match="give `test` or `validation`"):
        fit(metrics=["accuracy"])


def test_a_result_is_saved_as_weights_or_as_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"end in \.safetensors, got .*w\.pt"):
        fit().save(tmp_path / "w.pt")
    assert not (tmp_path / "w.pt").exists()


def test_the_step_size_that_was_found_shows() -> None:
    found = fit(method=FedAvg(local_steps=2), rounds=3)
    assert found.lr_search is not None
    assert f"lr={found.lr_search['values']['lr']:.3g} (search: {len(found.lr_search['trials'])} trials, " in repr(found)
    assert "searched" not in repr(fit())
