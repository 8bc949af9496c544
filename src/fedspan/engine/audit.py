"""The record of a run: `audit.jsonl`, one file per seed, says who took part and what happened.

Line one says what is run. Every further line has some rounds: events, each with its round, kind, clients and text, and
the bytes so far. That a client's reply counted is an event, too. Every line holds the hash of the line before, so that
a changed, removed or moved line shows at its number. Lines cut off at the end show because the checkpoint holds the
last hash, and `result.json` at the end that of the file. Lines are written with an evaluation or a checkpoint, not
after every round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError, SpecError, one_line
from fedspan.core.extras import needs
from fedspan.core.json_log import Line, check_form, read_lines
from fedspan.engine import history, per_client
from fedspan.engine.loop import Heard, record_of
from fedspan.engine.provenance import (
    AUDIT,
    CHECKPOINT,
    CLIENTS,
    FILE,
    LR,
    OUTCOME,
    changes,
    read_lr,
    read_outcome,
)

MOST_REPLIES = 50_000_000  # that a trail may tell of: each is a number in memory
COUNTED, MISSED = "counted", "not counted"
HEADER = {
    "run": str, "seed": int, "identity": str, "clients": int, "time": str, "versions": dict[str, str],
}  # fmt: skip
LINE = {  # what a line may have
    "time": str, "versions": dict[str, str], "events": list[list[Any]], "up_bytes": int, "down_bytes": int,
    "resumed": int, "damaged": str, "ended": str, "names": list[str],
}  # fmt: skip


def line_of_rounds(rounds: Iterable[Heard], run: int, seeds: Sequence[int]) -> list[list[Any]]:
    """The events of rounds as a line has them: [round, kind, clients, text]."""
    found = list[list[Any]]()
    for heard in rounds:
        asked = heard.ids[run]
        there = asked[heard.places]
        found.append([heard.t, COUNTED, ranges(there), ""])
        if len(there) < len(asked):
            found.append([heard.t, MISSED, ranges(np.setdiff1d(asked, there)), ""])
        who: dict[tuple[str, str], set[int]] = {}
        for event in heard.events:
            if event.seed in (None, seeds[run]):
                clients = who.setdefault((event.kind, one_line(event.text)), set())
                clients.update([] if event.client is None else [event.client])
        found += [[heard.t, kind, ranges(ids), text] for (kind, text), ids in who.items()]
    return found


def ranges(ids: Iterable[int]) -> str:
    """Numbers as people write them: 0-3,7."""
    parts: list[list[int]] = []
    for one in sorted(map(int, ids)):
        if parts and one == parts[-1][1] + 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def numbers(text: str, below: int | None = None, most: int = MOST_REPLIES) -> list[int]:
    """The inverse of `ranges`; raises ValueError where a number is not below `below`, or the text is another one."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ends = int(first), int(last or first)
        ordered = (found[-1] if found else -1) < ends[0] <= ends[1]
        if not ordered or (below is not None and ends[1] >= below) or ends[1] - ends[0] >= most:
            raise ValueError(part)
        found += range(ends[0], ends[1] + 1)
    return found


class Trail:
    """What the record of one seed tells, once it is read."""

    names: list[str] | None = None  # of the clients, if they have any
    lines = up_bytes = down_bytes = 0
    ended = last_hash = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Line = {}
        self.last: Line = {}  # evaluation
        self.events = list[tuple[int, str, list[int], str]]()
        self.resumed = list[Line]()

    def of_kind(self, kind: str) -> dict[int, list[int]]:
        """Round → the clients of its events of a kind, such as "counted" or "not counted"."""
        return {t: clients for t, one, clients, _ in self.events if one == kind}

    def happened(self) -> Counter[str]:
        """What happened besides replies that counted or did not, and how often."""
        found = Counter[str]()
        for _, kind, clients, _ in self.events:
            if kind not in (COUNTED, MISSED):
                found[kind] += max(1, len(clients))
        return found

    def clients(self) -> dict[int, Counter[str]]:
        """Client → how often it counted, did not, and what happened to it."""
        found: dict[int, Counter[str]] = {}
        for _, kind, clients, _ in self.events:
            for client in clients:
                found.setdefault(client, Counter())[kind] += 1
        return dict(sorted(found.items()))

    def read(self) -> None:
        """Reads the file; raises where it is not one that a run writes."""
        lines, checks = read_lines(self.path)
        if not lines or "run" not in lines[0]:
            raise CheckpointError(f"{str(self.path)!r} does not begin with the line of a run")
        self.header = check_form(lines[0], self.path, HEADER, LINE)
        self.names, clients = self.header.get("names"), self.header["clients"]
        self.lines, self.last_hash, left = len(lines), checks[-1], MOST_REPLIES
        for number, line in enumerate(lines, 1):
            check_form(line, f"line {number} of {self.path}", {}, LINE)
            try:
                if len(line.get("names", range(clients))) != clients:
                    raise ValueError
                if "resumed" in line:
                    self.resumed.append(
                        {name: line[name] for name in ("resumed", "time", "versions")}
                    )
                for t, kind, text, what in line.get("events", ()):
                    who = numbers(text, clients, left)
                    left -= len(who)
                    self.events.append((int(t), str(kind), who, one_line(what)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                raise CheckpointError(
                    f"line {number} of {str(self.path)!r} is not one that a run writes"
                ) from None
            self.up_bytes = line.get("up_bytes", self.up_bytes)
            self.down_bytes = line.get("down_bytes", self.down_bytes)
            self.ended = line.get("ended", self.ended)


def read_record(run_dir: Path) -> tuple[list[Trail], Line, list[str]]:
    """(the trail of each seed, the card of the run, all that is wrong with its record)."""
    places = (run_dir / AUDIT, *sorted(run_dir.glob(f"seed-*/{AUDIT}")))
    found, wrong, card = [Trail(path) for path in places if path.exists()], list[str](), Line()

    def tried(check: Any, *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except FedspanError as error:
            wrong.append(str(error).split("; ")[0])

    # --- The card of the run, or those of its seeds, and all files that they cover ---
    folders = dict.fromkeys((run_dir, *(trail.path.parent for trail in found)))
    for place in folders:
        own = tried(read_outcome, place) or {}
        card = own if place == run_dir else card
        if "signature" in own:
            needs("privacy", "cryptography")
        wrong += changes(place, own) if own else []
    if not found and not any(name.endswith(AUDIT) for name in card.get("files", ())):
        raise SpecError(f"there is no {AUDIT} in {str(run_dir)!r}; give the directory of a run")

    # --- Every trail ---
    for trail in found:
        tried(trail.read)
        if "damaged" in trail.header:
            since = trail.header.get("resumed")
            wrong.append(f"the trail begins at round {since}: {trail.header['damaged']}")
        if trail.ended and not card and not (trail.path.parent / OUTCOME).exists():
            wrong.append(f"{str(run_dir / OUTCOME)!r} is missing, although the run has ended")
        history_file = trail.path.with_name(history.NAME)
        _, rows = tried(history.read, history_file) or ({}, [])
        trail.last = rows[-1] if rows else {}
    if len({trail.header.get("seed") for trail in found}) < len(found):
        wrong.append("two audit trails are of the same seed")

    # --- What a checkpoint knows of the files, and whether they can be read ---
    for place in folders:
        if (place / CHECKPOINT).exists() and (saved := tried(checkpoint.load, place / CHECKPOINT)):
            for name, check in (tried(record_of, saved[0]) or {"checks": {}})["checks"].items():
                if FILE.fullmatch(name):
                    tried(read_lines, place / name, check)
        tried(per_client.read, place / CLIENTS)
        if (place / LR).exists():
            tried(read_lr, place / LR)
    ours = {trail.path.parent for trail in found}
    for path in sorted(run_dir.rglob(history.NAME)):
        if path.parent not in ours:
            wrong.append(f"{str(path)!r} is the history of no run that has an audit trail here")
    return found, card, wrong
