"""Who holds what: the client-by-class heat map of a partition."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from fedspan.study.figures import STYLE


def draw(counts: npt.NDArray[np.int64], title: str, path: Path) -> Path:
    """A picture of examples by client and class; the format is that of the file's ending, PNG if it has none."""
    path = path if path.suffix else path.with_suffix(".png")
    clients, classes = counts.shape
    size = (min(12.0, 2.5 + 0.22 * classes), min(10.0, 1.5 + 0.16 * clients))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        picture = axis.imshow(counts, aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(picture, label="examples")
        axis.set_xlabel("class")
        axis.set_ylabel("client")
        axis.set_title(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", dpi=150)
        plt.close(figure)
    return path
