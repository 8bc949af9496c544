"""A run on disk: its history, its checkpoint and its result, in a directory from which it can be resumed.

    spec.toml      what is run              checkpoint.safetensors  everything to continue to the same bits
    history.jsonl  evaluations as they come    audit.jsonl             who took part and what happened
    model.safetensors, clients.csv, result.json  at the end

Several seeds of one batched computation have a directory `seed-*` each and share the checkpoint and the result. A
finished run keeps its checkpoint where it can be made longer.
"""

from __future__ import annotations

import datetime
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.core import checkpoint
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError, SpecError, Terminated
from fedspan.core.extras import versions
from fedspan.core.files import (
    csv_text,
    lock_dir,
    remove,
    remove_leftovers,
    removed_on_failure,
    sync,
    write_atomic,
)
from fedspan.core.json_log import JsonLog, Line, check_form, read_lines
from fedspan.core.layout import all_finite
from fedspan.core.metric import column_of
from fedspan.core.signals import sigterm_again
from fedspan.core.spec import Spec, flat
from fedspan.core.terminal import log, report
from fedspan.core.wire import check_weights
from fedspan.engine import history, provenance
from fedspan.engine.audit import line_of_rounds
from fedspan.engine.history import HELD_OUT, undefined_where
from fedspan.engine.loop import Heard, Loop, Row, start_of
from fedspan.engine.provenance import (
    AUDIT,
    BEST,
    CHECKPOINT,
    MODEL,
    OUTCOME,
    SPEC,
    TRAFFIC,
    read_outcome,
    seed_dirs,
)
from fedspan.engine.result import Result, load
from fedspan.engine.simulator import Simulator
from fedspan.replies.chain import Event

MOST = 1024  # rounds of a line of the audit trail
CHECKPOINT_FORM = {
    "decisions": dict[str, Any], "identity": str, "seeds": list[int], "round": int, "start": str,
    "spec": dict[str, Any],
}  # fmt: skip


def execute(
    loop: Loop,
    spec: Spec,
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    apart: bool = False,
    costs: Mapping[str, Any] | None = None,
) -> Result:
    """Runs a loop to the end of its spec, in `loop.run_dir` where there is one.

    Args:
        loop: The run.
        spec: Its settings.
        resume: Whether to continue the run in the directory.
        checkpoint_every: Rounds between two checkpoints of a server across machines, which has signals of its own and
            resumes a diverged run from its last good checkpoint. None: with an evaluation every few seconds.
        apart: Whether it is one of several seeds with run directories of their own, whose parent has the card.
        costs: What reports show of the run besides its evaluations.

    Raises:
        KeyboardInterrupt: The run was interrupted by Ctrl-C; what was done so far is saved.
        Terminated: The same by SIGTERM.
    """
    out, here = loop.run_dir, checkpoint_every is None

    def begun() -> bool:
        if loop.t == 0 and isinstance(loop.transport, Simulator):
            loop.transport.close()  # an open file could not be deleted on every system
        return loop.t > 0 or resume

    locked = nullcontext() if out is None else lock_dir(out)
    with locked, removed_on_failure(lambda: _written(loop, spec), begun):
        if out is not None and resume and (found := _ended(out, loop, spec, retry=not here)):
            return found
        key = None if out is None or apart else provenance.signing_key()
        files = RunFiles(loop, spec, checkpoint_every)
        if out is not None:
            files.open(resume, costs or {}, apart)

        # --- Rounds ---
        with stop_signals(loop) if here else nullcontext(list[int]()) as received:
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

        # --- Result ---
        statuses = [_status(loop, lines, spec.rounds) for lines in loop.lines]
        if statuses[0] == "interrupted":  # between two evaluations
            files.finite = [(loop.model(), loop.buffers)] * len(loop.seeds)
        result = Result(loop.seeds, loop.lines, statuses, spec.table(), out)
        result.usage = dict(loop.problem.usage)
        for run, finite in enumerate(files.finite):
            result.weights.append(loop.problem.state_dict(*finite, run))
        failed: Exception | None = None
        for callback in loop.callbacks:
            try:
                callback.on_run_end(loop, result)
            except Exception as error:  # a mistake there must not cost the trained model
                failed = failed or error
        if out is not None:
            files.close(result, key)
        if failed is not None:
            raise failed
        _warn(loop, result)
    if received:
        more = "" if out is None else f"; resume=True continues the run in {str(out)!r}"
        ended = Terminated if signal.SIGTERM in received else KeyboardInterrupt
        raise ended(f"stopped after round {loop.t}{more}")
    return result


def _status(loop: Loop, lines: Sequence[Line], rounds: int) -> str:
    diverged = next((line["round"] for line in lines if line.get("diverged")), None)
    if diverged is not None:
        return f"diverged at round {diverged}"
    if loop.t >= rounds:
        return "finished"
    return f"stopped at round {loop.t}: {loop.reason}" if loop.reason else "interrupted"


def _warn(loop: Loop, result: Result) -> None:
    """Warns of seeds that diverged, and of metrics that have no value."""
    for seed, status in zip(loop.seeds, result.statuses, strict=True):
        if status.startswith("diverged"):
            remedy = "try a smaller lr"
            if seed not in result.model_rounds:
                remedy += "; the result holds the model of the last evaluation with a finite loss"
            if status == "diverged at round 0":
                remedy = "its loss is not finite before the first round: look at the data, the weights and the loss"
            text = f"the run of seed {seed} {status}; {remedy}"
            if log.handlers:  # not twice on a terminal
                log.warning("%s", text)
            warnings.warn(text, stacklevel=4)
    lines = [line for line in result.model_lines if not line.get("diverged")]
    for prefix, data in {"": "test", HELD_OUT: "validation"}.items():
        for name in (prefix + column_of(one) for one in loop.metrics):
            if any(line.get(name, "") is None for line in lines):
                text = f"the metric {name!r} is undefined on the {data} data{undefined_where(name)}"
                warnings.warn(text, stacklevel=4)


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
        yield Path(spec.engine.states_dir)
        yield from Path(spec.engine.states_dir).glob("*.states")


class RunFiles(Callback):
    """What a run writes while it goes on; nothing where it has no directory."""

    seconds = 5.0  # from one checkpoint to the next

    def __init__(self, loop: Loop, spec: Spec, every: int | None) -> None:
        self.loop, self.spec, self.every, self.out = loop, spec, every, loop.run_dir or Path()
        self.folders = seed_dirs(self.out, loop.seeds)
        self.logs: list[tuple[JsonLog, JsonLog]] = []  # history and audit trail of each seed
        self.rounds = list[Heard]()  # since the last line of the trail
        self.saved = time.monotonic()
        self.start = loop.start  # what the run was begun from; a resumed run keeps it
        self.changes: Line = {}  # "lr": [round, lr] where a resumed run has changed it
        # the model before a divergence
        self.finite = [(loop.model(), loop.buffers)] * len(loop.seeds)

    def open(self, resume: bool, costs: Mapping[str, Any], apart: bool) -> None:
        """Prepares the files for the next row, and continues the loop where they end."""
        loop, spec, out = self.loop, self.spec, self.out
        for folder in {out, *self.folders}:
            remove_leftovers(folder, provenance.COVERED)
        if resume:
            self._resume()
        else:
            check_vacant(out)
            if any((folder / history.NAME).exists() for folder in self.folders):
                raise SpecError(
                    f"{str(out)!r} holds a history without its checkpoint; delete it, or choose another `run_dir`"
                )
            self.save()  # first of all: from here on the run can be resumed
        # before the files that it vouches for are changed
        for folder in (out, out.parent) if apart else (out,):
            remove(folder / OUTCOME)
        write_atomic(out / SPEC, spec.toml().encode())
        now: Line = {"time": _now(), "versions": versions()}
        for seed, folder in zip(loop.seeds, self.folders, strict=True):
            of_seed = {"spec": spec.table() | {"seed": seed}, "versions": versions()}
            header: Line = {**of_seed, "costs": dict(costs), **self.changes}
            path, name, check = self._log(folder, history.NAME)
            lines, _ = read_lines(path, check)
            evaluations = JsonLog(path, [*lines, header], loop.checks, name)
            header = {"run": loop.id, "seed": seed, "identity": spec.identity()}
            header |= {"clients": loop.problem.clients, **now}
            if (names := loop.problem.names) is not None:
                header["names"] = [*names]
            path, name, check = self._log(folder, AUDIT)
            try:
                lines, _ = read_lines(path, check)
                again: Line = {"resumed": loop.t, **now}
                if resume and (told := line_of_rounds([loop.heard], 0, loop.seeds)[1:]):
                    again["events"] = told
                lines = [*lines, again] if lines else [header]
            except CheckpointError as error:  # it is kept under another name
                if path.exists():
                    path.replace(folder / f"damaged-{loop.t}-{AUDIT}")
                lines = [header | {"damaged": str(error).split(";")[0], "resumed": loop.t}]
            trail = JsonLog(path, lines, loop.checks, name, spec.privacy is not None)
            self.logs.append((evaluations, trail))
        loop._each_round = [*loop._each_round, self]

    def _log(self, folder: Path, kind: str) -> tuple[Path, str, str]:
        """The path of a log, its name, and the checksum of the last line that the checkpoint knows."""
        name = (folder / kind).relative_to(self.out).as_posix()
        return folder / kind, name, self.loop.checks.get(name, "")

    def _resume(self) -> None:
        loop, spec, path = self.loop, self.spec, self.out / CHECKPOINT
        arrays, meta = checkpoint.load(path)
        check_form(meta, path, CHECKPOINT_FORM, {"lr": list[Any]})
        before = _same_run(meta, spec, loop.seeds)
        _not_shorter(spec, meta["round"], self.out)
        given, self.start = loop.start, meta["start"]
        loop.load(arrays)
        # no error: who draws a model anew could never resume
        if given not in (self.start, start_of(loop.model())):
            warnings.warn(
                "`model` does not have the initial weights that the run was begun with; it goes on from its checkpoint",
                stacklevel=5,
            )
        if meta["round"] != loop.t:
            raise CheckpointError(
                f"{str(path)!r} is damaged: its parts are of different rounds; start the run again"
            )
        loop.heard = loop.heard._replace(t=loop.t)
        self.changes = {"lr": meta["lr"]} if meta.get("lr") else {}
        if before != spec.method.lr:
            lrs = self.changes.get("lr", [[0, before]])
            self.changes = {"lr": [*lrs, [loop.t, spec.method.lr]]}
            text = f"lr is {spec.method.lr} from here on, and was {before}"
            loop.note([Event("lr", None, text)])
        up, down = loop.ledger.totals()
        for number, folder in enumerate(self.folders if loop.t else ()):
            path, _, check = self._log(folder, history.NAME)
            _, lines = history.read(path, check)
            loop.lines[number] = lines
            ends = {"round": loop.t, "up_bytes": up[number], "down_bytes": down[number]}
            if not lines or any(lines[-1][key] > end for key, end in ends.items()):
                raise CheckpointError(
                    "the checkpoint is damaged: its history is of a later round; start the run again"
                )

    def add(self, row: Row) -> None:
        """Adds an evaluation; a seed that has diverged gets no more."""
        for number, lines in enumerate(self.loop.lines):
            if not row.diverged[number]:
                self.finite[number] = (self.loop.model(), self.loop.buffers)
            if not (lines and lines[-1].get("diverged")):
                lines.append(history.line_of(row, number))
                if self.logs:
                    self.logs[number][0].append(lines[-1])
        self._flush()

    def on_round_end(self, run: Loop) -> None:
        """Notes who took part, and saves the run if it is time."""
        self.rounds.append(run.heard)
        if len(self.rounds) >= MOST:
            self._flush()
        if self.every is not None and run.t % self.every == 0:
            self.save()

    def _flush(self) -> None:
        """Writes the rounds since the last line of the trail."""
        if not self.rounds:
            return
        up, down = self.loop.ledger.totals()
        for number, (_, trail) in enumerate(self.logs):
            told = line_of_rounds(self.rounds, number, self.loop.seeds)
            line: Line = {"time": _now(), "events": told}
            line |= {"up_bytes": int(up[number]), "down_bytes": int(down[number])}
            trail.append(line)
        self.rounds = []

    def save_if_due(self) -> None:
        """Saves the run if it has a directory and the last checkpoint is old."""
        if self.logs and self.every is None and time.monotonic() - self.saved > self.seconds:
            self.save()

    def save(self) -> None:
        """Writes a checkpoint."""
        if not any(all_finite(x) for x in self.loop.model()):
            return  # the checkpoint before is the last one to go on from
        self._flush()
        for one in (one for pair in self.logs for one in pair):
            sync(one.path)
        meta = _decisions(self.spec) | {"seeds": list(self.loop.seeds), "round": self.loop.t}
        meta |= {"start": self.start} | self.changes
        checkpoint.save(self.out / CHECKPOINT, self.loop.save(), meta)
        self.loop.transport.saved()
        self.saved = time.monotonic()

    def close(self, result: Result, key: Any) -> None:
        """Writes the models and the card of a run that has ended, or a last checkpoint."""
        loop, spec, out = self.loop, self.spec, self.out
        # whether it can be made longer: the secret key of noise is deleted with its end
        grows = not spec.length_decides and loop.chain.noise is None
        grows = grows and "finished" in result.statuses
        if grows or not result.finished:
            self.save()
        if not result.finished:
            return
        self._flush()
        for number, folder in enumerate(self.folders):
            checkpoint.write_tensors(folder / MODEL, result.weights[number])
            counts = (loop.ledger.up, loop.ledger.down, loop.last_round)
            names = loop.problem.names or range(loop.problem.clients)
            columns = zip(names, *(one[number].tolist() for one in counts), strict=True)
            heads = ("client", "up_bytes", "down_bytes", "last_round")
            text = csv_text([dict(zip(heads, row, strict=True)) for row in columns])
            write_atomic(folder / TRAFFIC, text.encode(), private=spec.privacy is not None)
            self.logs[number][1].append({"time": _now(), "ended": result.statuses[number]})
        ends = [{k: v for k, v in lines[-1].items() if k != "events"} for lines in result.runs]
        about = {"run": loop.id, "start": self.start, "rounds": loop.t, "metrics": ends}
        about |= _decisions(spec) | {"versions": versions()} | self.changes
        keep = grows or (self.every is not None and result.status.startswith("diverged"))
        provenance.write_outcome(out, result, about, key=key, keeps=keep)
        for name in () if keep else provenance.UNFINISHED:
            remove(out / name)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def check_vacant(run_dir: Path) -> None:
    """Refuses a directory that holds a run."""
    if any((run_dir / name).exists() for name in (CHECKPOINT, OUTCOME)):
        raise SpecError(
            f"{str(run_dir)!r} already holds a run; continue it with `resume=True`, or choose another `run_dir`"
        )


def _ended(out: Path, loop: Loop, spec: Spec, *, retry: bool) -> Result | None:
    """The result of a run that has ended; None where it, or some seed of it, can go on from its checkpoint."""
    if not (card := read_outcome(out)):
        return None
    lr, found = _same_run(card, spec, loop.seeds), load(out)
    if retry and found.status.startswith("diverged"):
        return None
    last = max((lines[-1]["round"] for lines in found.runs if lines), default=0)
    finished = "finished" in found.statuses
    if finished:
        _not_shorter(spec, last, out)
    if spec.rounds == last or not finished:
        if lr != spec.method.lr:
            remedy = "give more `rounds` to go on with it" if finished else "begin another run"
            raise CheckpointError(
                f"the run in {str(out)!r} has ended after {last} rounds with method.lr = {lr}, not {spec.method.lr}; "
                f"{remedy}"
            )
        for number, folder in enumerate(seed_dirs(out, loop.seeds)):
            weights = found.weights[number] if number < len(found.weights) else {}
            check_weights(weights, loop.state_dict(number), repr(str(folder / MODEL)))
        if not finished:
            report(
                f"nothing was run: the run in {str(out)!r} has ended ({found.status}) and has no checkpoint to go on "
                "from; choose another `run_dir` to run it again"
            )
        return found
    if not (out / CHECKPOINT).exists():
        why = "; with `privacy` its secret key was deleted" if loop.chain.noise is not None else ""
        raise CheckpointError(
            f"the run in {str(out)!r} has finished after {last} rounds and has no checkpoint to go on from{why}; run "
            "it again in another `run_dir`"
        )
    return None


def _not_shorter(spec: Spec, t: int, out: Path) -> None:
    if spec.rounds < t:
        raise CheckpointError(
            f"`rounds` is {spec.rounds}, but the run in {str(out)!r} is at round {t}; give `rounds` of at least {t}"
        )


def _decisions(spec: Spec) -> Line:
    """What a later run must agree with to continue this one."""
    return {"spec": spec.table(), "decisions": spec.decisions(), "identity": spec.identity()}


def _same_run(meta: Line, spec: Spec, seeds: tuple[int, ...]) -> Any:
    """Return the `lr` of a checkpoint, which is continued only with the settings that it was made with.

    Only `lr` may change, and `rounds` without a schedule.
    """
    if not isinstance(meta.get("decisions"), dict):
        raise CheckpointError(
            "the run directory does not say with which settings its run was made; begin another run"
        )
    lr = flat(meta.get("spec", {})).get("method.lr")
    if isinstance(lr, float | int):
        spec = replace(spec, method=replace(spec.method, lr=lr))  # type: ignore[type-var]
    before, now = flat(meta["decisions"]), flat(spec.decisions())
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            told = [repr(value[key]) if key in value else "its default" for value in (before, now)]
            remedy = "use the same settings"
            if key == "rounds":
                spans = spec.method.spans_run
                why = "schedule spans the run" if spans else "noise was solved for this many rounds"
                remedy = f"its {why}; keep `rounds`, or begin another run"
            raise CheckpointError(
                f"the checkpoint was made with {key} = {told[0]}, not {told[1]}; {remedy}"
            )
    if meta.get("identity") != spec.identity():
        raise CheckpointError(
            "the checkpoint was made with the patterns of `rank` in another order; use the same"
        )
    if meta.get("seeds") != list(seeds):
        raise CheckpointError(
            f"the checkpoint is of seeds {meta.get('seeds')}, not {list(seeds)}; use the same seeds"
        )
    return lr
