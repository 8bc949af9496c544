"""Three hospitals on Flower in one process, each with a table of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedspan.core.spec import Spec
from fedspan.remote import flower
from support.flower import FakeGrid
from support.patients import TABLES

RNG = np.random.default_rng(3)
ILL = {
    who: t.assign(ill=np.where(RNG.random(len(t)) < 0.4, "yes", "no")) for who, t in TABLES.items()
}


def spec_of(folder: Path, **others: Any) -> Spec:
    """A spec in a folder with a table per hospital."""
    for who, table in ILL.items():
        table.drop(columns="hospital").to_csv(folder / f"{who}.csv", index=False)
    data = {"path": str(folder / "h*.csv"), "target": "ill", "categories": ["ward"]}
    table: dict[str, Any] = {
        "rounds": 4,
        "eval_every": 2,
        "eval_clients_every": 2,
        "batch_size": 8,
        "metrics": ["auroc", "accuracy"],
        "method": {"name": "ssf", "lr": 0.1, "local_steps": 2},
        "task": {
            "name": "classification",
            "model": "mlp",
            "data": data | others.pop("data", {}),
            "partition": {"name": "natural", "clients": 3},
        },
    }
    return Spec.from_table(table | others)


class Sites(FakeGrid):
    """Three nodes, each with a file of its own."""

    def __init__(self, spec: Spec, folder: Path, states: Path, **own: Any) -> None:
        super().__init__(spec, states)
        self.app, self.folder, self.own = flower.client_app(spec), folder, own
        self.clients = {100 + i: i for i in range(3)}
        self.statuses: list[str] = []
        self.order = (0, 1, 2)  # the number of each client

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        client = self.clients[node]
        header = message.content.get("header")
        self.statuses.append("query" if header is None else str(header["status"]))
        config = {
            "partition-id": self.order[client],
            "client-id": f"h{client}",
            "states-dir": str(self.states_dir),
            "data": str(self.folder / f"h{client}.csv"),
        } | self.own
        context = Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )
        found = self.app(message, context)
        assert isinstance(found, Message)
        return found
