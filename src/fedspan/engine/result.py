"""What a run came to: one `Result` for `fit`, `run` and a run directory that is loaded."""

from __future__ import annotations

import html
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from safetensors import SafetensorError
from torch import nn

from fedspan.core import checkpoint
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
from fedspan.data.schema import Schema
from fedspan.engine import history, per_client
from fedspan.engine.history import judged_by, main_metric, metrics_of, sign_of
from fedspan.engine.loop import Line
from fedspan.engine.per_client import PerClient, axis_or_new, draw
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

Axis = Literal["round", "up_bytes", "total_bytes", "seconds", "hours"]
MAIN = ("lr", "local_steps", "rank", "space.rank")  # settings of a method that notebooks show


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
            place = "`result.weights[0]`"
            if self.run_dir is not None and self.weights:
                place = f"fedspan.load({str(self.run_dir)!r}, model=model)"
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
        schema = usage.get("schema")
        return Predictor(
            self.model,
            usage["kind"],
            usage["classes"],
            None if schema is None else Schema.of(schema),
            usage["columns"],
            {who: Schema.of(one) for who, one in usage.get("own", {}).items()},
            usage["logits"],
            usage.get("several", 0),
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
        of_seed = zip(self.seeds, self.runs, strict=True)
        return [{"seed": seed, **line} for seed, lines in of_seed for line in lines]

    @property
    def status(self) -> str:
        """How the run ended: "finished", "interrupted", "stopped at round t: reason" or "diverged at round t"."""
        if len(set(self.statuses)) == 1:
            return self.statuses[0]
        of_seed = zip(self.seeds, self.statuses, strict=True)
        return "; ".join(f"seed {seed} {status}" for seed, status in of_seed)

    @property
    def finished(self) -> bool:
        """Whether the run has ended for good, be it by divergence or early stopping."""
        return "interrupted" not in self.statuses

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that the evaluations report."""
        return metrics_of(self.history[-1:])

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
        given = self.spec.get("metrics", ())
        metric = main_metric(self.metrics, given)
        sign = sign_of(metric, given, option="")
        known = [line for line in self.history if line.get(metric) is not None]
        return max(known, key=lambda line: sign * line[metric], default=None)

    @property
    def model_lines(self) -> list[Line]:
        """The evaluation of each seed's model: of the round that `KeepBest` kept, otherwise the last one."""
        pairs = zip(self.seeds, self.runs, strict=True)
        kept = [(self.model_rounds.get(seed), lines) for seed, lines in pairs if lines]
        return [next((one for one in lines if one["round"] == t), lines[-1]) for t, lines in kept]

    @property
    def up_bytes(self) -> int:
        """Bytes that all clients have sent, in all seeds."""
        return sum(lines[-1]["up_bytes"] for lines in self.runs if lines)

    @property
    def down_bytes(self) -> int:
        """Bytes that all clients have received, in all seeds."""
        return sum(lines[-1]["down_bytes"] for lines in self.runs if lines)

    def kept(self) -> list[str]:
        """The evaluations of the models that were kept instead of the last ones, in words."""
        said = []
        for seed, lines, line in zip(self.seeds, self.runs, self.model_lines, strict=False):
            if line is not lines[-1]:
                values = [f"{k}={line[k]:.4g}" for k in self.metrics if line.get(k) is not None]
                whose = f" of seed {seed}" if len(self.seeds) > 1 else ""
                said.append(
                    f"the model{whose} is that of round {line['round']}: {', '.join(values)}"
                )
        return said

    def to_pandas(self) -> Any:
        """`history` as a pandas DataFrame."""
        return data_frame(self.history)

    def plot(self, x: Axis = "round", metric: str | None = None, ax: Any = None) -> Any:
        """Draws a metric.

        Args:
            x: What it is drawn against: "round", "up_bytes", "total_bytes", "seconds", or the "hours" of a federation.
            metric: The metric; by default the main one.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            The matplotlib axis.
        """
        one_of("x", x, typing.get_args(Axis))
        if x == "hours" and any("hours" not in line for line in self.history):
            raise SpecError("`x` is 'hours', which only runs with a `federation` count; give one")
        metric = judged_by(self.history, metric, self.spec.get("metrics", ()))
        ax, several = axis_or_new(ax), len(self.seeds) > 1
        for seed, lines in zip(self.seeds, self.runs, strict=True):
            totals = [
                line | {"total_bytes": line["up_bytes"] + line["down_bytes"]} for line in lines
            ]
            draw(ax, x, totals, metric, label=f"seed {seed}" if several else None)
        names = {"round": "rounds", "up_bytes": "bytes up", "total_bytes": "bytes up and down"}
        ax.set_xlabel(names.get(x, x))
        ax.set_ylabel(metric)
        if several:
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
        for number, folder in enumerate(seed_dirs(path, self.seeds)):
            make_dir(folder)
            header = {"spec": self.spec, "seed": self.seeds[number]}
            JsonLog(folder / history.NAME, [header, *self.runs[number]])
            if self.weights:
                checkpoint.write_tensors(folder / MODEL, self.weights[number])
        if self.per_client:
            JsonLog(path / CLIENTS, self.per_client)
        if self.lr_search is not None:
            write_table(path / LR, self.lr_search)
        write_atomic(path / SPEC, tomli_w.dumps(self.spec).encode())
        write_outcome(path, self)
        return path

    def __repr__(self) -> str:
        ends, parts = self.model_lines, []
        last = max((lines[-1]["round"] for lines in self.runs if lines), default=0)
        for name in self.metrics:
            known = [end[name] for end in ends if end.get(name) is not None]
            if known and name not in DETAILS:
                parts.append(f"{name}={sum(known) / len(known):.4g}")
        together = ""
        if len(ends) > 1:
            parts.append(f"means of {len(ends)} seeds")
            together = " in all"
        of_run = zip(ends, self.runs, strict=False)
        if early := [str(one["round"]) for one, lines in of_run if one is not lines[-1]]:
            parts = [f"the model is that of round {' and '.join(early)}: {', '.join(parts)}"]
        sizes = f"{self.up_bytes / 1e6:.3g} MB up, {self.down_bytes / 1e6:.3g} MB down"
        parts.append(sizes + together)
        if (found := self.lr_search) is not None:  # which is not part of the run's bytes
            cost = f"search: {found['cost']}" if "cost" in found else found["rule"]
            parts.append(f"lr={found['values']['lr']:.3g} ({cost})")
        if "participation" in self.spec:
            parts.append(f"weights={self.spec['participation']['weights']}")
        return f"Result({self.status}, {last} rounds, {', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the method, its main settings and the last evaluations, for notebooks."""
        method = flat(self.spec.get("method", {}))
        settings = [f"{key} {method[key]}" for key in MAIN if key in method]
        head = f"{method.get('name', 'run')}, {self.status}; {', '.join(settings)}"
        names = [name for name in self.metrics if name not in DETAILS]
        names = [*["seed"] * (len(self.seeds) > 1), "round", "up_bytes", "down_bytes", *names]
        rows = [names, *([line.get(name, "") for name in names] for line in self.history[-5:])]
        table = ""
        for row in rows:
            cells = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in row)
            table += f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        return f"<p>{html.escape(head)}</p><table>{table}</table>"


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
    alone = (run_dir / history.NAME).exists()
    of_seeds = sorted(path.parent for path in run_dir.glob(f"seed-*/{history.NAME}"))
    if not (dirs := [run_dir] if alone else of_seeds):
        raise FedspanError(f"{str(run_dir)!r} holds no run: there is no {history.NAME}")
    statuses, kept = dict[int, str](), dict[int, int]()
    for card in check_run(run_dir, dirs):
        statuses |= dict(zip(card["seeds"], card["statuses"], strict=True))
        kept |= {int(seed): t for seed, t in card.get("model_rounds", {}).items()}
    runs = dict[int, tuple[Path, Line, list[Line]]]()
    for place in dirs:
        header, rows = history.read(place / history.NAME)
        spec = header["spec"]
        runs[header.get("seed", spec.get("seed", 0))] = place, spec, rows
    if len(runs) < len(dirs) or not statuses.keys() <= runs.keys():
        raise CheckpointError(
            f"{str(run_dir)!r} is damaged: its files are of the seeds {[*runs]} and {[*statuses]}; {REMEDY}"
        )
    runs = dict(sorted(runs.items()))
    weights, clients = [], per_client.read(run_dir / CLIENTS)
    own = not alone and not clients  # whether each seed has a table of its clients
    for seed, (place, *_) in runs.items():
        if own:
            clients += [{"seed": seed} | row for row in per_client.read(place / CLIENTS)]
        path = place / MODEL
        if round is not None:
            path, kept[seed] = _kept(run_dir, place, seed, round), round
        if not path.exists():
            continue
        try:
            weights.append(checkpoint.read_tensors(path)[0])
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be read ({one_line(str(error), 80)}); {REMEDY}"
            ) from None
    about, found = run_dir / USAGE, run_dir / LR
    usage = read_table(about, USAGE_FORM) if about.exists() else {}
    try:
        for one in (usage.get("schema"), *usage.get("own", {}).values()):
            _ = None if one is None else Schema.of(one)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise CheckpointError(f"{str(about)!r} is damaged: its schema; {REMEDY}") from None
    if model is not None:
        _fill(model, weights, run_dir)
    _, spec, _ = next(iter(runs.values()))
    return Result(
        tuple(runs),
        [rows for *_, rows in runs.values()],
        [statuses.get(seed, "interrupted") for seed in runs],
        spec,
        run_dir,
        model,
        weights,
        read_lr(found) if found.exists() else None,
        PerClient(clients, spec.get("metrics", ()), kept),
        kept,
        usage,
    )


def _kept(run_dir: Path, folder: Path, seed: int, t: int) -> Path:
    """Return the file of the model of round t."""
    at_least("round", t, 0)
    places = (folder, run_dir / f"seed-{seed}")
    files = (file for place in places for file in place.glob("models/round-*.safetensors"))
    there = {int(file.stem[6:]): file for file in files}
    if t not in there:
        known = (
            f"there are {', '.join(map(str, sorted(there)))}"
            if there
            else "`Checkpoint` keeps some"
        )
        raise FedspanError(f"`round` is {t}, and {str(run_dir)!r} has no model of it; {known}")
    return there[t]


def _fill(model: nn.Module, weights: list[dict[str, torch.Tensor]], run_dir: Path) -> None:
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
