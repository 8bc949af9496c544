"""Which node each client's number belongs to: the first node that used it, until somebody says otherwise.

With authentication a node's id belongs to its key. A number that is bound to a node is refused to every other one, so
that nobody is given another client's state or trains in its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.files import make_dir
from fedspan.core.json_log import read_table, write_table
from fedspan.engine.provenance import ROSTER as ROSTER

REMEDY = "put it back, or delete it to bind clients anew"


@dataclass
class Roster:
    """A file of client → node."""

    path: Path
    nodes: dict[int, int] = field(default_factory=dict)
    run: str = ""  # id of the run; "" until its first round

    @staticmethod
    def at(path: Path) -> Roster:
        """The roster in a file, empty where there is none."""
        if not path.exists():
            return Roster(path)
        table = read_table(path, {"nodes": dict[str, Any], "run": str}, remedy=REMEDY)
        known = all(type(node) is int and 0 <= node < 1 << 64 for node in table["nodes"].values())
        if not known or not all(map(str.isdecimal, table["nodes"])):
            raise CheckpointError(f"{str(path)!r} does not name the node of each client; {REMEDY}")
        return Roster(
            path, {int(client): node for client, node in table["nodes"].items()}, table["run"]
        )

    def belongs(self, run: str) -> None:
        """Raise where the file is of another run; a new one is this run's from now on."""
        if self.run not in ("", run):
            raise CheckpointError(f"{str(self.path)!r} is of another run; {REMEDY}")
        if self.run != run:
            self.run = run
            if self.nodes:
                self._save()

    def admits(self, client: int, node: int) -> bool:
        """Whether a node may stand for a client; a number that nobody has used yet is bound to it."""
        if client not in self.nodes and node not in self.nodes.values():
            self.nodes[client] = node
            self._save()
        return self.nodes.get(client) == node

    def forget(self, client: int) -> int:
        """Frees a client's number for another node; gives the node that it belonged to."""
        if client not in self.nodes:
            raise SpecError(f"client {client} is not bound to a node in {str(self.path)!r}")
        node = self.nodes.pop(client)
        self._save()
        return node

    def _save(self) -> None:
        make_dir(self.path.parent)
        nodes = {str(client): node for client, node in sorted(self.nodes.items())}
        write_table(self.path, {"run": self.run, "nodes": nodes}, private=True)
