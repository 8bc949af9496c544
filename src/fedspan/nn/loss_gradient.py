"""The gradient of a loss by the outputs, for a whole cohort, where the loss is one that is known by name.

A loss is a function of (model, batch) of the user's own. `loss_gradient` calls it with symbols instead of tensors: if
all that it does is to apply the model to the inputs and `cross_entropy`, `mse_loss` or
`binary_cross_entropy_with_logits` to the outputs and targets, the gradient is written down here. Anything else is left
to autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Tensor = torch.Tensor
DEFAULTS = {
    "weight": None,
    "pos_weight": None,
    "size_average": None,
    "reduce": None,
    "reduction": "mean",
}


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy of class numbers: (softmax − one-hot) / examples that count."""

    ignore_index: int = -100
    label_smoothing: float = 0.0

    def fits(self, targets: Tensor, width: int) -> bool:
        """Whether the formula holds for targets (clients, examples, …) of outputs `width` wide."""
        return targets.dtype == torch.int64 and targets.dim() == 2 and not self.label_smoothing

    def ready(self, targets: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What the gradients of a round's batches need of its targets."""
        counted = targets != self.ignore_index
        share = counted / counted.unflatten(1, (-1, batch)).sum(-1).to(dtype).repeat_interleave(
            batch, 1
        )
        places = targets.where(counted, 0).unsqueeze(-1)
        return places, share.nan_to_num_().unsqueeze(-1), torch.full(places.shape, -1, dtype=dtype)

    def __call__(self, outputs: Tensor, places: Tensor, share: Tensor, less: Tensor) -> Tensor:
        return outputs.softmax(-1).scatter_add_(-1, places, less).mul_(share)


class SquaredError:
    """Mean squared error: 2 (outputs − targets) / numbers in a batch."""

    def fits(self, targets: Tensor, width: int) -> bool:
        """Whether targets have the shape of the outputs."""
        return targets.dim() == 3 and targets.shape[2] == width

    def ready(self, targets: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The targets themselves."""
        return (targets,)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).mul_(2 / outputs[0].numel())


class BinaryCrossEntropy(SquaredError):  # noqa: N818 (an error of predictions, not an exception)
    """Mean binary cross-entropy of logits: (sigmoid − targets) / numbers in a batch."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid().sub_(targets).mul_(1 / outputs[0].numel())


LossGradient = CrossEntropy | SquaredError
KNOWN: dict[Any, type[LossGradient]] = {
    F.cross_entropy: CrossEntropy,
    F.mse_loss: SquaredError,
    F.binary_cross_entropy_with_logits: BinaryCrossEntropy,
}


class _Symbol:
    """Stands for a tensor; functions of torch that are given one arrive here."""

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in KNOWN:
            raise NotImplementedError
        bound = inspect.signature(function).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return KNOWN[function], bound.arguments


def loss_gradient(loss: Callable[[Any, Any], Any]) -> LossGradient | None:
    """The gradient of a loss that is known; None for any other."""
    inputs, outputs, targets = _Symbol(), _Symbol(), _Symbol()

    def model(x: Any) -> _Symbol:
        if x is not inputs:
            raise NotImplementedError
        return outputs

    try:
        kind, given = loss(model, (inputs, targets))
    except Exception:  # whatever a function raises that needs a tensor
        return None
    if given.pop("input") is not outputs or given.pop("target") is not targets:
        return None
    for name, default in DEFAULTS.items():
        if given.pop(name, default) != default:
            return None
    return kind(**given)  # type: ignore[no-any-return]
