"""What a run says on the console about itself: what is projected, and what went wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.methods import SSF, FedAvg

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
CLIENTS = [(X[n : n + 15], Y[n : n + 15]) for n in range(0, 60, 15)]
TEST: dict[str, Any] = {"test": (X, Y), "rounds": 3, "eval_every": 3, "batch_size": 15}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def test_the_first_line_says_how_much_is_projected(capsys: pytest.CaptureFixture[str]) -> None:
    fedspan.fit(small(), CLIENTS, method=SSF(rank=0.1, lr=0.1), **TEST)
    told = capsys.readouterr().err
    assert "0 of 178 parameters are projected, 178 values are sent up" in told
    assert "ssf has nothing to gain here, because biases" in told
    wide = nn.Sequential(nn.Linear(8, 80), nn.ReLU(), nn.Linear(80, 2))
    fedspan.fit(wide, CLIENTS, method=SSF(rank=0.25, lr=0.1), **TEST)
    told = capsys.readouterr().err
    assert "640 of 882 parameters are projected, 402 values are sent up" in told
    assert "nothing to gain" not in told


def test_a_comparison_says_the_same() -> None:
    found = fedspan.compare(
        {"SSF": SSF(rank=0.1, lr=0.1), "FedAvg": FedAvg(lr=0.1)}, small(), CLIENTS, seeds=2, **TEST
    )
    assert "SSF projects none of the 178 parameters and has nothing to gain" in found.verdict()
    assert "0 of 178" in found._repr_html_()
    assert "This is over seeds, all measured on the same 60 test examples" in found.verdict()


def test_an_event_is_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    clients = [*CLIENTS[:3], (CLIENTS[3][0] * 1e6, CLIENTS[3][1])]
    result = fedspan.fit(
        nn.Linear(8, 2), clients, method=FedAvg(lr=0.01), progress=False, **TEST | {"rounds": 4}
    )
    events = [event for line in result.history for event in line.get("events", ())]
    assert len(events) > 1
    told = [record.getMessage() for record in caplog.records if record.name == "fedspan"]
    assert len(told) == 1
    assert told[0].startswith("round 0: client 3: reply left out: its norm, ")


def test_events_of_a_comparison_are_printed_and_on_its_page(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [*CLIENTS[:3], (CLIENTS[3][0] * 1e6, CLIENTS[3][1])]
    found = fedspan.compare(
        {"A": FedAvg(lr=0.01)}, nn.Linear(8, 2), clients, seeds=1, progress=False, **TEST
    )
    assert not caplog.records
    for text in (found.page(tmp_path / "index.html").read_text(), str(found), found._repr_html_()):
        assert "A, seed 0: round 0: client 3: reply left out" in text


class Partly(nn.Module):
    """The first input is normalized, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(1), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.norm(x[:, :1]), x[:, 1:]], 1))


def test_events_of_every_kind_are_printed() -> None:
    """One client's gradients are far too large, another's running statistics."""
    large = torch.ones(2, 8)
    large[0, 1] = large[1, 0] = 1e6
    clients = [(x * large[n], y) for n, (x, y) in zip((0, 1), CLIENTS[2:], strict=True)]
    found = fedspan.compare(
        [FedAvg(lr=0.01)], Partly(), [*CLIENTS[:2], *clients], seeds=1, progress=False, **TEST
    )
    assert "client 2: reply left out: its norm" in str(found)
    assert "client 3: reply left out: the norm of its buffers" in str(found)
