"""What the audit trail of a run tells, and whether it is as it was written."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError, SpecError, one_line
from fedspan.core.sealed import LONG, check_form, read_lines, read_table
from fedspan.engine import history, per_client
from fedspan.engine.audit import numbers
from fedspan.engine.loop import Line, record_of
from fedspan.engine.outcome import (
    AUDIT,
    CHECKPOINT,
    CHECKPOINT_FORM,
    CLIENTS,
    LR,
    OUTCOME,
    OUTCOME_MORE,
    outcome_text,
    read_lr,
)
from fedspan.engine.provenance import CARD, CHANGED, check_run, read_card

KINDS = {
    "left out": "left out", "refused": "refused", "restored": "restored", "state lost": "state lost",
    "no reply": "no reply", "not connected": "no reply", "failed": "failed",
}  # fmt: skip  # words of an event → what happened
NAMED = re.compile(r"clients? ((?:\d{1,12}(?:, )?)+)")
HEADER = {
    "run": str,
    "seed": int,
    "identity": str,
    "clients": int,
    "time": str,
    "versions": dict[str, str],
}
LINE = {  # what a line may have
    "time": str, "versions": dict[str, str], "rounds": list[int], "counted": list[str], "not_counted": dict[str, str],
    "events": list[str], "evaluated": dict[str, float | bool | None], "up_bytes": int, "down_bytes": int,
    "resumed": int, "damaged": str, "ended": str, "round": int, "model_sha256": str,
}  # fmt: skip
MOST_REPLIES = 50_000_000  # that a trail may tell of: each is a number in memory


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
    replies: int = 0
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
    paths = [
        path
        for path in (run_dir / AUDIT, *sorted(run_dir.glob(f"seed-*/{AUDIT}")))
        if path.exists()
    ]
    ended = [path.parent / AUDIT for name in (CARD, OUTCOME) for path in run_dir.glob(f"**/{name}")]
    several = [
        path for path in ended if path.parent != run_dir or not (run_dir / "seed-0").is_dir()
    ]
    for path in several:
        if path not in paths and not list(path.parent.glob(f"seed-*/{AUDIT}")):
            raise CheckpointError(
                f"{str(path)!r} was removed: the run in its directory has ended and had one"
            )
    if not paths:
        raise SpecError(f"there is no {AUDIT} in {str(run_dir)!r}; give the directory of a run")
    found = [_read(path, run_dir) for path in paths]
    found[0].wrong += _wrong_with_all(run_dir, found)
    return found


def missing_seeds(found: list[Trail]) -> list[int]:
    """Seeds of a run that its cards name and of which there is no trail."""
    named = {seed for trail in found if trail.card for seed in trail.card["seeds"]}
    return (
        sorted(named - {trail.header.get("seed") for trail in found})
        if len(found) > 1 or len(named) > 1
        else []
    )


def _wrong_with_all(run_dir: Path, found: list[Trail]) -> list[str]:
    """What is wrong with the files that `fedspan.load` reads, and with the seeds as one run."""
    folders, wrong = [trail.path.parent for trail in found], list[str]()
    try:
        check_run(run_dir, folders)
        for folder in folders:
            history.read(folder / history.NAME)
        for folder in dict.fromkeys((run_dir, *folders)):
            per_client.read(folder / CLIENTS)
            if (folder / LR).exists():
                read_lr(folder / LR)
    except FedspanError as error:
        wrong.append(str(error))
    for path in sorted(run_dir.rglob(history.NAME)):
        if path.parent not in folders:
            wrong.append(f"{str(path)!r} is the history of no run that has an audit trail here")
    cards = [trail.card for trail in found if trail.card]
    if len({json.dumps({**card["spec"], "seed": 0}, sort_keys=True) for card in cards}) > 1:
        wrong.append("the model cards are of runs with different settings")
    if len({trail.header.get("seed") for trail in found}) < len(found):
        wrong.append("two audit trails are of the same seed")
    if run_dir not in folders and cards and all(OUTCOME in card["files"] for card in cards):
        wrong += _wrong_with_outcome(run_dir, found)
    return wrong


def _wrong_with_outcome(run_dir: Path, found: list[Trail]) -> list[str]:
    """What is wrong with the `result.json` of seeds that have one each: it follows from what their cards cover."""
    path, ends = (
        run_dir / OUTCOME,
        {int(t.header.get("seed", -1)): str(t.card.get("status", "")) for t in found},
    )
    if missing := missing_seeds(found):
        return (
            [f"seed {missing[0]} is missing, although the run has ended"] if path.exists() else []
        )
    if path.exists() and path.read_bytes() == outcome_text(
        run_dir, list(ends), list(ends.values())
    ):
        return []
    return (
        [f"{str(path)!r} is missing or was changed after the run"]
        if path.exists() or all(ends.values())
        else []
    )


def _read(path: Path, run_dir: Path) -> Trail:
    trail = Trail(path)
    try:
        lines, checks = read_lines(path, LONG)
    except CheckpointError as error:
        trail.wrong.append(
            f"{str(error).split(';')[0]}: it, or a line before it, was changed, removed or moved"
        )
        return trail
    if not lines or "run" not in lines[0]:
        trail.wrong.append(f"{str(path)!r} does not begin with the line of a run")
        return trail
    try:
        trail.header = check_form(lines[0], path, HEADER)
        for number, line in enumerate(lines, 1):
            _take_in(trail, check_form(line, f"line {number} of {path}", {}, LINE))
    except CheckpointError as error:
        trail.wrong.append(str(error).split("; ")[0])
        return trail
    except (ValueError, KeyError, IndexError):
        trail.wrong.append(f"line {number} of {str(path)!r} is not one that a run writes")
        return trail
    trail.lines, trail.last_hash = len(lines), checks[-1]
    if "damaged" in trail.header:
        trail.wrong.append(
            f"the trail begins at round {trail.header['resumed']}: {trail.header['damaged']}"
        )
    _compare(trail, run_dir, checks)
    return trail


def _take_in(trail: Trail, line: Line) -> None:
    """Add what a line tells; raises where it is not one that a run writes."""
    if "resumed" in line:
        trail.resumed.append({name: line[name] for name in ("resumed", "time", "versions")})
    first = line.get("rounds", [0])[0]
    for number, text in enumerate(line.get("counted", ()), first):
        trail.rounds[number] = _clients(trail, text)
    trail.not_counted |= {
        int(number): _clients(trail, text) for number, text in line.get("not_counted", {}).items()
    }
    trail.events += map(one_line, line.get("events", ()))
    trail.evaluated = line.get("evaluated", trail.evaluated)
    trail.up_bytes, trail.down_bytes = (
        line.get(name, getattr(trail, name)) for name in ("up_bytes", "down_bytes")
    )
    if "ended" in line:
        trail.ended = line


def _clients(trail: Trail, text: str) -> list[int]:
    """The clients that a text names."""
    trail.replies += sum(
        int(b or a) - int(a) + 1
        for a, _, b in (part.partition("-") for part in text.split(",") if part)
    )
    if trail.replies > MOST_REPLIES:
        raise ValueError(text)
    return numbers(text, trail.header["clients"])


def _compare(trail: Trail, run_dir: Path, checks: list[str]) -> None:
    """Notes where another file of the run holds a hash that the trail does not have."""
    folder = trail.path.parent
    try:
        if (folder / CARD).exists():
            trail.card, wrong = read_card(folder)
            trail.wrong += wrong
            _covered(trail, CARD, trail.card["audit"].get("last_hash") or "none", checks, last=True)
            if trail.card["run"] != trail.header["run"]:
                trail.wrong.append(f"{str(folder / CARD)!r} is the card of another run")
        for base in {folder, run_dir}:
            name = trail.path.relative_to(base).as_posix()
            if (base / OUTCOME).exists():
                held = read_table(base / OUTCOME, {}, OUTCOME_MORE, CHANGED).get("audit", {})
                _covered(trail, OUTCOME, held.get(name, ""), checks, last=True)
            if (base / CHECKPOINT).exists():
                arrays, meta = checkpoint.load(base / CHECKPOINT)
                held = record_of(arrays)["checks"]
                _covered(trail, CHECKPOINT, held.get(name, ""), checks, last=False)
                if not trail.card and held:
                    check_form(meta, base / CHECKPOINT, CHECKPOINT_FORM)
                    marks = dict(zip(meta["seeds"], meta["history"], strict=False))
                    mark = history.mark_of(marks.get(trail.header["seed"], []), base / CHECKPOINT)
                    history.read_marked(folder / history.NAME, mark)
    except FedspanError as error:
        trail.wrong.append(str(error))
    if trail.ended and not trail.card:
        trail.wrong.append(f"{str(folder / CARD)!r} is missing, although the run has ended")


def _covered(trail: Trail, where: str, held: Any, checks: list[str], last: bool) -> None:
    if not held:
        return
    if held not in checks or (last and held != checks[-1]):
        trail.wrong.append(
            f"{where} holds another last hash ({held!s:.16}…): lines were cut off, added or replaced"
        )
    else:
        trail.covered_by = trail.covered_by or where


def _told(event: str) -> list[tuple[str, int | None]]:
    """(what happened, to which client) of an event in words."""
    kind = next((kind for words, kind in KINDS.items() if words in event), "other")
    named = NAMED.search(event)
    clients: list[Any] = (
        [int(one) for one in named[1].replace(",", " ").split()] if named else [None]
    )
    return [(kind, client) for client in clients]
