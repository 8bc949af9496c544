"""Gradient norm, drift and errors of the controls in every row, as the theory names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedspan.core.callback import Callback
from fedspan.core.registry import register

if TYPE_CHECKING:
    from fedspan.core.layout import Measures
    from fedspan.engine.loop import Loop


@register
@dataclass(frozen=True)
class Diagnostics(Callback):
    """Add `grad_sq`, `drift`, `control_error`, `control_gap` and `correction_cos` to every evaluation.

    An evaluation then costs about two rounds of all clients and a pass over their data.
    """

    decides: ClassVar[bool] = True
    needs_all_clients: ClassVar[bool] = True

    def measure(self, run: Loop) -> Measures:
        """Return the quantities at the server's model."""
        from fedspan.theory.diagnostics import measure

        return measure(run)
