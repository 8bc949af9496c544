"""The logger `fedspan`: what a run reports can be redirected or silenced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fedspan

CLIENTS = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(3)]
LOG = logging.getLogger("fedspan")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    yield LOG
    LOG.handlers.clear()
    LOG.setLevel(logging.NOTSET)


def fit(**more: Any) -> None:
    given: dict[str, Any] = {"method": {"name": "fedavg", "lr": 0.1}, "rounds": 2}
    outputs = 1 if "loss" in more else 2
    fedspan.fit(torch.nn.Linear(3, outputs), CLIENTS, test=CLIENTS[0], **given | more)


def test_lines_are_printed_as_ever(logger: logging.Logger, capsys: Any) -> None:
    fit()
    assert "round 2/2  loss" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the run of seed")
def test_a_handler_gets_lines_and_divergence_in_their_place(logger: Any, capsys: Any) -> None:
    handler = Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fit()
    assert "round 2/2" not in capsys.readouterr().err
    assert any(line.startswith("round 2/2  loss") for _, line in handler.lines)
    assert {level for level, _ in handler.lines} == {"INFO"}
    fit(method={"name": "fedavg", "lr": 1e15}, rounds=9, loss=torch.nn.MSELoss())
    assert any(level == "WARNING" and "diverged" in line for level, line in handler.lines)


def test_a_level_silences_lines(logger: logging.Logger, capsys: Any) -> None:
    logger.setLevel(logging.WARNING)
    fit()
    assert capsys.readouterr().err == ""
