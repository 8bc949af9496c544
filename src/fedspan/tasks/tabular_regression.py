"""Predicting numbers from a table of your own, by squared error: features in, one or several numbers out."""

from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.registry import register
from fedspan.data.user_tables import Kind, OwnData
from fedspan.tasks._divided import NetworkTask


@register
@dataclass(frozen=True, kw_only=True)
class TabularRegression(NetworkTask):
    """Clients with rows of their own, evaluated on one test set; the metrics mse, mae and r2 are of use."""

    data: OwnData  # a table with a `path`
    model: str = "linear"  # linear or mlp, or your own as module:function
    kind: ClassVar[Kind] = "numbers"
