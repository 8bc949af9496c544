"""Runs across a channel in one process, in the open and with secure sums, and what their clients keep."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.privacy import Privacy
from fedspan.engine.loop import Loop, cohort_of
from fedspan.remote.client import RemoteClient
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain
from support.channel import LocalChannel, remote

SSF = {"projector": {"name": "coordinate", "rank": 4}}
FINE = Privacy(secure=True, secure_bits=64)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of real ones would take minutes."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def secure(
    method: Any, problem: Any, states_dir: Path, **options: Any
) -> tuple[Loop, LocalChannel, RemoteTransport]:
    """A run of four clients per round."""
    privacy = options.pop("secure", FINE)
    chain = Chain(method, secure=privacy)
    loop, channel, end = remote(method, problem, states_dir, chain=chain, backup=False, **options)
    weighted = problem.weights is not None
    channel.kind = functools.partial(RemoteClient, secure=privacy, weighted=weighted)
    loop.clients_per_round = 4
    return loop, channel, end


def uneven(problem: Any) -> None:
    """Clients with 1 to 7 examples, as far as weights go."""
    problem.counts = np.arange(1, 8)
    problem.weights = problem.counts / 28


def ids_of(loop: Loop, t: int) -> list[int]:
    ids: list[int] = cohort_of(loop.seeds, loop.problem.clients, 4, t)[0].tolist()
    return ids


def state_of(channel: LocalChannel, end: RemoteTransport, client: int) -> Any:
    """A client's state from its own file."""
    file, fingerprint = channel.client(client).state_file, end.agreement.of_states
    return file.load(int(end.accepted[client]), int(end.marks[client]), fingerprint).state


def controls(channel: LocalChannel, end: RemoteTransport) -> torch.Tensor:
    """c_i of every client from its own file."""
    zero = torch.zeros_like(channel.problem.x0[0])
    count = range(channel.problem.clients)
    return torch.cat([state_of(channel, end, i).c[0] if end.accepted[i] else zero for i in count])
