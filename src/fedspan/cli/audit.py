"""`fedspan audit`: who took part in a run, and whether its record is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedspan.engine.audit import Trail

CHANGED = 1
SHOWN = 30  # clients in the table


def command(
    run_dir: Path,
    every: Annotated[bool, typer.Option("--all")] = False,
) -> int:
    """Check the record of a run and show who took part.

    The exit code is 1 where a line of the record, the model or its card was changed after it was written.

    Args:
        run_dir: The directory of a run.
        every: Show all clients, not the first 30.
    """
    from fedspan.cli._tables import say
    from fedspan.engine.audit import read_record

    trails, wrong = read_record(run_dir)
    for trail in trails:
        if trail.header:
            _show(trail, every)
    for line in wrong:
        say(f"CHANGED: {line}")
    say(f"the record is {'not ' if wrong else ''}as it was written")
    return CHANGED if wrong else 0


def _show(trail: Trail, every: bool) -> None:
    """Print what happened in a run, and how often each client counted."""
    from fedspan.cli._tables import say, show, size
    from fedspan.engine.audit import COUNTED, MISSED

    head, counts = trail.header, [trail.of_kind(kind) for kind in (COUNTED, MISSED)]
    status = f"{trail.ended or 'not finished'} after {len(counts[0])} rounds"
    say(f"run {head['run']}, seed {head['seed']}, spec {head['identity']}: {status}")
    for line in (head, *trail.resumed):
        what = f"resumed at round {line['resumed']}" if "resumed" in line else "begun"
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        say(f"  {what} {line['time']} with {versions}")
    counted, lost = (sum(map(len, table.values())) for table in counts)
    sent = f"{size(trail.up_bytes)} up, {size(trail.down_bytes)} down"
    say(f"  replies: {counted} counted, {lost} not; {sent}")
    if happened := trail.happened():
        say("  events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(happened.items())))
    if (epsilon := trail.last.get("epsilon")) is not None:
        say(f"  epsilon so far: {epsilon:.4g}")
    say(f"  {trail.lines} lines, last hash {trail.last_hash[:16]}…")

    names, clients = trail.names, trail.clients()
    kinds = [COUNTED, *sorted({kind for one in clients.values() for kind in one} - {COUNTED})]
    rows = []
    for one, own in list(clients.items())[: None if every else SHOWN]:
        name = str(one) if names is None else names[one]
        rows.append([name, *(str(own[kind]) for kind in kinds)])
    show(("client", *kinds), rows, left=0)
    if more := len(clients) - len(rows):
        say(f"  and {more} more clients; --all shows them")
