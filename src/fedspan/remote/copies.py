"""The server's copies of the clients' states, from which a client that lost its own gets it back.

Copies follow from the accepted replies. Private fields of a state cannot be copied: they start again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.core.round import Round
from fedspan.engine.states import InMemory, OnDisk, States, load_states, save_states, states_saved
from fedspan.remote.client import LAST_ROUND, RESTORE
from fedspan.replies.clip import leaked


class Copies:
    """One table per public field of the states; or none at all, where the server keeps no copies."""

    def __init__(
        self,
        method: Method,
        first: Any,
        clients: int,
        *,
        kept: bool,
        folder: Path | None,
        resume: bool,
    ) -> None:
        self.method, self.first, self.kept = method, first, kept
        self.private, nothing = method.private, Bundle()
        if type(method).update_client_state is Method.update_client_state:
            rnd: Any = None
            method.update_client_state(
                first, nothing, nothing, rnd
            )  # refuses any state, before round 0
        fields = {
            n: v[0]
            for n, v in wire.pack(first).items()
            if kept and v.numel() and n not in self.private
        }
        self.tables: dict[str, States] = {
            name: OnDisk(folder / f"{name}.states", start, clients, resume=resume, own=True)
            if folder
            else InMemory(start, clients)
            for name, start in fields.items()
        }

    def restored(self, client: int, last_round: int) -> tuple[wire.Arrays, int, str]:
        """(arrays that bring a client's state back, the round of its copy of x, what happened in words)."""
        arrays = {f"{RESTORE}{name}": array for name, array in self._take(client).items()}
        private = f"; {', '.join(self.private)} starts again" if self.private else ""
        words = f"state restored from the server's copy{private}"
        if not self.kept:
            last_round, words = -1, "re-enters with an empty state: there is no copy of it"
        return arrays | {f"{RESTORE}{LAST_ROUND}": torch.tensor([last_round])}, last_round, words

    def update(self, rnd: Round, down: Any, up: Any) -> None:
        """Renews the copy of the one client of `rnd` by its reply."""
        if not self.tables:
            return
        old = leaked(self.method, self.first.replace(**self._take(int(rnd.ids[0, 0]))), rnd)
        if (sync := down.get("sync")) is not None:
            down = down.replace(sync=replace(sync, last_round=rnd.last_round))
        new = wire.pack(self.method.update_client_state(old, down, up, rnd))
        for name, table in self.tables.items():
            table.put(rnd.ids[0], new[name][0])

    def _take(self, client: int) -> wire.Arrays:
        return {
            name: table.take(np.array([client])).unsqueeze(0) for name, table in self.tables.items()
        }

    def save(self) -> wire.Arrays:
        """What a checkpoint must hold of the copies."""
        return {f"copy.{name}": array for name, array in save_states(self.tables).items()}

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        states_saved(self.tables)

    def load(self, arrays: wire.Arrays) -> None:
        """Returns to what `save` gave; other arrays are left alone."""
        own = {
            name.removeprefix("copy."): array
            for name, array in arrays.items()
            if name.startswith("copy.")
        }
        if self.tables and not own:
            raise SpecError(
                "the checkpoint has no copies of the clients' states; resume with backup = false"
            )
        load_states(self.tables, own)
