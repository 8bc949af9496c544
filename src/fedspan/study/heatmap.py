"""Who holds what: the client-by-class heat map of a partition."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from fedspan.core.task import Holdings
from fedspan.study.figures import STYLE

NAMED = 40  # rows or columns that have room for names


def draw(held: Holdings, title: str, path: Path) -> Path:
    """A picture of examples by client and class; the format is that of the file's ending, PNG if it has none."""
    path = path if path.suffix else path.with_suffix(".png")
    clients, classes = held.counts.shape
    size = (min(12.0, 2.5 + 0.22 * classes), min(10.0, 1.5 + 0.16 * clients))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        picture = axis.imshow(held.counts, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(picture, label="examples")
        axis.set_xlabel("class" if held.classes else "")
        axis.set_ylabel("client")
        if clients <= NAMED:
            axis.set_yticks(range(clients), held.clients)
        if not held.classes or classes <= NAMED:
            turned = max(map(len, held.classes), default=0) > 2
            axis.set_xticks(range(len(held.classes)), held.classes, rotation=90 if turned else 0)
        axis.set_title(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", dpi=150)
        plt.close(figure)
    return path
