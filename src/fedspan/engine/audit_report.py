"""What the audit trail of a run tells, and whether it is as it was written."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError, SpecError, one_line
from fedspan.core.sealed import LONG, check_form, read_lines, read_table
from fedspan.engine.audit import numbers
from fedspan.engine.loop import Line, record_of
from fedspan.engine.outcome import AUDIT, CHECKPOINT, OUTCOME, OUTCOME_MORE
from fedspan.engine.provenance import CARD, read_card

KINDS = {
    "left out": "left out", "refused": "refused", "restored": "restored", "state lost": "state lost",
    "no reply": "no reply", "not connected": "no reply", "failed": "failed",
}  # fmt: skip  # words of an event → what happened
HEADER = {"run": str, "seed": int, "identity": str, "time": str, "versions": dict[str, str]}
LINE = {  # what a line may have
    "time": str, "versions": dict[str, str], "rounds": list[int], "counted": list[str], "not_counted": dict[str, str],
    "events": list[str], "evaluated": dict[str, float | bool | None], "up_bytes": int, "down_bytes": int,
    "resumed": int, "damaged": str, "ended": str, "round": int, "model_sha256": str,
}  # fmt: skip
CLIENTS = re.compile(r"clients? ((?:\d+(?:, )?)+)")


@dataclass
class Trail:
    """One seed's trail."""

    path: Path
    header: Line = field(default_factory=dict)
    rounds: dict[int, list[int]] = field(default_factory=dict)  # round → clients that counted
    not_counted: dict[int, list[int]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    resumed: list[Line] = field(default_factory=list)
    evaluated: Line = field(default_factory=dict)  # the last evaluation
    up_bytes: int = 0
    down_bytes: int = 0
    ended: Line = field(default_factory=dict)
    lines: int = 0
    last_hash: str = ""
    covered_by: str = ""  # the file that holds the last hash
    card: Line = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def happened(self) -> Counter[str]:
        """What happened, and how often."""
        return Counter(kind for event in self.events for kind, _ in _told(event))

    def clients(self) -> dict[int, Counter[str]]:
        """Client → how often it counted, did not, and what happened to it."""
        found: dict[int, Counter[str]] = {}
        for word, table in (("counted", self.rounds), ("not counted", self.not_counted)):
            for clients in table.values():
                for client in clients:
                    found.setdefault(client, Counter())[word] += 1
        for event in self.events:
            for kind, one in _told(event):
                if one is not None:
                    found.setdefault(one, Counter())[kind] += 1
        return dict(sorted(found.items()))


def trails(run_dir: Path) -> list[Trail]:
    """The trails of a run directory, one per seed, with all that is wrong with them."""
    paths = [path for path in (run_dir / AUDIT, *sorted(run_dir.glob(f"seed-*/{AUDIT}"))) if path.exists()]
    ended = [path.parent / AUDIT for name in (CARD, OUTCOME) for path in run_dir.glob(f"**/{name}")]
    several = [path for path in ended if path.parent != run_dir or not (run_dir / "seed-0").is_dir()]
    for path in several:
        if path not in paths and not list(path.parent.glob(f"seed-*/{AUDIT}")):
            raise CheckpointError(f"{str(path)!r} was removed: the run in its directory has ended and had one")
    if not paths:
        raise SpecError(f"there is no {AUDIT} in {str(run_dir)!r}; give the directory of a run")
    return [_read(path, run_dir) for path in paths]


def _read(path: Path, run_dir: Path) -> Trail:
    trail = Trail(path)
    try:
        lines, checks = read_lines(path, LONG)
    except CheckpointError as error:
        trail.wrong.append(f"{str(error).split(';')[0]}: it, or a line before it, was changed, removed or moved")
        return trail
    if not lines or "run" not in lines[0]:
        trail.wrong.append(f"{str(path)!r} does not begin with the line of a run")
        return trail
    try:
        check_form(lines[0], HEADER, path)
        for line in lines:
            check_form(line, {}, path, LINE)
            _take_in(trail, line)
    except (CheckpointError, ValueError, IndexError) as error:
        trail.wrong.append(f"{one_line(str(error)).split('; ')[0]}: no run has written this")
        return trail
    trail.header, trail.lines, trail.last_hash = lines[0], len(lines), checks[-1]
    if "damaged" in trail.header:
        trail.wrong.append(f"the trail begins at round {trail.header['resumed']}: {trail.header['damaged']}")
    _compare(trail, run_dir, checks)
    return trail


def _take_in(trail: Trail, line: Line) -> None:
    if "resumed" in line:
        trail.resumed.append(line)
    first = line.get("rounds", [0])[0]
    for number, text in enumerate(line.get("counted", ()), first):
        trail.rounds[number] = numbers(text)
    trail.not_counted |= {int(number): numbers(text) for number, text in line.get("not_counted", {}).items()}
    trail.events += line.get("events", ())
    trail.evaluated = line.get("evaluated", trail.evaluated)
    trail.up_bytes, trail.down_bytes = (line.get(name, getattr(trail, name)) for name in ("up_bytes", "down_bytes"))
    if "ended" in line:
        trail.ended = line


def _compare(trail: Trail, run_dir: Path, checks: list[str]) -> None:
    """Notes where another file of the run holds a hash that the trail does not have."""
    folder = trail.path.parent
    try:
        if (folder / CARD).exists():
            trail.card, wrong = read_card(folder)
            trail.wrong += wrong
            _covered(trail, CARD, trail.card["audit"]["last_hash"], checks, last=True)
        for base in {folder, run_dir}:
            name = trail.path.relative_to(base).as_posix()
            if (base / OUTCOME).exists():
                outcome = read_table(base / OUTCOME, "it was changed after the run")
                check_form(outcome, {}, base / OUTCOME, OUTCOME_MORE)
                held = outcome.get("audit", {})
                _covered(trail, OUTCOME, held.get(name, ""), checks, last=True)
            if (base / CHECKPOINT).exists():
                arrays, _ = checkpoint.load(base / CHECKPOINT)
                held = record_of(arrays)["checks"]
                _covered(trail, CHECKPOINT, held.get(name, ""), checks, last=False)
    except FedspanError as error:
        trail.wrong.append(str(error))
    if trail.ended and not trail.card:
        trail.wrong.append(f"{str(folder / CARD)!r} is missing, although the run has ended")


def _covered(trail: Trail, where: str, held: str, checks: list[str], last: bool) -> None:
    if not held:
        return
    if held not in checks or (last and held != checks[-1]):
        trail.wrong.append(f"{where} holds another last hash ({held[:16]}…): lines were cut off, added or replaced")
    else:
        trail.covered_by = trail.covered_by or where


def _told(event: str) -> list[tuple[str, int | None]]:
    """(what happened, to which client) of an event in words."""
    kind = next((kind for words, kind in KINDS.items() if words in event), "other")
    named = CLIENTS.search(event)
    clients: list[Any] = [int(one) for one in named[1].replace(",", " ").split()] if named else [None]
    return [(kind, client) for client in clients]
