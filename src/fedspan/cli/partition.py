"""`fedspan partition`: which client holds what."""

from pathlib import Path

from fedspan.cli._options import Changes, Plugin, SpecFile, load_spec

CLIENTS, CLASSES = 30, 12  # that the table shows


def command(
    spec: SpecFile, out: Path | None = None, changes: Changes = None, plugin: Plugin = None
) -> None:
    """Show how many examples of each class every client holds.

    Args:
        out: Also draw a picture: a .png, .svg or .pdf file. It needs matplotlib.
    """
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
    title = f"{len(counts)} clients, {classes}{counts.sum():,} examples"
    saved = ""
    if out is not None:
        from fedspan.core.extras import needs

        needs("plot", "matplotlib")
        from fedspan.study.figures import heatmap

        saved = f"; saved in {heatmap(held, title, out)}"
    say(title + saved)
