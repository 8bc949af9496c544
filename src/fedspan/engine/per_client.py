"""Metrics of each client while a run goes on: a table, its worst client, and how far clients are apart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.extras import data_frame, needs
from fedspan.core.json_log import JsonLog, check_form, read_lines
from fedspan.engine.history import judged_by, metrics_of, sign_of, undefined_where
from fedspan.engine.loop import Line
from fedspan.engine.provenance import CLIENTS
from fedspan.metrics._collected import Collected
from fedspan.metrics._own import chosen
from fedspan.nn.problem import Evaluation, TorchProblem

if TYPE_CHECKING:
    from fedspan.engine.loop import Loop, Row
    from fedspan.engine.result import Result

FORM = {"round": int, "client": str, "data": str, "examples": int}
QUANTILES = {"min": 0.0, "q10": 0.1, "median": 0.5, "q90": 0.9, "max": 1.0}


class PerClient(list[Line]):
    """The clients' metrics as a list of dictionaries, one per client and evaluation.

    A row has `round`, `client` (its name or number), `data` (the part it was evaluated on: "test" or "validation" where
    the client has one, otherwise "train"), `examples` (of that part) and the metrics.
    """

    def __init__(
        self,
        rows: Sequence[Line],
        given: Sequence[Any] = (),
        model_rounds: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(sorted(rows, key=lambda row: (row.get("seed", 0), row["round"])))
        self.given, self.model_rounds = given, dict(model_rounds or {})

    def __repr__(self) -> str:
        clients, rounds = (len({row[key] for row in self}) for key in ("client", "round"))
        return f"PerClient({clients} clients, {rounds} evaluations of {', '.join(self.metrics) or 'nothing'})"

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics."""
        return metrics_of(self[-1:])

    @property
    def last(self) -> list[Line]:
        """The rows of the result's model: of the last evaluation, or of the round that `KeepBest` kept."""
        ends = {row.get("seed"): row["round"] for row in self}
        there = {(row.get("seed"), row["round"]) for row in self}
        for seed, t in self.model_rounds.items():
            key = seed if None not in ends else None
            ends |= {key: t} if (key, t) in there else {}
        return [row for row in self if row["round"] == ends[row.get("seed")]]

    def worst(self, metric: str | None = None) -> Line:
        """The row of the client with the worst value of the result's model.

        A client for which the metric is undefined, such as AUROC of one class, is left out with a warning.

        Args:
            metric: The metric to judge by; by default the main one.
        """
        metric, known = self._judged(metric)
        sign = sign_of(metric, self.given, option="")
        return min(known, key=lambda row: sign * row[metric])

    def spread(self, metric: str | None = None) -> dict[str, float]:
        """Mean, standard deviation and quantiles over the clients for the result's model, each client counted once.

        A client for which the metric is undefined is left out with a warning.

        Args:
            metric: The metric; by default the main one.
        """
        metric, known = self._judged(metric)
        values = np.array([row[metric] for row in known])
        quantiles = {name: float(np.quantile(values, at)) for name, at in QUANTILES.items()}
        return {"mean": float(values.mean()), "std": float(values.std()), **quantiles}

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        return data_frame(self)

    def plot(self, metric: str | None = None, ax: Any = None) -> Any:
        """Draws each client's metric against the rounds, and the worst client of the end in color.

        Args:
            metric: The metric; by default the main one.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            The matplotlib axis.
        """
        worst = self.worst(metric)
        ax, metric = axis_or_new(ax), judged_by(self, metric, self.given)
        lines: dict[Any, list[Line]] = {}
        for row in self:
            lines.setdefault((row.get("seed"), row["client"]), []).append(row)
        for who, rows in lines.items():
            style: dict[str, Any] = {"color": "0.7", "linewidth": 0.8}
            if who == (worst.get("seed"), worst["client"]):
                label = f"worst: client {worst['client']}"
                style = {"color": "#D55E00", "zorder": 3, "label": label}
            draw(ax, "round", rows, metric, **style)
        ax.set_xlabel("rounds")
        ax.set_ylabel(f"{metric} of each client")
        ax.legend()
        return ax

    def _judged(self, metric: str | None) -> tuple[str, list[Line]]:
        """The metric asked for, or the main one, and the last rows that have a value; warns of those without."""
        if not self:
            raise SpecError(
                "clients were not evaluated; set `eval_clients_every`, such as eval_clients_every=10"
            )
        metric = judged_by(self, metric, self.given)
        known = [row for row in self.last if row.get(metric) is not None]
        without = [repr(row["client"]) for row in self.last if row.get(metric) is None]
        why = undefined_where(metric)
        if not known:
            raise SpecError(f"the metric {metric!r} is undefined for every client{why}")
        if without:
            more = f" and {len(without) - 5} more" if len(without) > 5 else ""
            warnings.warn(
                f"the metric {metric!r} is undefined for {', '.join(without[:5])}{more}{why}; left out",
                stacklevel=3,
            )
        return metric, known


def axis_or_new(ax: Any) -> Any:
    """Return the matplotlib axis, or that of a new figure."""
    needs("plot", "matplotlib")
    import matplotlib.pyplot as plt

    return plt.subplots()[1] if ax is None else ax


def draw(ax: Any, x: str, lines: Sequence[Line], metric: str, **style: Any) -> None:
    """Draw a metric on an axis, with gaps where it is undefined."""
    values = [math.nan if line.get(metric) is None else line[metric] for line in lines]
    marker = "." if len(lines) == 1 else None
    ax.plot([line[x] for line in lines], values, marker=marker, **style)


class Recorder(Callback):
    """Evaluates the clients every so many rounds and at the end, and writes the rows to the run directory.

    The metrics of all clients' held-out examples together are columns of the history, `clients_accuracy` and so on, and
    so is the worst client's, `worst_accuracy`.

    Args:
        every: Rounds between two evaluations.
        rounds: The length of the run.
        evaluate: `evaluate(run)` gives the evaluations of clients on other machines; None: they are on this one.
        log: Is given a line for each client, and one for all of them.
    """

    def __init__(
        self,
        every: int,
        rounds: int,
        evaluate: Callable[[Loop], Sequence[Evaluation]] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.every, self.rounds, self.rows, self.log = every, rounds, list[Line](), log
        self.evaluate, self.file = evaluate, cast(JsonLog | None, None)
        self._found: tuple[int, Sequence[Evaluation]] = (-1, ())

    def on_run_start(self, run: Loop) -> None:
        """A resumed run keeps the rows up to its checkpoint."""
        if run.run_dir is None:
            self.rows, self.file = [], None
        else:
            path = run.run_dir / CLIENTS
            self.rows = read(path, run.checks.get(CLIENTS, ""))
            self.file = JsonLog(path, self.rows, run.checks, CLIENTS)

    def measure(self, run: Loop) -> Mapping[str, npt.NDArray[np.float64]]:
        """The model of the server on each client's data: the metrics of all of it, and of the worst client."""
        if run.t % self.every and run.t < self.rounds:
            return {}
        columns, _ = of_all(self._evaluated(run), run.metrics)
        return {name: np.array([value]) for name, value in columns.items()}

    def on_evaluate(self, run: Loop, row: Row) -> None:
        """Write the rows of the clients."""
        if row.round % self.every == 0 or row.round >= self.rounds or bool(row.diverged.all()):
            self._record(run, row.round)

    def _evaluated(self, run: Loop) -> Sequence[Evaluation]:
        if self._found[0] != run.t:
            own = cast(TorchProblem, run.problem).evaluate_clients
            found = own(run.model(), run.buffers) if self.evaluate is None else self.evaluate(run)
            self._found = run.t, found
        return self._found[1]

    def on_run_end(self, run: Loop, result: Result) -> None:
        """Hands the rows to the result; the last model and the one that was kept are evaluated if they were not."""
        if run.reason and (not self.rows or self.rows[-1]["round"] < run.t):
            self._record(run, run.t)
        kept = result.model_rounds.values() if self.evaluate is None else ()
        for t in kept if result.finished else ():
            if all(row["round"] != t for row in self.rows):
                self._record(run, t, result.weights[0])
        result.per_client = PerClient(self.rows, run.metrics, result.model_rounds)

    def _record(self, run: Loop, t: int, weights: Mapping[str, Any] | None = None) -> None:
        if weights is None:
            found = self._evaluated(run)
        else:
            found = cast(TorchProblem, run.problem).evaluate_clients(None, weights=weights)
        new = []
        for row, _ in found:
            undefined = [k for k, v in row.items() if isinstance(v, float) and not np.isfinite(v)]
            new.append({"round": t} | row | dict.fromkeys(undefined))
        self.rows += new
        if self.file is not None:
            self.file.append(*new)
        if self.log is not None:
            for row in new:
                values = [
                    f"{name} {'undefined' if row[name] is None else f'{row[name]:.4g}'}"
                    for name in metrics_of([row])
                ]
                of = f"({row['examples']} {row['data']} examples)"
                self.log(f"  {row['client']}: {'  '.join(values)}  {of}")
            _, words = of_all(found, run.metrics)
            if words:
                self.log(f"  all clients: {'  '.join(words)}")


def of_all(
    found: Sequence[Evaluation], metrics: Sequence[Any]
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of all clients' held-out examples and of the worst client as columns, and both in words."""
    held_out = [one for one in found if one[0]["data"] != "train"]
    columns, words = dict[str, float](), list[str]()
    for name, value in pooled([summaries for _, summaries in held_out], metrics).items():
        columns[f"clients_{name}"] = value
        words.append(f"{name} {value:.4g}")
        known = [row for row, _ in held_out if np.isfinite(row.get(name, np.nan))]
        if known and name != "loss":
            sign = sign_of(name, metrics, option="")
            worst = min(known, key=lambda row: sign * row[name])
            columns[f"worst_{name}"] = worst[name]
            spread = np.std([row[name] for row in known])
            at = f"worst {worst[name]:.4g} at {worst['client']}"
            words[-1] += f" ({at}, standard deviation {spread:.2g})"
    return columns, words


def pooled(
    given: Sequence[Mapping[str, Sequence[float]]], metrics: Sequence[Any]
) -> dict[str, float]:
    """Return the metrics of several clients' examples together, from the clients' summaries by name."""
    found: dict[str, float] = {}
    own = chosen(metrics)
    for name in given[0] if given else ():
        parts = [torch.tensor(one[name], dtype=torch.float64) for one in given if name in one]
        total = pad_sequence(parts, batch_first=True).sum(0)
        if name == "loss":
            found[name] = float(total[0] / total[1])
            continue
        kind = type(own[name] if name in own else chosen([name])[name])
        if issubclass(kind, Collected) and len(parts) == len(given):
            found[name] = kind.pooled(total)
    return found


def read(path: Path, until: str | None = None) -> list[Line]:
    """The rows of a file, up to the line that a checkpoint names, if any; none where there is no file."""
    rows = [] if until is None and not path.exists() else read_lines(path, until)[0]
    for row in rows:
        check_form(row, path, FORM, dict.fromkeys(row, float | None) | {"seed": int})
    return rows
