"""A run on disk: its history, its checkpoint and what is left at the end, in a folder that can be resumed.

    history.jsonl  rows as they come        checkpoint.safetensors  everything to go on to the same bits
    spec.toml      what was run             model.safetensors, clients.csv  at the end

Several seeds of one batched computation have a folder `seed-*` each and share the checkpoint.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedspan
from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.engine import history
from fedspan.engine.history import History, Line
from fedspan.engine.lock import held
from fedspan.engine.loop import Loop, Row

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 5.0
Table = dict[str, Any]


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


def execute(
    loop: Loop,
    table: Table,
    out: Path,
    *,
    resume: bool = False,
    on_row: Callable[[Row], None] | None = None,
    every: int | None = None,
    signals: bool = True,
) -> Result:
    """Run a loop into `out`. `table` is the resolved spec: how far to go, and what a resumed run must agree with.

    A checkpoint is written with a row every few seconds, or after `every` rounds. Ctrl-C and SIGTERM end the run after
    the round in hand, unless `signals` leaves them to whoever has set them.
    """
    with held(out):
        return _carry_out(loop, table, out, resume, on_row, every, signals)


def _carry_out(
    loop: Loop,
    table: Table,
    out: Path,
    resume: bool,
    on_row: Callable[[Row], None] | None,
    every: int | None,
    signals: bool,
) -> Result:
    folders = [out] if len(loop.seeds) == 1 else [out / f"seed-{seed}" for seed in loop.seeds]
    histories = _open(loop, table, out, folders, resume)
    saved = time.monotonic()
    if every is not None:
        loop.after_round = lambda: _save(loop, table, out) if loop.t % every == 0 else None
    rows = iter(()) if all(one.ended for one in histories) else loop.rows(table["rounds"], table["eval_every"])
    with _stop_signals(loop) if signals else nullcontext():
        for row in rows:
            for number, one in enumerate(histories):
                one.append(history.line_of(row, number))
            if every is None and time.monotonic() - saved > CHECKPOINT_SECONDS:
                _save(loop, table, out)
                saved = time.monotonic()
            if on_row is not None:
                on_row(row)
    _save(loop, table, out)
    lines = [history.read(one.path)[1] for one in histories]
    finished = loop.t >= table["rounds"] or all(one.ended for one in histories)
    if finished:
        _finish(loop, folders)
    return Result(loop.seeds, lines, finished)


def vacant(out: Path) -> None:
    """Refuse a folder that holds a run."""
    if (out / CHECKPOINT).exists():
        raise SpecError(f"{str(out)!r} already holds a run; add --resume to go on with it, or choose another --out")


def versions() -> dict[str, str]:
    """What the numbers of a run depend on besides its spec."""
    return {
        "fedspan": fedspan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def toml(table: Table, prefix: str = "") -> str:
    """A table as TOML: plain values first, then tables; tables inside tables as `a.b`, in lists as `{ a = 1 }`."""
    named = {_toml_key(key): value for key, value in table.items()}
    lines = [f"{key} = {_toml_value(value)}" for key, value in named.items() if not isinstance(value, dict)]
    for key, value in named.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml_key(k)} = {_toml_value(v)}' for k, v in value.items())} }}"
    return f"[{', '.join(map(_toml_value, value))}]" if isinstance(value, list | tuple) else json.dumps(value)


def _open(loop: Loop, table: Table, out: Path, folders: list[Path], resume: bool) -> list[History]:
    """Histories ready for the next row, and the loop where they end."""
    headers = [{"spec": table | {"seed": seed}, "versions": versions()} for seed in loop.seeds]
    places = list(zip([folder / history.NAME for folder in folders], headers, strict=True))
    if resume:
        arrays, meta = checkpoint.load(out / CHECKPOINT)
        _same_run(meta, table, loop.seeds)
        loop.load(arrays)
        return [History.continued(path, header, loop.t) for path, header in places]
    vacant(out)
    if any(path.exists() for path, _ in places):
        raise SpecError(f"{str(out)!r} holds a history without its checkpoint; delete it, or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        _save(loop, table, out)  # first of all: from here on the run can be resumed
        (out / "spec.toml").write_text(toml(table) + "\n")
        return [History(path, header) for path, header in places]
    except OSError as error:
        raise SpecError(f"cannot write to {str(out)!r}: {error.strerror}") from None


def _same_run(meta: Table, table: Table, seeds: tuple[int, ...]) -> None:
    """A checkpoint goes on only with the spec it was made with; `rounds` alone may change."""
    before, now = _flat(meta["spec"]), _flat(table)
    different = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and k != "rounds"]
    if different:
        key = different[0]
        raise CheckpointError(
            f"the checkpoint was made with {key} = {before.get(key)!r}, not {now.get(key)!r}; use the same spec"
        )
    if tuple(meta["seeds"]) != seeds:
        raise CheckpointError(f"the checkpoint is of seeds {meta['seeds']}, not {list(seeds)}; use the same --seeds")


def _save(loop: Loop, table: Table, out: Path) -> None:
    checkpoint.save(out / CHECKPOINT, loop.save(), {"spec": table, "seeds": list(loop.seeds), "round": loop.t})


def _finish(loop: Loop, folders: list[Path]) -> None:
    """The model and the bytes of each client, once a run is over."""
    model = loop.method.model(loop.server)
    for number, folder in enumerate(folders):
        parts = loop.problem.layout.split(model[number : number + 1])
        checkpoint.write_tensors(folder / "model.safetensors", {name: part[0, 0] for name, part in parts.items()})
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["client", "up_bytes", "down_bytes", "last_round"])
        counts = zip(loop.ledger.up[number], loop.ledger.down[number], loop.last_round[number], strict=True)
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
