"""`fedspan partition`: which client holds what."""

from fedspan.cli._options import Changes, Plugin, SpecFile, load_spec

CLIENTS, CLASSES = 30, 12  # that the table shows


def command(spec: SpecFile, changes: Changes = None, plugin: Plugin = None) -> None:
    """Show how many examples of each class every client holds."""
    import numpy as np

    from fedspan.cli._tables import say, show

    loaded = load_spec(spec, changes, plugins=plugin)
    held = loaded.task.holdings(loaded.seed)
    counts, total = held.counts, held.counts.sum(1)
    names, columns = [*held.classes], [*counts.T] if held.classes else []
    if len(names) > CLASSES:  # those that have no room are summed up
        columns[CLASSES - 1 :] = [counts[:, CLASSES - 1 :].sum(1)]
        names[CLASSES - 1 :] = [f"{len(names) - CLASSES + 1} others"]
    rows = [
        [
            client,
            *(f"{n:,}" if n else "·" for n in (column[number] for column in (total, *columns))),
        ]
        for number, client in enumerate(held.clients[:CLIENTS])
    ]
    show(["client", "examples", *names], rows, left=1)
    if len(counts) > CLIENTS:
        say(f"… and {len(counts) - CLIENTS} clients more")
    spread = {"examples": total} | ({"classes": (counts > 0).sum(1)} if held.classes else {})
    for name, values in spread.items():
        low, middle, high = np.percentile(values, [0, 50, 100])
        say(f"{name} per client: {low:.0f} to {high:.0f}, median {middle:.0f}")
    classes = f"{len(held.classes)} classes, " if held.classes else ""
    say(f"{len(counts)} clients, {classes}{counts.sum():,} examples")
