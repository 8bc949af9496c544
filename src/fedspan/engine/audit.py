"""The log of a run: `audit.jsonl`, one file per seed, in which every line holds the hash of the line before.

Line one says what is run. Every further line has some rounds: who took part and counted, whose replies did not count,
what happened to clients, bytes, and the evaluation at its end. A changed, removed or moved line shows at its number.
Lines cut off at the end show because the checkpoint, and at the end `result.json` and `provenance.json`, hold the last
hash. Lines are written with an evaluation or a checkpoint, not after every round.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedspan.core import checkpoint
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError, FedspanError, SpecError, one_line
from fedspan.core.extras import versions
from fedspan.core.json_log import LONG, JsonLog, check_form, read_lines, read_table, read_until
from fedspan.core.spec import Spec
from fedspan.engine import history, per_client, provenance
from fedspan.engine.loop import Heard, Line, Loop, Row, record_of
from fedspan.engine.provenance import AUDIT, CARD, CHANGED, CHECKPOINT, OUTCOME, seed_dirs

MOST = 1024  # rounds of a line
MOST_REPLIES = 50_000_000  # that a trail may tell of: each is a number in memory
HEADER = {
    "run": str, "seed": int, "identity": str, "clients": int, "time": str, "versions": dict[str, str],
}  # fmt: skip
LINE = {  # what a line may have
    "time": str, "versions": dict[str, str], "rounds": list[int], "counted": list[str], "not_counted": dict[str, str],
    "events": list[dict[str, Any]], "evaluated": dict[str, float | bool | None], "up_bytes": int, "down_bytes": int,
    "resumed": int, "damaged": str, "ended": str, "round": int, "model_sha256": str,
}  # fmt: skip
EVENT = {"round": int, "kind": str, "clients": str, "text": str}


class Audit(Callback):
    """Writes the trail of a run that has a directory."""

    def __init__(self, loop: Loop, spec: Spec) -> None:
        assert loop.run_dir is not None
        self.loop, self.rounds = loop, list[Heard]()
        self.files: dict[str, JsonLog] = {}
        for folder, seed in zip(seed_dirs(loop.run_dir, loop.seeds), loop.seeds, strict=True):
            path = folder / AUDIT
            name = path.relative_to(loop.run_dir).as_posix()
            now = {"time": _now(), "versions": versions()}
            header = {"run": loop.id, "seed": seed, "identity": spec.identity()}
            header |= {"clients": loop.problem.clients, **now}
            try:
                lines = read_until(path, loop.checks.get(name, ""), LONG)
                lines = [*lines, {"resumed": loop.t} | now] if lines else [header]
            except CheckpointError as error:  # it is kept under another name
                if path.exists():
                    path.replace(path.with_name(f"damaged-{loop.t}-{AUDIT}"))
                lines = [header | {"damaged": str(error).split(";")[0], "resumed": loop.t}]
            self.files[name] = JsonLog(path, lines, LONG, spec.privacy is not None)
            loop.checks[name] = self.files[name].check

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
                line |= self._taken_part(run)
                line |= {"up_bytes": int(up[run]), "down_bytes": int(down[run])}
                line |= self.loop.carried
            if row is not None:
                told = history.line_of(row, run).items()
                line["evaluated"] = {key: value for key, value in told if key != "events"}
            file.append(line)
            self.loop.checks[name] = file.check
        self.rounds = []
        self.loop.carried.clear()

    def _taken_part(self, run: int) -> Line:
        """Of each round the clients that counted; round → clients that were asked and did not; and events."""
        counted, missing, events = list[str](), dict[str, str](), list[Line]()
        for heard in self.rounds:
            asked = heard.ids[run].tolist() if len(heard.ids) else []
            there = {asked[place] for place in heard.places.tolist()}
            counted.append(ranges(there))
            if len(there) < len(asked):
                missing[str(heard.t)] = ranges(one for one in asked if one not in there)
            who: dict[tuple[str, str], list[int]] = {}
            for event in heard.events:
                if event.seed in (None, self.loop.seeds[run]):
                    own = who.setdefault((event.kind, event.text), [])
                    own += [] if event.client is None else [event.client]
            for (kind, text), clients in who.items():
                told = {"kind": kind, "clients": ranges(set(clients)), "text": one_line(text)}
                events.append({"round": heard.t, **told})
        line: Line = {"rounds": [self.rounds[0].t, self.rounds[-1].t], "counted": counted}
        line |= {"not_counted": missing} if missing else {}
        return line | ({"events": events} if events else {})

    def end(self, statuses: list[str], models: list[str]) -> None:
        """The last line: how the run ended, and the hash of its model."""
        self.flush()
        for (name, file), status, model in zip(self.files.items(), statuses, models, strict=True):
            ended = {"ended": status, "round": self.loop.t, "model_sha256": model}
            file.append({"time": _now(), **ended})
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


@dataclass
class Trail:
    """One seed's trail as it was read, and what is wrong with it."""

    path: Path
    header: Line = field(default_factory=dict)
    rounds: dict[int, list[int]] = field(default_factory=dict)  # round → clients that counted
    not_counted: dict[int, list[int]] = field(default_factory=dict)
    events: list[Line] = field(default_factory=list)  # round, kind, clients and text
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
        found = Counter[str]()
        for event in self.events:
            found[event["kind"]] += max(1, len(event["clients"]))
        return found

    def clients(self) -> dict[int, Counter[str]]:
        """Client → how often it counted, did not, and what happened to it."""
        found: dict[int, Counter[str]] = {}
        told = [("counted", clients) for clients in self.rounds.values()]
        told += [("not counted", clients) for clients in self.not_counted.values()]
        told += [(event["kind"], event["clients"]) for event in self.events]
        for word, clients in told:
            for client in clients:
                found.setdefault(client, Counter())[word] += 1
        return dict(sorted(found.items()))

    def add(self, line: Line) -> None:
        """Add what a line tells; raises where it is not one that a run writes."""
        if "resumed" in line:
            self.resumed.append({name: line[name] for name in ("resumed", "time", "versions")})
        for number, text in enumerate(line.get("counted", ()), line.get("rounds", [0])[0]):
            self.rounds[number] = self._clients(text)
        for key, text in line.get("not_counted", {}).items():
            self.not_counted[int(key)] = self._clients(text)
        for event in line.get("events", ()):
            told = check_form(event, self.path, EVENT)
            clients = self._clients(told["clients"])
            self.events.append(told | {"clients": clients, "text": one_line(told["text"])})
        self.evaluated = line.get("evaluated", self.evaluated)
        self.up_bytes = line.get("up_bytes", self.up_bytes)
        self.down_bytes = line.get("down_bytes", self.down_bytes)
        if "ended" in line:
            self.ended = line

    def _clients(self, text: str) -> list[int]:
        """The clients that a text names."""
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            self.replies += int(last or first) - int(first) + 1
        if self.replies > MOST_REPLIES:
            raise ValueError(text)
        return numbers(text, self.header["clients"])

    def covered(self, where: str, held: Any, checks: list[str], last: bool) -> None:
        """Compares a last hash that another file holds."""
        if held and (held not in checks or (last and held != checks[-1])):
            self.wrong.append(
                f"{where} holds another last hash ({held!s:.16}…): lines were cut off, added or replaced"
            )
        elif held:
            self.covered_by = self.covered_by or where


def trails(run_dir: Path) -> list[Trail]:
    """The trails of a run directory, one per seed, with all that is wrong with them."""
    places = (run_dir / AUDIT, *sorted(run_dir.glob(f"seed-*/{AUDIT}")))
    paths = [path for path in places if path.exists()]
    ended = [path.parent / AUDIT for name in (CARD, OUTCOME) for path in run_dir.glob(f"**/{name}")]
    for path in ended:
        several = path.parent == run_dir and (run_dir / "seed-0").is_dir()
        if not several and path not in paths and not list(path.parent.glob(f"seed-*/{AUDIT}")):
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
    if len(found) == 1 and len(named) <= 1:
        return []
    return sorted(named - {trail.header.get("seed") for trail in found})


def _read(path: Path, run_dir: Path) -> Trail:
    """One trail, compared with the hashes that the other files of the run hold."""
    trail, number = Trail(path), 1
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
            trail.add(check_form(line, f"line {number} of {path}", {}, LINE))
    except CheckpointError as error:
        trail.wrong.append(str(error).split("; ")[0])
        return trail
    except (ValueError, KeyError, IndexError):
        trail.wrong.append(f"line {number} of {str(path)!r} is not one that a run writes")
        return trail
    trail.lines, trail.last_hash, folder = len(lines), checks[-1], path.parent
    if "damaged" in trail.header:
        trail.wrong.append(
            f"the trail begins at round {trail.header['resumed']}: {trail.header['damaged']}"
        )
    try:
        if (folder / CARD).exists():
            trail.card, wrong = provenance.read_card(folder)
            trail.wrong += wrong
            trail.covered(CARD, trail.card["audit"].get("last_hash") or "none", checks, last=True)
            if trail.card["run"] != trail.header["run"]:
                trail.wrong.append(f"{str(folder / CARD)!r} is the card of another run")
        for base in {folder, run_dir}:
            name = path.relative_to(base).as_posix()
            if (base / OUTCOME).exists():
                outcome = read_table(base / OUTCOME, {}, provenance.OUTCOME_MORE, CHANGED)
                trail.covered(OUTCOME, outcome.get("audit", {}).get(name), checks, last=True)
            if (base / CHECKPOINT).exists():
                arrays, meta = checkpoint.load(base / CHECKPOINT)
                held = record_of(arrays)["checks"]
                trail.covered(CHECKPOINT, held.get(name), checks, last=False)
                if not trail.card and held:
                    check_form(meta, base / CHECKPOINT, provenance.CHECKPOINT_FORM)
                    marks = dict(zip(meta["seeds"], meta["history"], strict=False))
                    mark = history.mark_of(marks.get(trail.header["seed"], []), base / CHECKPOINT)
                    history.read_marked(folder / history.NAME, mark)
    except FedspanError as error:
        trail.wrong.append(str(error))
    if trail.ended and not trail.card:
        trail.wrong.append(f"{str(folder / CARD)!r} is missing, although the run has ended")
    return trail


def _wrong_with_all(run_dir: Path, found: list[Trail]) -> list[str]:
    """What is wrong with the files that `fedspan.load` reads, and with the seeds as one run."""
    folders, wrong = [trail.path.parent for trail in found], list[str]()
    try:
        provenance.check_run(run_dir, folders)
        for folder in folders:
            history.read(folder / history.NAME)
        for folder in dict.fromkeys((run_dir, *folders)):
            per_client.read(folder / provenance.CLIENTS)
            if (folder / provenance.LR).exists():
                provenance.read_lr(folder / provenance.LR)
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
    if run_dir in folders or not cards or not all(OUTCOME in card["files"] for card in cards):
        return wrong
    # seeds that have a `result.json` each: that of all follows from what their cards cover
    path = run_dir / OUTCOME
    ends = {int(t.header.get("seed", -1)): str(t.card.get("status", "")) for t in found}
    if missing := missing_seeds(found):
        if path.exists():
            wrong.append(f"seed {missing[0]} is missing, although the run has ended")
    elif path.exists() or all(ends.values()):
        expected = provenance.outcome_text(run_dir, list(ends), list(ends.values()))
        if not path.exists() or path.read_bytes() != expected:
            wrong.append(f"{str(path)!r} is missing or was changed after the run")
    return wrong
