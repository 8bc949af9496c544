"""Metrics of an evaluation, one file each; the file's name is the name in a spec and in `fit(metrics=[…])`."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.metrics.accuracy import Accuracy as Accuracy
    from fedspan.metrics.auroc import AUROC as AUROC
    from fedspan.metrics.c_index import CIndex as CIndex
    from fedspan.metrics.f1_macro import F1Macro as F1Macro
    from fedspan.metrics.mae import MAE as MAE
    from fedspan.metrics.mse import MSE as MSE
    from fedspan.metrics.perplexity import Perplexity as Perplexity
    from fedspan.metrics.r2 import R2 as R2
    from fedspan.metrics.token_accuracy import TokenAccuracy as TokenAccuracy
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
