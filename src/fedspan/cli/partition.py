"""`fedspan partition`: which client holds what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli._options import Changes, SpecFile, load_spec


def command(
    spec: SpecFile,
    out: Annotated[Path, typer.Option("--out", help="The picture: a .png, .svg or .pdf file.")],
    changes: Changes = None,
) -> None:
    """Draw how many examples of each class every client holds."""
    import numpy as np

    from fedspan.core.extras import needs

    needs("plot", "matplotlib")
    from fedspan.study import heatmap

    loaded = load_spec(spec, changes)
    counts = loaded.task.counts(loaded.seed)
    title = f"{len(counts)} clients, {counts.shape[1]} classes, {counts.sum():,} examples"
    path = heatmap.draw(counts, title, out)
    for name, values in (("examples", counts.sum(1)), ("classes", (counts > 0).sum(1))):
        low, middle, high = np.percentile(values, [0, 50, 100])
        typer.echo(f"{name} per client: {low:.0f} to {high:.0f}, median {middle:.0f}")
    typer.echo(f"{title}; saved in {path}")
