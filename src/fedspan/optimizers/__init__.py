"""Optimizers of local steps, one file each; the file's name is the name in a spec. The default is `sgd`."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.optimizers.adamw import AdamW as AdamW
    from fedspan.optimizers.preconditioned import Preconditioned as Preconditioned
    from fedspan.optimizers.sgd import SGD as SGD
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
