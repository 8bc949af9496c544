"""R²: the share of the targets' variance that the outputs explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.registry import register
from fedspan.metrics._collected import Regression


@register
@dataclass(eq=False)
class R2(Regression):
    """The mean over outputs, where there are several."""

    function: ClassVar[str] = "r2_score"
