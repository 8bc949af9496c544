"""What follows a run while it goes on, one file per callback."""

from typing import TYPE_CHECKING

from fedspan.core.namespace import lazy

if TYPE_CHECKING:
    from fedspan.callbacks.checkpoint import Checkpoint as Checkpoint
    from fedspan.callbacks.csv import CSV as CSV
    from fedspan.callbacks.diagnostics import Diagnostics as Diagnostics
    from fedspan.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from fedspan.callbacks.keep_best import KeepBest as KeepBest
    from fedspan.callbacks.progress import Progress as Progress
    from fedspan.callbacks.tensorboard import TensorBoard as TensorBoard
    from fedspan.callbacks.training_loss import TrainingLoss as TrainingLoss
    from fedspan.callbacks.wandb import WandB as WandB
    from fedspan.core.callback import Callback as Callback
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
