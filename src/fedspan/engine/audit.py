"""The audit trail of a run: `audit.jsonl`, one file per seed, in which every line holds the hash of the line before.

Line one says what is run. Every further line has some rounds: who took part and counted, whose replies did not count,
what happened to clients, bytes, and the evaluation at its end. A changed, removed or moved line shows at its number.
Lines cut off at the end show because the checkpoint, and at the end `result.json` and `provenance.json`, hold the last
hash.

Lines are written with an evaluation or a checkpoint, not after every round.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError
from fedspan.core.sealed import LONG
from fedspan.core.spec import Spec
from fedspan.core.versions import versions
from fedspan.engine.history import Lines, line_of, read_until
from fedspan.engine.loop import Line, Loop, Row
from fedspan.engine.outcome import AUDIT, seed_dirs

MOST = 1024  # rounds of a line


class Audit(Callback):
    """Writes the trail of a run that has a directory."""

    def __init__(self, loop: Loop, spec: Spec) -> None:
        assert loop.run_dir is not None
        self.loop, self.rounds, self.first = loop, list[Any](), loop.t
        self.files: dict[str, Lines] = {}
        for folder, seed in zip(seed_dirs(loop.run_dir, loop.seeds), loop.seeds, strict=True):
            name = (folder / AUDIT).relative_to(loop.run_dir).as_posix()
            header = {
                "run": loop.id,
                "seed": seed,
                "identity": spec.identity(),
                "clients": loop.problem.clients,
            }
            lines = self._continued(folder / AUDIT, loop.checks.get(name, ""), header)
            self.files[name] = Lines(folder / AUDIT, lines, LONG, spec.privacy is not None)
            loop.checks[name] = self.files[name].check

    def _continued(self, path: Path, check: str, header: Line) -> list[Line]:
        """The file up to the checkpoint; one that was damaged is kept under another name, and a new one says so."""
        now = {"time": _now(), "versions": versions()}
        try:
            lines = read_until(path, check, LONG)
        except CheckpointError as error:
            if path.exists():
                path.replace(path.with_name(f"damaged-{self.loop.t}-{AUDIT}"))
            return [header | now | {"damaged": str(error).split(";")[0], "resumed": self.loop.t}]
        return [*lines, {"resumed": self.loop.t} | now] if lines else [header | now]

    def on_round_end(self, run: Loop) -> None:
        """Notes who took part."""
        self.rounds.append(run.heard)
        if len(self.rounds) >= MOST:
            self.flush()

    def flush(self, row: Row | None = None) -> None:
        """Writes the rounds since the last line, and an evaluation."""
        if not self.rounds and row is None:
            return
        up, down = self.loop.ledger.totals()
        for run, (name, file) in enumerate(self.files.items()):
            line: Line = {"time": _now()}
            if self.rounds:
                line |= {
                    "rounds": [self.first, self.loop.t - 1],
                    "counted": [
                        ranges(ids[run][places]) if len(ids) else ""
                        for ids, places, *_ in self.rounds
                    ],
                }
                line |= self._missing(run)
                line |= {"up_bytes": int(up[run]), "down_bytes": int(down[run])}
            if events := [event for *_, told in self.rounds for event in told]:
                line["events"] = events
            if row is not None:
                line["evaluated"] = {k: v for k, v in line_of(row, run).items() if k != "events"}
            file.append(line)
            self.loop.checks[name] = file.check
        self.rounds, self.first = [], self.loop.t

    def _missing(self, run: int) -> Line:
        """Round → clients that were asked and did not count."""
        found = {}
        for number, (ids, places, *_) in enumerate(self.rounds, self.first):
            if len(ids) and len(places) < ids.shape[1]:
                counted = set(ids[run][places].tolist())
                found[str(number)] = ranges(one for one in ids[run].tolist() if one not in counted)
        return {"not_counted": found} if found else {}

    def end(self, statuses: list[str], models: list[str]) -> None:
        """The last line: how the run ended, and the hash of its model."""
        self.flush()
        for (name, file), status, model in zip(self.files.items(), statuses, models, strict=True):
            file.append(
                {"time": _now(), "ended": status, "round": self.loop.t, "model_sha256": model}
            )
            self.loop.checks[name] = file.check

    def last_hashes(self) -> dict[str, str]:
        """File → the hash of its last line, one per seed."""
        return {name: file.check for name, file in self.files.items()}


def ranges(ids: Iterable[int]) -> str:
    """Numbers as people write them: 0-3,7."""
    parts: list[list[int]] = []
    for one in sorted(map(int, ids)):
        if parts and one == parts[-1][1] + 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def numbers(text: str, below: int | None = None) -> list[int]:
    """The inverse of `ranges`; raises ValueError where a number is not below `below`, or the text is another one."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ends = int(first), int(last or first)
        if (below is not None and not ends[1] < below) or (found and ends[0] <= found[-1]):
            raise ValueError(part)
        found += range(ends[0], ends[1] + 1)
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
