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
    from fedspan.engine.audit import read_record
    from fedspan.engine.provenance import fingerprint, public_key, signed_by

    expected = None if key is None else public_key(key)
    trails, card, wrong = read_record(run_dir)
    for trail in trails:
        try:
            _show(trail, run_dir, client, every)
        except FedspanError as error:  # of the roster
            wrong.append(str(error))
    by = signed_by(card)
    if card:
        say(f"the card is {f'signed by key {fingerprint(by)}' if by else 'not signed'}")
    if expected is not None and by != expected:
        wrong.append(f"the card of the run is not signed by the key in {str(key)!r}")
    for line in wrong:
        say(f"CHANGED: {line}")
    say("the record is as it was written" if not wrong else "the record is not as it was written")
    return CHANGED if wrong else 0


def _show(trail: Trail, run_dir: Path, client: int | None, every: bool) -> None:
    from fedspan.cli._tables import say, size
    from fedspan.engine.audit import COUNTED, MISSED

    if not trail.header:
        return
    head = trail.header
    counts = [trail.of_kind(kind) for kind in (COUNTED, MISSED)]
    say(
        f"run {head['run']}, seed {head['seed']}, spec {head['identity']}: {trail.ended or 'not finished'} after "
        f"{len(counts[0])} rounds"
    )
    for line in (head, *(one for one in trail.resumed if one is not head)):
        what = f"resumed at round {line['resumed']}" if "resumed" in line else "begun"
        say(
            f"  {what} {line['time']} with "
            + ", ".join(f"{n} {v}" for n, v in line["versions"].items())
        )
    counted, lost = (sum(map(len, table.values())) for table in counts)
    say(
        f"  replies: {counted} counted, {lost} not; {size(trail.up_bytes)} up, {size(trail.down_bytes)} down"
    )
    if happened := trail.happened():
        say("  events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(happened.items())))
    if (epsilon := trail.last.get("epsilon")) is not None:
        say(f"  epsilon so far: {epsilon:.4g}")
    say(f"  {trail.lines} lines, last hash {trail.last_hash[:16]}…")
    _show_clients(trail, run_dir, client, every)


def _show_clients(trail: Trail, run_dir: Path, client: int | None, every: bool) -> None:
    from fedspan.cli._tables import console, say, table
    from fedspan.engine.audit import COUNTED, MISSED, ranges
    from fedspan.remote.roster import ROSTER, Roster

    if client is not None:
        for word in (COUNTED, MISSED):
            when = ranges(t for t, who in trail.of_kind(word).items() if client in who)
            say(f"  client {client} {word} in rounds {when or 'none'}")
        for t, _, who, text in trail.events:
            if text and client in who:
                say(f"    round {t}: client {client}: {text}")
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
