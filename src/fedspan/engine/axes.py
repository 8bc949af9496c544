"""The matplotlib axis that results draw on."""

from __future__ import annotations

from typing import Any

from fedspan.core.extras import needs


def axis_or_new(ax: Any) -> Any:
    """The axis, or that of a new figure."""
    needs("plot", "matplotlib")
    import matplotlib.pyplot as plt

    return plt.subplots()[1] if ax is None else ax
