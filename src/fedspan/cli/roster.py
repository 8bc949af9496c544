"""`fedspan roster`: which node each client's number belongs to."""

from pathlib import Path

import typer


def command(run_dir: Path, forget: int | None = None) -> None:
    """Show or free the nodes that clients' numbers belong to.

    RUN_DIR is the server's run directory of a run whose clients are bound to nodes.

    Args:
        run_dir: The server's run directory.
        forget: Free this client's number for another node, as after a new key.
    """
    from fedspan.core.errors import SpecError
    from fedspan.engine.audit import Trail
    from fedspan.engine.provenance import AUDIT
    from fedspan.remote.roster import ROSTER, Roster

    path = run_dir / ROSTER
    if not path.exists():
        raise SpecError(
            f"there is no {str(path)!r}; a run binds its clients if nodes are authenticated, or with the run config "
            "bind-clients=true"
        )
    roster = Roster.at(path)
    if forget is not None:
        typer.echo(
            f"client {forget} belonged to node {roster.forget(forget)}; the next node that uses it gets it"
        )
        return
    trail = Trail(run_dir / AUDIT)
    if trail.path.exists():
        trail.read()
    for client, node in sorted(roster.nodes.items()):
        name = f"  {trail.names[client]}" if trail.names is not None else ""
        typer.echo(f"client {client}{name}  node {node}")
