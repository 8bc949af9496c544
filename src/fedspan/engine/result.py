"""What a run came to: one `Result` for `fit`, `run` and a run directory that is loaded."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from safetensors import SafetensorError
from torch import nn

from fedspan.core import checkpoint, registry
from fedspan.core.errors import (
    CheckpointError,
    FedspanError,
    SpecError,
    at_least,
    one_line,
    one_of,
    path_of,
    shown,
)
from fedspan.core.extras import data_frame
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.json_log import REMEDY, JsonLog, read_table, write_table
from fedspan.core.method import DETAILS
from fedspan.core.spec import flat
from fedspan.core.tables import describe
from fedspan.data.schema import Schema
from fedspan.engine import history, per_client
from fedspan.engine.history import PLAIN, main_metric, sign_of
from fedspan.engine.loop import Line
from fedspan.engine.per_client import PerClient, axis_or_new
from fedspan.engine.predictor import Predictor
from fedspan.engine.provenance import (
    CLIENTS,
    LR,
    MODEL,
    SPEC,
    USAGE,
    check_run,
    read_lr,
    seed_dirs,
    write_outcome,
)
from fedspan.nn.blueprint import build

Axis = Literal["round", "up_bytes", "total_bytes", "seconds"]
MAIN = (
    "lr",
    "local_steps",
    "rank",
    "space.rank",
)  # settings of a method that notebooks show, changed or not


@dataclass(eq=False)
class Result:
    """What a run came to.

    Attributes:
        seeds: The seeds of the runs, one for most.
        runs: The evaluations of each seed, as plain dictionaries.
        statuses: How each seed ended.
        spec: The settings of the run, as a table.
        run_dir: The run directory, or None.
        module: The trained module, or None; `model` is the same with an error where there is none.
        weights: The trained tensors of each seed by name, as in `model.state_dict()`. Of a run that diverged, those of
            the last evaluation with a finite loss, or the initial ones.
        lr_search: How `lr = "search"` or "auto" found the step size, or None.
        per_client: The metrics of each client, where `eval_clients_every` is set.
        model_rounds: Seed → the round whose model the result holds, where `KeepBest` chose it.
        usage: How the model is built, what it takes and what its outputs are, as plain values.
    """

    seeds: tuple[int, ...]
    runs: list[list[Line]]
    statuses: list[str]
    spec: dict[str, Any] = field(default_factory=dict)
    run_dir: Path | None = None
    module: nn.Module | None = None
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    lr_search: dict[str, Any] | None = None
    per_client: PerClient = field(default_factory=lambda: PerClient(()))
    model_rounds: dict[int, int] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The trained module, with the weights of the first seed; refused where there is none."""
        if self.module is None and self.usage.get("blueprint") and len(self.weights) == 1:
            module = build(self.usage["blueprint"])
            _fill(module, self.weights, self.run_dir or Path())
            self.module = module.eval()
        if self.module is None:
            loaded = self.run_dir is not None and bool(self.weights)
            place = (
                f"fedspan.load({str(self.run_dir)!r}, model=model)"
                if loaded
                else "`result.weights[0]`"
            )
            raise SpecError(f"the result holds weights and no module; use {place}")
        return self.module

    @property
    def predictor(self) -> Predictor:
        """The trained module with its preprocessing, as a fitted scikit-learn estimator."""
        usage = self.usage or {"kind": "other"}
        if usage["kind"] == "other":
            raise SpecError(
                "the model has outputs of its own kind, and `predict` does not know them; call `result.model`"
            )
        schema, own = usage.get("schema"), usage.get("own", {})
        return Predictor(
            self.model,
            usage["kind"],
            usage["classes"],
            None if schema is None else Schema.of(schema),
            usage["columns"],
            {who: Schema.of(one) for who, one in own.items()},
            usage["logits"],
        )

    def predict(self, rows: Any, client: str | None = None) -> Any:
        """Return the predicted class or number of each row; see `Predictor.predict`."""
        return self.predictor.predict(rows, client)

    def predict_proba(self, rows: Any, client: str | None = None) -> Any:
        """Return the probability of each class, (rows, classes)."""
        return self.predictor.predict_proba(rows, client)

    @property
    def classes_(self) -> Any:
        """The classes, in the order of the columns of `predict_proba`."""
        return self.predictor.classes_

    @property
    def history(self) -> list[Line]:
        """All evaluations, one dictionary each; with several seeds every one says its `seed`."""
        if len(self.seeds) == 1:
            return self.runs[0]
        return [
            {"seed": seed, **line}
            for seed, lines in zip(self.seeds, self.runs, strict=True)
            for line in lines
        ]

    @property
    def status(self) -> str:
        """How the run ended: "finished", "interrupted", "stopped at round t: reason" or "diverged at round t"."""
        if len(set(self.statuses)) == 1:
            return self.statuses[0]
        return "; ".join(
            f"seed {seed} {one}" for seed, one in zip(self.seeds, self.statuses, strict=True)
        )

    @property
    def finished(self) -> bool:
        """Whether the run has ended for good, be it by divergence or early stopping."""
        return "interrupted" not in self.statuses

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that the evaluations report."""
        lines = self.history
        return [name for name in lines[-1] if name not in PLAIN] if lines else []

    @property
    def best(self) -> Line | None:
        """The evaluation of the model that `KeepBest` kept, else that with the best main metric.

        None where nothing was measured. With several seeds `KeepBest` keeps one model each: this is `model`'s, the
        first seed's.
        """
        if not self.metrics:
            return None
        if self.seeds[0] in self.model_rounds:
            seed = {"seed": self.seeds[0]} if len(self.seeds) > 1 else {}
            return seed | self.model_lines[0]
        metric = self._main_metric
        sign = sign_of(metric, self.spec.get("metrics", ()), option="")
        known = [line for line in self.history if line.get(metric) is not None]
        return max(known, key=lambda line: sign * line[metric], default=None)

    @property
    def model_lines(self) -> list[Line]:
        """The evaluation of each seed's model: of the round that `KeepBest` kept, otherwise the last one."""
        pairs = zip(self.seeds, self.runs, strict=True)
        kept = [(self.model_rounds.get(seed), lines) for seed, lines in pairs if lines]
        return [next((one for one in lines if one["round"] == t), lines[-1]) for t, lines in kept]

    @property
    def _main_metric(self) -> str:
        return main_metric(self.metrics, self.spec.get("metrics", ()))

    @property
    def up_bytes(self) -> int:
        """Bytes that all clients have sent, in all seeds."""
        return sum(lines[-1]["up_bytes"] for lines in self.runs if lines)

    @property
    def down_bytes(self) -> int:
        """Bytes that all clients have received, in all seeds."""
        return sum(lines[-1]["down_bytes"] for lines in self.runs if lines)

    def kept_rounds(self) -> dict[str, Any]:
        """The rounds of the models that were kept, as `result.json` has them."""
        return (
            {"model_rounds": {str(seed): t for seed, t in self.model_rounds.items()}}
            if self.model_rounds
            else {}
        )

    def kept(self) -> list[str]:
        """The evaluations of the models that were kept instead of the last ones, in words."""
        said = []
        for seed, t in self.model_rounds.items():
            lines = self.runs[self.seeds.index(seed)]
            if lines[-1]["round"] == t:
                continue
            line = next((one for one in lines if one["round"] == t), {})
            values = [
                f"{name}={line[name]:.4g}" for name in self.metrics if line.get(name) is not None
            ]
            whose = f" of seed {seed}" if len(self.seeds) > 1 else ""
            said.append(f"the model{whose} is that of round {t}: {', '.join(values)}")
        return said

    def to_pandas(self) -> Any:
        """`history` as a pandas DataFrame."""
        return data_frame(self.history)

    def plot(self, x: Axis = "round", metric: str | None = None, ax: Any = None) -> Any:
        """Draws a metric.

        Args:
            x: What it is drawn against: "round", "up_bytes", "total_bytes" or "seconds".
            metric: The metric; by default the main one.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            The matplotlib axis.
        """
        one_of("x", x, ("round", "up_bytes", "total_bytes", "seconds"))
        if not self.metrics:
            raise SpecError("the run has no evaluations to plot")
        metric = metric or self._main_metric
        one_of("metric", metric, self.metrics)
        ax = axis_or_new(ax)
        for seed, lines in zip(self.seeds, self.runs, strict=True):
            cost = [
                line["up_bytes"] + line["down_bytes"] if x == "total_bytes" else line[x]
                for line in lines
            ]
            values = [float("nan") if line.get(metric) is None else line[metric] for line in lines]
            ax.plot(cost, values, label=f"seed {seed}" if len(self.seeds) > 1 else None)
        ax.set_xlabel(
            {"round": "rounds", "up_bytes": "bytes up", "total_bytes": "bytes up and down"}.get(
                x, x
            )
        )
        ax.set_ylabel(metric)
        if len(self.seeds) > 1:
            ax.legend()
        return ax

    def save(self, path: Path | str) -> Path:
        """Writes the result.

        Args:
            path: A file that ends in `.safetensors` for the trained weights alone, which `load_state_dict` takes, or a
                directory for everything, which `fedspan.load` reads.

        Returns:
            The path.
        """
        path = path_of("path", path)
        if path.suffix == ".safetensors":
            if len(self.weights) != 1:
                raise SpecError(
                    f"the result has weights of {len(self.weights)} seeds; save it to a directory"
                )
            checkpoint.write_tensors(path, self.weights[0])
            return path
        if path.suffix:
            raise SpecError(f"`path` must be a directory or end in .safetensors, got {str(path)!r}")
        make_dir(path)
        header = {"spec": self.spec}
        for number, folder in enumerate(seed_dirs(path, self.seeds)):
            make_dir(folder)
            JsonLog(
                folder / history.NAME, [header | {"seed": self.seeds[number]}, *self.runs[number]]
            )
            if self.weights:
                checkpoint.write_tensors(folder / MODEL, self.weights[number])
        if self.per_client:
            JsonLog(path / CLIENTS, self.per_client.rows)
        if self.lr_search is not None:
            write_table(path / LR, self.lr_search)
        if self.usage:
            write_table(path / USAGE, self.usage)
        write_atomic(path / SPEC, tomli_w.dumps(self.spec).encode())
        write_outcome(path, self.seeds, self.statuses, self.kept_rounds())
        return path

    def __repr__(self) -> str:
        ends = self.model_lines
        last = max((lines[-1]["round"] for lines in self.runs if lines), default=0)
        known = {
            name: [end[name] for end in ends if end.get(name) is not None] for name in self.metrics
        }
        known = {name: every for name, every in known.items() if every and name not in DETAILS}
        values = [f"{name}={sum(every) / len(every):.4g}" for name, every in known.items()]
        values += [f"means of {len(ends)} seeds"] if len(ends) > 1 else []
        together = " in all" if len(ends) > 1 else ""
        sizes = f"{self.up_bytes / 1e6:.3g} MB up, {self.down_bytes / 1e6:.3g} MB down{together}"
        found = (
            []
            if self.lr_search is None
            else [f"lr={self.lr_search['values']['lr']:.3g} ({_cost(self.lr_search)})"]
        )
        weights = (
            [f"weights={self.spec['participation']['weights']}"]
            if "participation" in self.spec
            else []
        )
        early = [
            t
            for seed, t in self.model_rounds.items()
            if t != self.runs[self.seeds.index(seed)][-1]["round"]
        ]
        if early:
            values = [
                f"the model is that of round {' and '.join(map(str, early))}: {', '.join(values)}"
            ]
        return (
            f"Result({self.status}, {last} rounds, {', '.join([*values, sizes, *found, *weights])})"
        )

    def _repr_html_(self) -> str:
        """Return method, settings, a small curve and the last evaluations, for notebooks."""
        lines = self.history[-5:]
        names = ["seed"] * (len(self.seeds) > 1) + ["round"]
        sizes = {"up_bytes": "MB up", "down_bytes": "MB down"}
        metrics = [name for name in self.metrics if name not in DETAILS]
        heads = "".join(
            f"<th>{html.escape(name)}</th>" for name in (*names, *sizes.values(), *metrics)
        )
        rows = ""
        for line in lines:
            values = [*(line[name] for name in names), *(line[name] / 1e6 for name in sizes)]
            values += [line.get(name) for name in metrics]
            rows += f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in values)}</tr>"
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        name, settings = self._settings()
        head = f"<p><b>{html.escape(name)}</b>, {html.escape(f'{self.status}; {settings}')}</p>"
        return head + (_curve(self.runs, self._main_metric) if metrics else "") + table

    def _settings(self) -> tuple[str, str]:
        """Return the name of the method, and in words its main settings and those that are not the defaults."""
        given = flat(self.spec.get("method", {}))
        name = given.pop("name", "run")
        known = registry.choices("method").get(name)
        try:
            defaults = flat(describe(known())) if known is not None else {}
        except TypeError:  # a method of the user's with settings that have no default
            defaults = {}
        if self.lr_search is not None:
            given["lr"] = f"{given['lr']:.3g} ({self.lr_search['rule']})"
        words = [f"rounds {self.spec['rounds']}"] if "rounds" in self.spec else []
        for key, value in given.items():
            if key in MAIN or value != defaults.get(key):
                words.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
        return name, ", ".join(words)


def _cell(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:.4g}"
        if isinstance(value, float)
        else html.escape(str(value))
    )


def _curve(runs: Sequence[Sequence[Line]], metric: str) -> str:
    """Return a picture of a metric over rounds, one line per seed; empty with fewer than two values."""
    points = [[(line["round"], line.get(metric)) for line in lines] for lines in runs]
    seeds = [
        [(t, value) for t, value in one if value is not None and math.isfinite(value)]
        for one in points
    ]
    values = [value for one in seeds for _, value in one]
    if len(values) < 2:
        return ""
    last, low, high = max(t for one in seeds for t, _ in one), min(values), max(values)
    width, height = 240 / (last or 1), 56 / (high - low or 1)
    lines = (
        " ".join(f"{2 + t * width:.1f},{2 + (high - y) * height:.1f}" for t, y in one)
        for one in seeds
    )
    drawn = "".join(f'<polyline points="{points}"/>' for points in lines)
    what = html.escape(f"{metric} over {last} rounds, from {low:.4g} to {high:.4g}")
    svg = f'<svg width="244" height="60" fill="none" stroke="currentColor" role="img" aria-label="{what}">{drawn}</svg>'
    return f"{svg}<br><small>{what}</small>"


def _cost(lr_search: dict[str, Any]) -> str:
    """What finding the step size took, which is not part of the run's bytes."""
    return f"search: {lr_search['cost']}" if "cost" in lr_search else str(lr_search["rule"])


USAGE_FORM = {
    "blueprint": dict[str, Any] | None,
    "kind": str,
    "logits": bool,
    "classes": list[int | str],
    "columns": list[str],
}


def load(
    run_dir: Path | str,
    model: nn.Module | None = None,
    round: int | None = None,  # noqa: A002
) -> Result:
    """Reads a run directory.

    Args:
        run_dir: What `run_dir` or `Result.save` was given.
        model: A module that gets the trained weights, in place; `result.model` is then this module. Without it
            `result.model` is built again if the run says how. Its class is imported, never unpickled.
        round: The round whose model to take, of those that the callback `Checkpoint` has kept.

    Returns:
        The result, with `status` "interrupted" where the run has not ended.

    Raises:
        FedspanError: The directory holds no run, or `model` does not fit its weights.
    """
    run_dir = path_of("run_dir", run_dir)
    if model is not None and not isinstance(model, nn.Module):
        raise SpecError(f"`model` must be a torch.nn.Module, got {shown(model)}")
    places = (
        [run_dir]
        if (run_dir / history.NAME).exists()
        else sorted(run_dir.glob(f"seed-*/{history.NAME}"))
    )
    dirs = [place if place.is_dir() else place.parent for place in places]
    if not dirs:
        raise FedspanError(f"{str(run_dir)!r} holds no run: there is no {history.NAME}")
    ends = check_run(run_dir, dirs)
    read = [history.read(place / history.NAME) for place in dirs]
    seeds = [header.get("seed", header["spec"].get("seed", 0)) for header, _ in read]
    order = sorted(range(len(read)), key=seeds.__getitem__)
    found = run_dir / LR
    how = {
        seed: status
        for end in ends
        for seed, status in zip(end["seeds"], end["statuses"], strict=True)
    }
    kept = {int(key): t for end in ends for key, t in end.get("model_rounds", {}).items()}
    if len(set(seeds)) < len(seeds) or not how.keys() <= set(seeds):
        raise CheckpointError(
            f"{str(run_dir)!r} is damaged: its files are of the seeds {seeds} and {[*how]}; {REMEDY}"
        )
    if round is None:
        files = [dirs[i] / MODEL for i in order]
    else:
        files = [_kept(run_dir, dirs[i], seeds[i], len(read), round) for i in order]
        kept = dict.fromkeys(seeds, round)
    weights = [_weights(file) for file in files if file.exists()]
    about = run_dir / USAGE
    usage = read_table(about, USAGE_FORM) if about.exists() else {}
    try:
        for one in (usage.get("schema"), *usage.get("own", {}).values()):
            _ = None if one is None else Schema.of(one)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise CheckpointError(f"{str(about)!r} is damaged: its schema; {REMEDY}") from None
    if model is not None:
        _fill(model, weights, run_dir)
    clients = [(dirs[i], {} if len(read) == 1 else {"seed": seeds[i]}) for i in order]
    rows = per_client.read(run_dir / CLIENTS) or [
        seed | row for place, seed in clients for row in per_client.read(place / CLIENTS)
    ]
    return Result(
        tuple(seeds[i] for i in order), [read[i][1] for i in order], [how.get(seeds[i], "interrupted") for i in order],
        read[0][0]["spec"], run_dir, model, weights, read_lr(found) if found.exists() else None,
        PerClient(rows, read[0][0]["spec"].get("metrics", ()), kept), kept, usage,
    )  # fmt: skip


def _kept(run_dir: Path, folder: Path, seed: int, seeds: int, t: int) -> Path:
    """Return the file of the model of round t."""
    at_least("round", t, 0)
    places = [folder / "models", run_dir / f"seed-{seed}" / "models"][: min(seeds, 2)]
    there = {
        int(file.stem[6:]): file for place in places for file in place.glob("round-*.safetensors")
    }
    if t not in there:
        known = (
            f"there are {', '.join(map(str, sorted(there)))}"
            if there
            else "`Checkpoint` keeps some"
        )
        raise FedspanError(f"`round` is {t}, and {str(run_dir)!r} has no model of it; {known}")
    return there[t]


def _fill(model: nn.Module, weights: Sequence[dict[str, torch.Tensor]], run_dir: Path) -> None:
    """Puts trained weights into a module."""
    if len(weights) != 1:
        raise FedspanError(
            f"{str(run_dir)!r} has trained weights of {len(weights)} seeds; `model` takes those of one"
        )
    try:
        model.load_state_dict(weights[0])
    except RuntimeError as error:
        raise FedspanError(
            f"`model` is not the one that was trained: {' '.join(str(error).split())[:200]}"
        ) from None


def _weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return checkpoint.read_tensors(path)[0]
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({one_line(str(error), 80)}); {REMEDY}"
        ) from None
