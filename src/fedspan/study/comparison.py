"""What `fedspan.compare` returns: the results of every method, as tables, figures, a page and words."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.core.errors import SpecError, one_of, path_of
from fedspan.core.extras import data_frame, needs
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.method import Method
from fedspan.core.terminal import plain
from fedspan.study import tables
from fedspan.study.curves import Axis
from fedspan.study.model import Part, with_settings
from fedspan.study.results import Entry, Results
from fedspan.study.verdict import verdict

AXES: dict[str, Axis] = {
    "round": "round",
    "up_bytes": "up",
    "total_bytes": "total",
    "seconds": "seconds",
}
WIDTH = 80  # columns of a terminal, in which no word is to be broken


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods that were tuned and run on one problem under the same seeds.

    Attributes:
        results: Everything that is known, as the study engine has it.
        run_dir: The directory with all runs and the data of the results, or None.
    """

    results: Results
    run_dir: Path | None = None

    @property
    def _part(self) -> Part:
        return self.results.study.parts[0]

    @property
    def _entries(self) -> list[Entry]:
        return self.results.entries[self._part.name]

    @property
    def metric(self) -> str:
        """The metric that the methods are compared by."""
        return self._part.metric

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per method: its result as mean and standard deviation over seeds, its settings and costs."""
        return [_row(self._part, entry) for entry in self._entries]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Label → the tuned settings of the method, such as `{"lr": 0.1}`."""
        return {entry.series.label: _short(entry.point) | _found(entry) for entry in self._entries}

    @property
    def best(self) -> dict[str, Method]:
        """Label → the method with its tuned settings, ready for `fedspan.fit(..., method=...)`."""
        chosen = {}
        for entry in self._entries:
            variant = self._part.variant(entry.variant)
            values = {
                key.removeprefix("method."): value
                for key, value in entry.point.items()
                if key != "epochs"
            }
            chosen[entry.series.label] = with_settings(variant.method, values | _found(entry))
        return chosen

    @property
    def tried(self) -> list[dict[str, Any]]:
        """One dictionary per point of every grid: its settings, and its result in tuning."""
        name = self._part.tune_metric
        return [
            {"method": entry.series.label, **_short(one.point), "rounds": one.rounds, name: one.end.mean,
             "diverged": one.end.diverged, "failed": one.end.failed,
             "stopped_early": one.dropped, "chosen": one.point == entry.point}
            for entry in self._entries
            for one in entry.tried
        ]  # fmt: skip

    def verdict(self) -> str:
        """Which method to take, by how much, and whether the seeds support it."""
        return verdict(self._part, self._entries)

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def plot(self, x: str = "total_bytes", metric: str | None = None, ax: Any = None) -> Any:
        """Draws a metric of all methods: lines are means over seeds, bands go from the lowest to the highest seed.

        Args:
            x: What it is drawn against: "round", "up_bytes", "total_bytes" or "seconds".
            metric: The metric; by default the one that the methods are compared by.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            The matplotlib axis.
        """
        one_of("x", x, AXES)
        metric = metric or self.metric
        one_of("metric", metric, self._entries[0].series.metrics)
        needs("plot", "matplotlib")
        from fedspan.study import figures

        return figures.compare(self._part, self._entries, AXES[x], metric, ax)

    def page(self, path: Path | str) -> Path:
        """Writes the page of the comparison, one HTML file that loads nothing from the network.

        Args:
            path: The file, such as "out/index.html".

        Returns:
            The path.
        """
        needs("plot", "jinja2")
        from fedspan.study import page
        from fedspan.study.report import Report

        path = path_of("path", path)
        if path.is_dir():
            raise SpecError(
                f"`path` {str(path)!r} is a directory; give a file such as 'out/index.html'"
            )
        make_dir(path.parent)
        write_atomic(path, page.render(Report.of_study(self.results)).encode())
        return path

    def __repr__(self) -> str:
        grid = tables.results(self._part, self._entries)
        lines = [grid.header[:3], *([_text(cell) for cell in row[:3]] for row in grid.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(3)]
        text = [
            " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return plain("\n".join([*text, *self._notes(), textwrap.fill(self.verdict(), WIDTH)]))

    def _repr_html_(self) -> str:
        """The main table and the verdict, for notebooks."""
        grid = tables.results(self._part, self._entries)
        heads = "".join(f"<th>{html.escape(text)}</th>" for text in grid.header)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>"
            for row in grid.texts()
        )
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return table + "".join(
            f"<p>{html.escape(text)}</p>" for text in (*self._notes(), self.verdict())
        )

    def _notes(self) -> list[str]:
        """What went wrong in the runs, such as a reply that was left out."""
        return [note for entry in self._entries for note in entry.notes]


@dataclass(frozen=True, eq=False)
class Tuned:
    """What `fedspan.tune` returns.

    Attributes:
        method: The method with the best settings.
        comparison: The runs behind it.
    """

    method: Method
    comparison: Comparison

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per point of the grid, with its result in tuning."""
        return self.comparison.tried

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def __repr__(self) -> str:
        return plain(f"Tuned({self.method})\n{textwrap.fill(self.comparison.verdict(), WIDTH)}")


def _text(cell: tables.Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.main


def _short(point: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("method."): value for key, value in point.items()}


def _found(entry: Entry) -> dict[str, float]:
    """The step size that a search found, of the first seed."""
    return {"lr": entry.found_lr[0]} if entry.found_lr else {}


def _row(part: Part, entry: Entry) -> dict[str, Any]:
    """An entry as plain values, with its costs where the result is read."""
    curve, result = entry.curve(part), entry.final
    costs = {"up_bytes": int(curve.up[-1]), "down_bytes": int(curve.down[-1])}
    memory = {"client_state_bytes": entry.client_state, "client_memory_bytes": entry.client_memory}
    return {
        "method": entry.series.label, part.metric: result.mean, f"{part.metric}_sd": result.spread,
        f"best_{part.metric}": entry.best.mean, **_short(entry.point), **_found(entry), "at_edge": entry.at_edge,
        "rounds": int(curve.rounds[-1]), **costs, **memory, "seconds": float(curve.seconds[-1]),
        "seeds": result.seeds, "diverged": result.diverged, "failed": result.failed, "nan": result.undefined,
    }  # fmt: skip
