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
    run_dir: Annotated[Path, typer.Argument(help="The directory of a run.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public key (PEM) that must have signed the model card."),
    ] = None,
    client: Annotated[
        int | None, typer.Option("--client", min=0, help="List the rounds of one client.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"Show all clients, not the first {SHOWN}.")
    ] = False,
) -> int:
    """Check the record of a run and show who took part.

    The exit code is 1 where a line of the record, the model or its card was changed after it was written.
    """
    from fedspan.cli._tables import say
    from fedspan.core.errors import FedspanError
    from fedspan.engine.audit import missing_seeds, trails
    from fedspan.engine.provenance import public_key, signed_by

    expected, wrong = None if key is None else public_key(key), 0
    found = trails(run_dir)
    for trail in found:
        if expected is not None and signed_by(trail.card) != expected:
            trail.wrong.append(f"the model card is not signed by the key in {str(key)!r}")
        if expected is not None and trail is found[0] and (seeds := missing_seeds(found)):
            trail.wrong.append(f"there is no record of seed {seeds[0]}, which the signed run has")
        try:
            _show(trail, run_dir, client, every)
        except FedspanError as error:  # of the roster
            trail.wrong.append(str(error))
        for line in trail.wrong:
            say(f"CHANGED: {line}")
        wrong += len(trail.wrong)
    say("the record is as it was written" if not wrong else "the record is not as it was written")
    return CHANGED if wrong else 0


def _show(trail: Trail, run_dir: Path, client: int | None, every: bool) -> None:
    from fedspan.cli._tables import say, size
    from fedspan.engine.provenance import fingerprint, signed_by

    if not trail.header:
        return
    head = trail.header
    status = trail.ended.get("ended", "not finished")
    say(
        f"run {head['run']}, seed {head['seed']}, spec {head['identity']}: {status} after {len(trail.rounds)} rounds"
    )
    for line in (head, *(one for one in trail.resumed if one is not head)):
        what = f"resumed at round {line['resumed']}" if "resumed" in line else "begun"
        say(
            f"  {what} {line['time']} with "
            + ", ".join(f"{n} {v}" for n, v in line["versions"].items())
        )
    counted, lost = (sum(map(len, table.values())) for table in (trail.rounds, trail.not_counted))
    say(
        f"  replies: {counted} counted, {lost} not; {size(trail.up_bytes)} up, {size(trail.down_bytes)} down"
    )
    if happened := trail.happened():
        say("  events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(happened.items())))
    if (epsilon := trail.evaluated.get("epsilon")) is not None:
        say(f"  epsilon so far: {epsilon:.4g}")
    covered = f", as in {trail.covered_by}" if trail.covered_by else ""
    say(f"  {trail.lines} lines, last hash {trail.last_hash[:16]}…{covered}")
    if trail.card:
        by = (
            f"signed by key {fingerprint(signed)}"
            if (signed := signed_by(trail.card))
            else "not signed"
        )
        say(f"  model {trail.card['model'].get('sha256')!s:.16}…, {by}")
    _show_clients(trail, run_dir, client, every)


def _show_clients(trail: Trail, run_dir: Path, client: int | None, every: bool) -> None:
    from fedspan.cli._tables import console, say, table
    from fedspan.engine.audit import ranges
    from fedspan.remote.roster import ROSTER, Roster

    if client is not None:
        for word, rounds in (("counted", trail.rounds), ("not counted", trail.not_counted)):
            when = ranges(t for t, who in rounds.items() if client in who)
            say(f"  client {client} {word} in rounds {when or 'none'}")
        for event in trail.events:
            if client in event["clients"]:
                say(f"    round {event['round']}: client {client}: {event['text']}")
        return
    clients, path = trail.clients(), run_dir / ROSTER
    nodes = Roster.at(path).nodes if path.exists() else {}
    kinds = sorted({kind for counts in clients.values() for kind in counts} - {"counted"})
    heads = ("client", "counted", *kinds, *(("node",) if nodes else ()))
    shown = list(clients.items())[: None if every else SHOWN]
    rows = [
        [
            str(one),
            str(counts["counted"]),
            *(str(counts[kind]) for kind in kinds),
            *([str(nodes.get(one, ""))] if nodes else []),
        ]
        for one, counts in shown
    ]
    console.print(table(heads, rows, left=0))
    if len(shown) < len(clients):
        say(
            f"  and {len(clients) - len(shown)} more clients; --all shows them, --client N the rounds of one"
        )
