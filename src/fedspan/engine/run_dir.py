"""A run on disk: its history, its checkpoint and its result, in a directory from which it can be resumed.

    spec.toml      what is run              checkpoint.safetensors  everything to continue to the same bits
    history.jsonl  evaluations as they come    audit.jsonl             who took part when, as a chain of hashes
    model.safetensors, clients.csv, provenance.json, result.json  at the end

Several seeds of one batched computation have a directory `seed-*` each and share the checkpoint. A finished run keeps
no checkpoint, unless it is asked for.
"""

from __future__ import annotations

import csv
import io
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import checkpoint
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError, SpecError, Terminated
from fedspan.core.extras import versions
from fedspan.core.files import (
    lock_dir,
    remove,
    remove_leftovers,
    removed_on_failure,
    write_atomic,
)
from fedspan.core.json_log import check_form
from fedspan.core.layout import all_finite
from fedspan.core.metric import column_of
from fedspan.core.signals import sigterm_again
from fedspan.core.spec import Spec, Table, flat
from fedspan.core.wire import check_weights
from fedspan.engine import history, provenance
from fedspan.engine.audit import Audit
from fedspan.engine.history import HELD_OUT, History, undefined_where
from fedspan.engine.loop import Loop, Row
from fedspan.engine.provenance import (
    AUDIT,
    BEST,
    CHECKPOINT,
    CHECKPOINT_FORM,
    CLIENTS,
    MODEL,
    OUTCOME,
    SPEC,
    TRAFFIC,
    outcome_text,
    read_outcome,
    seed_dirs,
)
from fedspan.engine.result import Result, load
from fedspan.engine.simulator import Simulator

CHECKPOINT_SECONDS = 5.0
WRITTEN = (
    AUDIT, BEST, CHECKPOINT, CLIENTS, MODEL, OUTCOME, SPEC, TRAFFIC, history.NAME, provenance.CARD,
)  # fmt: skip


@dataclass(frozen=True)
class Keeping:
    """What a run writes, and how it is stopped."""

    resume: bool = False
    checkpoint_every: int | None = None  # rounds; None: with an evaluation every few seconds
    keep_checkpoint: bool = False  # also after the run has finished, so that it can be made longer
    retry_diverged: bool = False  # a diverged run resumes from its last good checkpoint
    signals: bool = True  # Ctrl-C and SIGTERM end the run after the current round
    seeds: tuple[int, ...] = ()  # all seeds, if each has a run directory below a common one
    costs: Mapping[str, Any] = field(default_factory=dict)  # for the first line of the history


def execute(loop: Loop, spec: Spec, keeping: Keeping | None = None) -> Result:
    """Runs a loop to the end of its spec, in `loop.run_dir` where there is one.

    Raises:
        KeyboardInterrupt: The run was interrupted by Ctrl-C; what was done so far is saved.
        Terminated: The same by SIGTERM.
    """
    keeping = keeping or Keeping()

    def begun() -> bool:
        if loop.t == 0 and isinstance(loop.transport, Simulator):
            loop.transport.close()  # an open file could not be deleted on every system
        return loop.t > 0 or keeping.resume

    directory: AbstractContextManager[None] = (
        nullcontext() if loop.run_dir is None else lock_dir(loop.run_dir)
    )
    with directory, removed_on_failure(lambda: _written(loop, spec), begun):
        result, received = _execute(loop, spec, keeping)
    if received:
        more = (
            ""
            if loop.run_dir is None
            else f"; resume=True continues the run in {str(loop.run_dir)!r}"
        )
        error = Terminated if signal.SIGTERM in received else KeyboardInterrupt
        raise error(f"stopped after round {loop.t}{more}")
    return result


def _execute(loop: Loop, spec: Spec, keeping: Keeping) -> tuple[Result, list[int]]:
    files = _open(loop, spec, keeping)
    if files is None:
        assert loop.run_dir is not None
        found = load(loop.run_dir)
        for number, folder in enumerate(seed_dirs(loop.run_dir, loop.seeds)):
            weights = found.weights[number] if number < len(found.weights) else {}
            check_weights(weights, loop.state_dict(number), repr(str(folder / MODEL)))
        return found, []
    signals: AbstractContextManager[list[int]] = (
        stop_signals(loop) if keeping.signals else nullcontext([])
    )
    with signals as received:
        try:
            for callback in loop.callbacks:
                callback.on_run_start(loop)
            for row in loop.rows(spec.rounds, spec.eval_every):
                files.add(row)
                for callback in loop.callbacks:
                    callback.on_evaluate(loop, row)
                files.save_if_due()  # after the callbacks, whose own files must not be behind the checkpoint
        except BaseException:
            for callback in loop.callbacks:
                callback.on_run_error(loop)
            raise
    statuses = [_status(loop, lines, spec.rounds) for lines in loop.lines]
    if statuses[0] == "interrupted":  # between two evaluations
        files.finite = [(loop.model(), loop.buffers)] * len(loop.seeds)
    result = Result(loop.seeds, loop.lines, statuses, spec.table(), loop.run_dir)
    result.weights = [
        loop.problem.state_dict(*finite, run) for run, finite in enumerate(files.finite)
    ]
    failed: Exception | None = None
    for callback in loop.callbacks:
        try:
            callback.on_run_end(loop, result)
        except Exception as error:  # a mistake there must not cost the trained model
            failed = failed or error
    files.close(result, keeping)
    if failed is not None:
        raise failed
    for seed, status in zip(loop.seeds, statuses, strict=True):
        if status.startswith("diverged"):
            remedy = "try a smaller lr"
            if seed not in result.model_rounds:
                remedy += "; the result holds the model of the last evaluation with a finite loss"
            if status == "diverged at round 0":
                remedy = "its loss is not finite before the first round: look at the data, the weights and the loss"
            warnings.warn(f"the run of seed {seed} {status}; {remedy}", stacklevel=4)
    columns = [column_of(one) for one in loop.metrics]
    asked = dict.fromkeys(columns, "test") | {HELD_OUT + name: "validation" for name in columns}
    for name, data in asked.items():
        if any(
            name in line and line[name] is None and not line.get("diverged")
            for line in result.model_lines
        ):
            warnings.warn(
                f"the metric {name!r} is undefined on the {data} data{undefined_where(name)}",
                stacklevel=4,
            )
    return result, received


def _status(loop: Loop, lines: Sequence[dict[str, Any]], rounds: int) -> str:
    diverged = next((line["round"] for line in lines if line.get("diverged")), None)
    if diverged is not None:
        return f"diverged at round {diverged}"
    if loop.t >= rounds:
        return "finished"
    return f"stopped at round {loop.t}: {loop.reason}" if loop.reason else "interrupted"


@contextmanager
def stop_signals(loop: Loop) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the run after the current round, a second one at once; gives the signals received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGTERM] in (None, signal.SIG_IGN):
        del before[signal.SIGTERM]

    def ask(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
        elif sigterm_again():
            return
        elif number in received:
            raise Terminated("stopped by SIGTERM")
        loop.stop = True
        received.append(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _written(loop: Loop, spec: Spec) -> Iterator[Path]:
    """The files and folders that the first evaluation of a run may have left."""
    out = loop.run_dir
    if out is not None:
        yield from (out / name for name in (CHECKPOINT, SPEC, BEST))
        for folder in seed_dirs(out, loop.seeds):
            yield from (folder / history.NAME, folder / AUDIT)
            if folder != out:
                yield folder
    if spec.engine.states_dir is not None:
        states = Path(spec.engine.states_dir)
        yield states
        for one in states.glob("*.states"):
            yield from states.glob(f"{one.stem}.*")


class _Files:
    """What a run writes while it goes on; nothing where it has no directory."""

    def __init__(self, loop: Loop, spec: Spec, every: int | None) -> None:
        self.loop, self.spec, self.every = loop, spec, every
        self.histories: list[History] = []
        self.audit: Audit | None = None
        self.key = provenance.signing_key() if loop.run_dir is not None else None
        self.saved = time.monotonic()
        self.start = loop.start  # what the run was begun from; a resumed run keeps it
        self.finite = [(loop.model(), loop.buffers)] * len(
            loop.seeds
        )  # the model before a divergence

    def add(self, row: Row) -> None:
        for number, lines in enumerate(self.loop.lines):
            if not row.diverged[number]:
                self.finite[number] = (self.loop.model(), self.loop.buffers)
            if not (lines and lines[-1].get("diverged")):
                lines.append(history.line_of(row, number))
                if self.histories:
                    self.histories[number].append(lines[-1])
        if self.audit is not None:
            self.audit.flush(row)

    def save_if_due(self) -> None:
        if (
            self.histories
            and self.every is None
            and time.monotonic() - self.saved > CHECKPOINT_SECONDS
        ):
            self.save()

    def save(self) -> None:
        assert self.loop.run_dir is not None
        if not any(all_finite(x) for x in self.loop.model()):
            return  # the checkpoint before is the last one to go on from
        if self.audit is not None:
            self.audit.flush()
        meta: Table = _decisions(self.spec) | {"seeds": list(self.loop.seeds), "round": self.loop.t}
        meta |= {"start": self.start, "history": [one.mark() for one in self.histories]}
        checkpoint.save(self.loop.run_dir / CHECKPOINT, self.loop.save(), meta)
        self.loop.transport.saved()
        self.saved = time.monotonic()

    def close(self, result: Result, keeping: Keeping) -> None:
        run_dir, keep = self.loop.run_dir, keeping.keep_checkpoint
        if run_dir is None:
            return
        if keep or not result.finished:
            self.save()
        if not result.finished:
            return
        folders = seed_dirs(run_dir, self.loop.seeds)
        for number, folder in enumerate(folders):
            checkpoint.write_tensors(folder / MODEL, result.weights[number])
            _write_clients(self.loop, number, folder, self.spec.privacy is not None)
        assert self.audit is not None
        self.audit.end(result.statuses, [provenance.sha256(folder / MODEL) for folder in folders])
        about = _decisions(self.spec) | result.kept_rounds() | {"audit": self.loop.checks}
        outcome = outcome_text(run_dir, result.seeds, result.statuses, about)
        keep |= keeping.retry_diverged and result.status.startswith("diverged")
        provenance.write_cards(
            self.loop, self.spec, result, self.start, self.audit.last_hashes(), self.key, outcome,
            seeds=keeping.seeds, keeps=keep,
        )  # fmt: skip
        write_atomic(run_dir / OUTCOME, outcome)
        for name in () if keep else (CHECKPOINT, BEST):
            remove(run_dir / name)


class _SaveEvery(Callback):
    """A checkpoint after every so many rounds."""

    def __init__(self, files: _Files, rounds: int) -> None:
        self.files, self.rounds = files, rounds

    def on_round_end(self, run: Loop) -> None:
        if run.t % self.rounds == 0:
            self.files.save()


def check_vacant(run_dir: Path) -> None:
    """Refuses a directory that holds a run."""
    if any((run_dir / name).exists() for name in (CHECKPOINT, OUTCOME)):
        raise SpecError(
            f"{str(run_dir)!r} already holds a run; continue it with `resume=True`, or choose another `run_dir`"
        )


def _open(loop: Loop, spec: Spec, keeping: Keeping) -> _Files | None:
    """Files ready for the next row, and the loop where they end; None where the run has finished before."""
    if loop.run_dir is None:
        return _Files(loop, spec, None)
    out, table = loop.run_dir, spec.table()
    for folder in {out, *seed_dirs(out, loop.seeds)}:
        remove_leftovers(folder, WRITTEN)
    about = {"versions": versions(), "costs": dict(keeping.costs)}
    headers = [{"spec": table | {"seed": seed}, **about} for seed in loop.seeds]
    places = list(
        zip([one / history.NAME for one in seed_dirs(out, loop.seeds)], headers, strict=True)
    )
    if keeping.resume:
        if (out / OUTCOME).exists():
            _same_run(read_outcome(out), spec, loop.seeds)
            again = keeping.retry_diverged and load(out).status.startswith("diverged")
            if not again and not _longer(out, spec):
                return None
        arrays, meta = checkpoint.load(out / CHECKPOINT)
        check_form(meta, out / CHECKPOINT, CHECKPOINT_FORM, {"start": str})
        _same_run(meta, spec, loop.seeds)
        if spec.rounds < meta["round"]:
            raise CheckpointError(
                f"`rounds` is {spec.rounds}, but the run in {str(out)!r} is at round {meta['round']}; give `rounds` of "
                f"at least {meta['round']}"
            )
        if (
            meta.get("start", loop.start) != loop.start
        ):  # no error: who draws a model anew could never resume
            warnings.warn(
                "`model` does not have the initial weights that the run was begun with; it goes on from its checkpoint",
                stacklevel=5,
            )
        loop.load(arrays)
        if meta["round"] != loop.t or (loop.t and len(meta["history"]) != len(places)):
            raise CheckpointError(
                f"{str(out / CHECKPOINT)!r} is damaged: its parts are of different rounds; start the run again"
            )
        if loop.t:
            marks = [history.mark_of(mark, out / CHECKPOINT) for mark in meta["history"]]
            loop.lines = [
                history.read_marked(path, mark)
                for (path, _), mark in zip(places, marks, strict=True)
            ]
            _same_moment(loop)
    else:
        check_vacant(out)
        if any(path.exists() for path, _ in places):
            raise SpecError(
                f"{str(out)!r} holds a history without its checkpoint; delete it, or choose another `run_dir`"
            )
    files = _Files(loop, spec, keeping.checkpoint_every)
    if keeping.resume:
        files.start = meta.get("start", files.start)
    else:
        files.save()  # first of all: from here on the run can be resumed
    for path in (out / OUTCOME, *(one / provenance.CARD for one in seed_dirs(out, loop.seeds))):
        remove(path)  # before the files that it vouches for are changed
    write_atomic(out / SPEC, spec.toml().encode())
    files.histories = [
        History(path, header, lines)
        for (path, header), lines in zip(places, loop.lines, strict=True)
    ]
    files.audit = Audit(loop, spec)
    loop._each_round = [*loop._each_round, files.audit]
    if keeping.checkpoint_every is not None:
        loop.callbacks = [*loop.callbacks, _SaveEvery(files, keeping.checkpoint_every)]
        loop._each_round = [*loop._each_round, loop.callbacks[-1]]
    return files


def _longer(out: Path, spec: Spec) -> bool:
    """Whether a finished run is asked to go on, of which some seed can; it must have kept its checkpoint for that."""
    before = load(out)
    last = max((lines[-1]["round"] for lines in before.runs if lines), default=0)
    if spec.rounds <= last or "finished" not in before.statuses:
        return False
    if not (out / CHECKPOINT).exists():
        raise CheckpointError(
            f"the run in {str(out)!r} has finished after {last} rounds and kept no checkpoint to go on from; run it "
            "again in another `run_dir`: `keep_checkpoint=True` (fedspan.run) keeps one"
        )
    return True


def _decisions(spec: Spec) -> Table:
    """What a later run must agree with to continue this one."""
    return {"spec": spec.table(), "decisions": spec.decisions(), "identity": spec.identity()}


def _same_run(meta: Table, spec: Spec, seeds: tuple[int, ...]) -> None:
    """A checkpoint is continued only with the settings it was made with; `rounds` may change without a schedule."""
    if not isinstance(meta.get("decisions"), dict):
        raise CheckpointError(
            "the run directory does not say with which settings its run was made; begin another run"
        )
    before, now = flat(meta["decisions"]), flat(spec.decisions())
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            told = [repr(value[key]) if key in value else "its default" for value in (before, now)]
            why = (
                "its schedule spans the run"
                if spec.method.spans_run
                else "its noise was solved for this many rounds"
            )
            remedy = f"{why}; keep `rounds`, or begin another run" if key == "rounds" else ""
            raise CheckpointError(
                f"the checkpoint was made with {key} = {told[0]}, not {told[1]}; {remedy or 'use the same settings'}"
            )
    if meta.get("identity") != spec.identity():
        raise CheckpointError(
            "the checkpoint was made with the patterns of `rank` in another order; use the same"
        )
    if meta.get("seeds") != list(seeds):
        raise CheckpointError(
            f"the checkpoint is of seeds {meta.get('seeds')}, not {list(seeds)}; use the same seeds"
        )


def _same_moment(loop: Loop) -> None:
    """Refuses a history that is ahead of the checkpoint that names it."""
    for lines, up, down in zip(loop.lines, *loop.ledger.totals(), strict=True):
        if (
            not lines
            or lines[-1]["round"] > loop.t
            or lines[-1]["up_bytes"] > up
            or lines[-1]["down_bytes"] > down
        ):
            raise CheckpointError(
                "the checkpoint is damaged: its history is of a later round; start the run again"
            )


def _write_clients(loop: Loop, number: int, folder: Path, private: bool) -> None:
    """The bytes of each client."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["client", "up_bytes", "down_bytes", "last_round"])
    counts = zip(
        loop.ledger.up[number], loop.ledger.down[number], loop.last_round[number], strict=True
    )
    table.writerows([client, *map(int, row)] for client, row in enumerate(counts))
    write_atomic(folder / TRAFFIC, text.getvalue().encode(), private=private)
