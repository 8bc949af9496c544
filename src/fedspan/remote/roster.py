"""Which node each client's number belongs to: the first node that used it, until somebody says otherwise.

With authentication a node's id belongs to its key. A number that is bound to a node is refused to every other one, so
that nobody is given another client's state or trains in its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.files import make_dir, write_atomic

ROSTER = "roster.json"


@dataclass
class Roster:
    """A file of client → node."""

    path: Path
    nodes: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def at(path: Path) -> Roster:
        """The roster in a file, empty where there is none."""
        if not path.exists():
            return Roster(path)
        try:
            table = dict(json.loads(path.read_bytes()))
            return Roster(path, {int(client): int(node) for client, node in table.items()})
        except (ValueError, TypeError):
            raise CheckpointError(f"{str(path)!r} is damaged; put it back, or delete it to bind clients anew") from None

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
        table = {str(client): node for client, node in sorted(self.nodes.items())}
        write_atomic(self.path, (json.dumps(table, indent=1) + "\n").encode(), private=True)
