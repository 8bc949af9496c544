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
    key: Path | None = None,
    client: str | None = None,
    every: Annotated[bool, typer.Option("--all")] = False,
) -> int:
    """Check the record of a run and show who took part.

    The exit code is 1 where a line of the record, the model or its card was changed after it was written.

    Args:
        run_dir: The directory of a run.
        key: Public key (PEM) that must have signed the model card.
        client: List the rounds of one client, by its name or, where it has none, its number.
        every: Show all clients, not the first 30.
    """
    from fedspan.cli._tables import say
    from fedspan.core.errors import FedspanError
    from fedspan.engine.audit import read_record
    from fedspan.engine.provenance import fingerprint, public_key, signed_by

    expected = None if key is None else public_key(key)
    trails, card, wrong = read_record(run_dir)
    for trail in trails:
        if trail.header:
            number = None if client is None else _number(trail, client)
            try:
                _show(trail, run_dir, number, every)
            except FedspanError as error:  # of the roster
                wrong.append(str(error))
    by = signed_by(card)
    if card:
        say(f"the card is {f'signed by key {fingerprint(by)}' if by else 'not signed'}")
    if expected is not None and by != expected:
        wrong.append(f"the card of the run is not signed by the key in {str(key)!r}")
    for line in wrong:
        say(f"CHANGED: {line}")
    say(f"the record is {'not ' if wrong else ''}as it was written")
    return CHANGED if wrong else 0


def _number(trail: Trail, client: str) -> int:
    from fedspan.core.errors import SpecError

    names, most = trail.names, trail.header["clients"]
    if names is not None and client in names:
        return names.index(client)
    if names is None and client.isdecimal() and int(client) < most:
        return int(client)
    shown = f"0 to {most - 1}" if names is None else ", ".join(names[:SHOWN])
    raise SpecError(f"`--client` {client!r} is not one of the clients: {shown}")


def _show(trail: Trail, run_dir: Path, number: int | None, every: bool) -> None:
    """Print what happened in a run, and the rounds of one client or the counts of many."""
    from fedspan.cli._tables import say, show, size
    from fedspan.core.errors import client_name
    from fedspan.engine.audit import COUNTED, MISSED, ranges
    from fedspan.remote.roster import ROSTER, Roster

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

    names = trail.names
    if number is not None:
        name = client_name(number, names)
        for word in (COUNTED, MISSED):
            when = ranges(t for t, who in trail.of_kind(word).items() if number in who)
            say(f"  {name} {word} in rounds {when or 'none'}")
        for t, _, who, text in trail.events:
            if text and number in who:
                say(f"    round {t}: {name}: {text}")
        return
    clients, path = trail.clients(), run_dir / ROSTER
    nodes = Roster.at(path).nodes if path.exists() else {}
    kinds = [COUNTED, *sorted({kind for one in clients.values() for kind in one} - {COUNTED})]
    rows = []
    for one, own in list(clients.items())[: None if every else SHOWN]:
        node = [str(nodes.get(one, ""))] if nodes else []
        name = str(one) if names is None else names[one]
        rows.append([name, *(str(own[kind]) for kind in kinds), *node])
    show(("client", *kinds, *(("node",) if nodes else ())), rows, left=0)
    if more := len(clients) - len(rows):
        say(f"  and {more} more clients; --all shows them, --client N the rounds of one")
