"""Write the evaluations to a CSV file, which spreadsheets and pandas read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspan.callbacks._base import Writer
from fedspan.core.files import csv_text, make_dir, write_atomic
from fedspan.core.registry import register
from fedspan.engine.provenance import TABLE

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row


@register
@dataclass(frozen=True)
class CSV(Writer):
    """Keep `history.csv` up to date: a row per evaluation and seed, a column per metric.

    Args:
        log_dir: Where the file is; by default the run directory.
    """

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Write all rows anew, so that a resumed run has none twice."""
        lines = [
            ({"seed": seed} if len(run.seeds) > 1 else {})
            | {name: value for name, value in line.items() if name != "events"}
            for seed, own in zip(run.seeds, run.lines, strict=True)
            for line in own
        ]
        make_dir(self.folder(run))
        write_atomic(self.folder(run) / TABLE, csv_text(lines).encode())
