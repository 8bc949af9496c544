"""Bytes that travelled, counted on what was packed, in both directions, by run and client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedspan.core.method import Round

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ledger:
    """Running sums over rounds; each array is (runs, N) and is added to in place."""

    up: Counts
    down: Counts

    @staticmethod
    def empty(runs: int, clients: int) -> Ledger:
        """Nothing sent yet."""
        return Ledger(*(np.zeros((runs, clients), np.int64) for _ in range(2)))

    def sent(self, rnd: Round, sizes: Counts) -> None:
        """Count a round's downloads; `sizes` is (runs, S)."""
        self.down.reshape(-1)[rnd.rows] += sizes.reshape(-1)

    def received(self, rnd: Round, sizes: Counts) -> None:
        """Count the replies of a round."""
        self.up.reshape(-1)[rnd.rows] += sizes.reshape(-1)

    def totals(self) -> tuple[Counts, Counts]:
        """(up, down) of each run so far."""
        return self.up.sum(1), self.down.sum(1)
