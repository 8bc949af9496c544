"""Mean absolute error: the mean of |output − target|."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.registry import register
from fedspan.metrics._collected import Regression


@register
@dataclass(eq=False)
class MAE(Regression):
    """Over all outputs."""

    higher_is_better: ClassVar[bool] = False
    function: ClassVar[str] = "mean_absolute_error"
