"""`fedspan partition`: which client holds what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli._options import Changes, Plugin, SpecFile, load_plugins, load_spec

if TYPE_CHECKING:
    from fedspan.core.task import Holdings

CLIENTS, CLASSES = 30, 12  # that the table shows


def command(
    spec: SpecFile,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Also draw a picture: a .png, .svg or .pdf file. It needs matplotlib."
        ),
    ] = None,
    changes: Changes = None,
    plugin: Plugin = None,
) -> None:
    """Show how many examples of each class every client holds."""
    import numpy as np

    from fedspan.cli._tables import console, say, table

    load_plugins(plugin)
    loaded = load_spec(spec, changes)
    held = loaded.task.holdings(loaded.seed)
    console.print(table(*_table(held), left=1))
    if len(held.counts) > CLIENTS:
        say(f"… and {len(held.counts) - CLIENTS} clients more")
    spread = [("examples", held.counts.sum(1))]
    spread += [("classes", (held.counts > 0).sum(1))] if held.classes else []
    for name, values in spread:
        low, middle, high = np.percentile(values, [0, 50, 100])
        say(f"{name} per client: {low:.0f} to {high:.0f}, median {middle:.0f}")
    classes = f"{len(held.classes)} classes, " if held.classes else ""
    title = f"{len(held.counts)} clients, {classes}{held.counts.sum():,} examples"
    say(title if out is None else f"{title}; saved in {_draw(held, title, out)}")


def _table(held: Holdings) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; classes that have no room are summed up."""
    names, counts = list(held.classes), held.counts[:CLIENTS]
    heads, columns = ["client", "examples"], [counts.sum(1)]
    if names:
        kept = len(names) if len(names) <= CLASSES else CLASSES - 1
        heads += names[:kept]
        columns += list(counts[:, :kept].T)
        if kept < len(names):
            heads.append(f"{len(names) - kept} others")
            columns.append(counts[:, kept:].sum(1))
    return heads, [
        [name, *(f"{column[row]:,}" if column[row] else "·" for column in columns)]
        for row, name in enumerate(held.clients[:CLIENTS])
    ]


def _draw(held: Holdings, title: str, out: Path) -> Path:
    from fedspan.core.extras import needs

    needs("plot", "matplotlib")
    from fedspan.study.figures import heatmap

    return heatmap(held, title, out)
