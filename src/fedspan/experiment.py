"""A run as text: Spec ⇄ TOML, and `run`, which carries it out into a folder that can be resumed.

spec.toml  →  build  →  loop  →  history.jsonl, checkpoint.safetensors, model.safetensors, clients.csv
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import platform
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch

import fedspan
from fedspan.core import checkpoint, registry
from fedspan.core.errors import CheckpointError, SpecError, at_least
from fedspan.core.layout import DTYPES
from fedspan.core.method import Method
from fedspan.core.task import Task, Weights
from fedspan.runtimes import history
from fedspan.runtimes.history import History, Line
from fedspan.runtimes.loop import Loop, Row
from fedspan.runtimes.simulator import Simulator

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part in a round, and with what weight."""

    per_round: int | None = None  # None: all clients
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        if self.per_round is not None:
            at_least("participation.per_round", self.per_round, 1)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that decides a run's numbers."""

    rounds: int
    method: Method[Any, Any, Any, Any]
    task: Task
    seed: int = 0
    eval_every: int = 100
    dtype: Literal["float32", "float64"] = "float32"
    participation: Participation = field(default_factory=Participation)

    def __post_init__(self) -> None:
        at_least("rounds", self.rounds, 1)
        at_least("eval_every", self.eval_every, 1)
        at_least("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise SpecError(f"`seed` must be below 2**64, got {self.seed}")

    @staticmethod
    def from_table(table: dict[str, Any]) -> Spec:
        """A spec from nested plain values, each key and type checked."""
        spec = registry.make(Spec, table, "spec")
        assert isinstance(spec, Spec)
        return spec

    @staticmethod
    def load(path: Path, changes: tuple[str, ...] = ()) -> Spec:
        """A spec from a TOML file, with changes such as `method.lr=0.1` applied."""
        if not path.is_file():
            raise SpecError(f"spec file {str(path)!r} does not exist")
        try:
            table = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"spec file {str(path)!r} is not TOML: {error}") from None
        return Spec.from_table(with_changes(table, changes))

    def table(self) -> dict[str, Any]:
        """Nested plain values, defaults filled in; `from_table` of it is this spec."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sharing = {k: v for k, v in dataclasses.asdict(self.participation).items() if v is not None}
        described = {"method": registry.describe(self.method), "task": registry.describe(self.task)}
        return plain | described | {"participation": sharing}

    def toml(self) -> str:
        """The same as TOML text."""
        return _toml(self.table())


@dataclass(frozen=True)
class Result:
    """How a run ended: its rows, one list a seed."""

    seeds: tuple[int, ...]
    rows: list[list[Line]]
    finished: bool

    def status(self, run: int) -> str:
        """In words."""
        last = self.rows[run][-1]
        if last.get("diverged"):
            return f"diverged at round {last['round']}"
        return "finished" if self.finished else f"stopped after round {last['round']}; --resume goes on"


def with_changes(table: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """The table with `a.b=value` settings put in; values are TOML, or else taken as text."""
    table = json.loads(json.dumps(table))
    for change in changes:
        path, sign, text = change.partition("=")
        if not sign or not path:
            raise SpecError(f"--set needs key=value, got {change!r}")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *parents, last = path.strip().split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SpecError(f"--set {change!r}: {parent!r} is a value, not a table")
        inner[last] = value
    return table


def run(
    spec: Spec,
    out: Path,
    *,
    seeds: int = 1,
    resume: bool = False,
    on_row: Callable[[Row], None] | None = None,
) -> Result:
    """Carry out a spec in `out`; with several seeds, all of them as one batched computation in `out/seed-*`."""
    at_least("seeds", seeds, 1)
    of_runs = tuple(range(spec.seed, spec.seed + seeds))
    folders = [out] if seeds == 1 else [out / f"seed-{seed}" for seed in of_runs]
    loop = _build(spec, of_runs)
    headers = [{"spec": replace(spec, seed=seed).table(), "versions": versions()} for seed in of_runs]
    histories = _open(loop, spec, out, folders, headers, resume)
    saved = time.monotonic()
    rows = iter(()) if all(one.ended for one in histories) else loop.rows(spec.rounds, spec.eval_every)
    with _stop_signals(loop):
        for row in rows:
            for number, one in enumerate(histories):
                one.append(history.line_of(row, number))
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                _save(loop, spec, of_runs, out)
                saved = time.monotonic()
            if on_row is not None:
                on_row(row)
    _save(loop, spec, of_runs, out)
    lines = [history.read(one.path)[1] for one in histories]
    finished = loop.t >= spec.rounds or all(one.ended for one in histories)
    if finished:
        _finish(loop, folders)
    return Result(of_runs, lines, finished)


def versions() -> dict[str, str]:
    """What the numbers of a run depend on besides its spec."""
    return {
        "fedspan": fedspan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _build(spec: Spec, seeds: tuple[int, ...]) -> Loop:
    problem = spec.task.build(seeds, DTYPES[spec.dtype], spec.participation.weights)
    per_round = spec.participation.per_round or problem.clients
    return Loop(spec.method, problem, Simulator(spec.method, problem), seeds, per_round)


def _open(loop: Loop, spec: Spec, out: Path, folders: list[Path], headers: list[Line], resume: bool) -> list[History]:
    """Histories ready for the next row, and the loop where they end."""
    paths = [folder / history.NAME for folder in folders]
    if resume:
        arrays, meta = checkpoint.load(out / CHECKPOINT)
        _same_run(meta, spec, loop.seeds)
        loop.load(arrays)
        return [History.continued(*both, loop.t) for both in zip(paths, headers, strict=True)]
    if (out / CHECKPOINT).exists() or any(path.exists() for path in paths):
        raise SpecError(f"{str(out)!r} already holds a run; add --resume to go on with it, or choose another --out")
    try:
        histories = [History(*both) for both in zip(paths, headers, strict=True)]
        (out / "spec.toml").write_text(spec.toml())
    except OSError as error:
        raise SpecError(f"cannot write to {str(out)!r}: {error.strerror}") from None
    _save(loop, spec, loop.seeds, out)
    return histories


def _same_run(meta: dict[str, Any], spec: Spec, seeds: tuple[int, ...]) -> None:
    """A checkpoint goes on only with the spec it was made with; `rounds` alone may change."""
    before, now = _flat(meta["spec"]), _flat(spec.table())
    different = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and k != "rounds"]
    if different:
        key = different[0]
        raise CheckpointError(
            f"the checkpoint was made with {key} = {before.get(key)!r}, not {now.get(key)!r}; use the same spec"
        )
    if tuple(meta["seeds"]) != seeds:
        raise CheckpointError(f"the checkpoint is of seeds {meta['seeds']}, not {list(seeds)}; use the same --seeds")


def _save(loop: Loop, spec: Spec, seeds: tuple[int, ...], out: Path) -> None:
    checkpoint.save(out / CHECKPOINT, loop.save(), {"spec": spec.table(), "seeds": list(seeds), "round": loop.t})


def _finish(loop: Loop, folders: list[Path]) -> None:
    """The model and the bytes of each client, once a run is over."""
    model = loop.method.model(loop.server)
    for number, folder in enumerate(folders):
        parts = loop.problem.layout.split(model[number : number + 1])
        tensors = {name: part[0, 0].contiguous() for name, part in parts.items()}
        checkpoint.write_atomic(folder / "model.safetensors", safetensors.torch.save(tensors))
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["client", "up_bytes", "down_bytes", "last_round"])
        counts = zip(loop.ledger.up[number], loop.ledger.down[number], loop.since[number], strict=True)
        table.writerows([client, *map(int, row)] for client, row in enumerate(counts))
        checkpoint.write_atomic(folder / "clients.csv", text.getvalue().encode())


@contextmanager
def _stop_signals(loop: Loop) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the round in hand; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _frame: object) -> None:
        loop.stop = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    """Plain values first, then tables; tables inside tables as `a.b`."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)
