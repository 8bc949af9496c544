"""Runs on Flower in one process: its grid, with the client apps behind it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedspan.core.spec import Spec
from fedspan.engine.result import Result
from fedspan.remote import flower
from fedspan.remote.flower import server
from fedspan.remote.flower.records import RunConfig
from support.loops import SMALL, settings

FLOAT32 = settings(5, torch.float32)
SSF = {"name": "ssf", "space": {"name": "gaussian", "rank": 3}, "lr": 0.02, "local_steps": 3}


def spec_of(method: dict[str, Any] = SSF, rounds: int = 6, **others: Any) -> Spec:
    table = {
        "rounds": rounds,
        "eval_every": 2,
        "clients_per_round": 3,
        "batch_size": 4,
        "method": method,
        "task": SMALL,
    }
    return Spec.from_table(table | others)


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made inside one of Flower's own tasks."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


class FakeGrid:
    """Flower's grid with the client apps in this process; node 100 + i stands for client i."""

    def __init__(self, spec: Spec, states_dir: Path) -> None:
        self.app, self.states_dir = flower.client_app(spec), states_dir
        self.clients = {100 + i: i for i in range(SMALL["clients"])}  # type: ignore[call-overload]
        self.waiting: dict[str, Message] = {}
        self.count = 0

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        idents = []
        for message in messages:
            self.count += 1
            ident = f"m{self.count}"
            message.metadata.__dict__["_message_id"] = ident
            idents.append(ident)
            reply = self.answer(message)
            if reply is not None:
                reply.metadata.__dict__["_reply_to_message_id"] = ident
                self.waiting[ident] = reply
        return idents

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        config = {"partition-id": self.clients[node], "states-dir": str(self.states_dir)}
        context = Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )
        found = self.app(message, context)
        assert isinstance(found, Message)
        return found

    def pull_messages(self, idents: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(i) for i in list(idents) if i in self.waiting]


def serve(spec: Spec, grid: Any, run_dir: Path, **config: Any) -> Result:
    config = {"run_dir": str(run_dir), "timeout": 0.5, "wait": 0.0, "pause": 0.0} | config
    return server.serve(spec, grid, RunConfig(**config))


def events_of(result: Result) -> list[str]:
    return [event for row in result.history for event in row.get("events", [])]


def raw(array: np.ndarray) -> Array:
    """An array as fedspan's records hold it."""
    return Array(array.dtype.str, array.shape, "raw", array.tobytes())
