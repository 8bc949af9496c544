"""The kind of problem, found from the loss, the model's outputs and the targets, and batches as that kind needs them.

| kind | losses | targets become |
|---|---|---|
| classes | cross-entropy, NLL | int64 class numbers below the number of outputs, or probabilities of classes |
| binary, labels | BCE with or without logits | floats from 0 to 1 in the shape of the outputs |
| numbers | MSE, L1, Huber | floats in the shape of the outputs |
| other | functions of your own | integers become int64, everything else stays as it is |

Inputs get the model's floating-point type; integers stay integers where the model takes them, as an embedding does.
Without a loss, integer targets decide: cross-entropy where the model has an output per class, binary cross-entropy
where it has one output per target. Floating-point targets need a loss, because they may mean any of these.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call

from fedspan.core.errors import DataError, SpecError, shown
from fedspan.core.metric import IGNORED
from fedspan.metrics._collected import one_number
from fedspan.nn.client_data import Batch, ClientData, NamedTensors, Tensors, narrowed
from fedspan.nn.loaders import Loader, drawing

Tensor = torch.Tensor
OutputLoss = Callable[[Tensor, Tensor], Tensor]
Kind = Literal["classes", "binary", "labels", "numbers", "other"]

BY_CLASS: tuple[Any, ...] = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
BY_LOGIT: tuple[Any, ...] = (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)
BY_PROBABILITY: tuple[Any, ...] = (nn.BCELoss, F.binary_cross_entropy)
OF_NUMBERS: tuple[Any, ...] = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip
TARGETS = ("label", "labels", "target", "targets", "y")  # names of a target column
LOSSES = "MSELoss() for numbers, BCEWithLogitsLoss() for yes or no, CrossEntropyLoss() for classes"
USUAL: dict[Kind, tuple[str, ...]] = {
    "classes": ("accuracy",),
    "binary": ("accuracy",),
    "labels": ("f1_macro",),
}


@dataclass(frozen=True, eq=False)
class ProblemKind:
    """How batches are given to a model and its loss."""

    kind: Kind
    loss: OutputLoss
    inputs: torch.dtype | None = None  # what inputs are converted to; None: they stay as they are
    outputs: tuple[int, ...] = ()  # the shape of one example's outputs
    dtype: torch.dtype = torch.float32  # of the model's numbers
    logits: bool | None = (
        None  # whether one output per target is a logit or a probability; None: not known
    )
    guessed: bool = False  # whether no loss is given; then every target must be a class
    reshaped: bool = False  # whether targets of a loss of one's own get the shape of the outputs

    def batch(self, batch: Batch, who: str) -> tuple[Any, Any]:
        """(inputs, targets) as the model and the loss take them."""
        inputs, targets = as_pair(batch, who)
        if self.inputs is not None and isinstance(inputs, Tensor):
            inputs = narrowed(inputs, self.inputs, who)
        if not isinstance(targets, Tensor):
            return inputs, targets
        if self.kind == "other":
            targets = targets if targets.is_floating_point() else targets.long()
            return inputs, targets.reshape(
                len(targets), *self.outputs
            ) if self.reshaped else targets
        return inputs, self._classes(targets, who) if self.kind == "classes" else self._numbers(
            targets, who
        )

    def _classes(self, targets: Tensor, who: str) -> Tensor:
        count, *places = self.outputs
        shape = tuple(targets.shape[1:])
        if shape == self.outputs and targets.dim() > 1:
            return targets.to(self.dtype)  # probabilities of classes
        if shape == (1, *places):
            targets = targets.squeeze(1)
        elif shape != tuple(places):
            raise DataError(
                f"{who} has targets of shape {_of_one(shape)}; the model gives {_of_one(self.outputs)}"
            )
        if targets.is_floating_point() and not torch.equal(targets, targets.round()):
            raise DataError(
                f"{who} has targets that are not class numbers, such as {_odd(targets):g}; {LOSSES}"
            )
        targets = targets.long()
        ignored = getattr(self.loss, "ignore_index", IGNORED)
        wrong = targets[
            ((targets < 0) | (targets >= count)) & ((targets != ignored) | self.guessed)
        ]
        if wrong.numel():
            raise DataError(
                f"{who} has a target of class {int(wrong[0])}, but the model has {count} outputs, for classes 0 to "
                f"{count - 1}"
            )
        return targets

    def _numbers(self, targets: Tensor, who: str) -> Tensor:
        shape = tuple(targets.shape[1:])
        if [n for n in shape if n != 1] != [n for n in self.outputs if n != 1]:
            raise DataError(
                f"{who} has targets of shape {_of_one(shape)}, the model outputs of shape {_of_one(self.outputs)}; "
                f"`loss` {_name(self.loss)} compares one with the other"
            )
        if (
            self.kind != "numbers"
            and targets.numel()
            and not 0 <= float(targets.min()) <= float(targets.max()) <= 1
        ):
            outside = targets.min() if targets.min() < 0 else targets.max()
            raise DataError(
                f"{who} has the target {float(outside):g}, and `loss` {_name(self.loss)} needs 0 to 1; class numbers "
                "need a model with one output per class"
            )
        return narrowed(targets.reshape(len(targets), *self.outputs), self.dtype, who)

    def for_metrics(self, targets: Any) -> Any:
        """Targets as metrics take them: class numbers also where the loss takes probabilities of classes."""
        by_share = (
            self.kind == "classes" and isinstance(targets, Tensor) and targets.is_floating_point()
        )
        return targets.argmax(1) if by_share else targets


def problem_kind(model: nn.Module, batch: Batch, loss: OutputLoss | None, who: str) -> ProblemKind:
    """Applies the model to a few examples, to see what it gives, and finds the kind of problem."""
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        hint = f"; write {loss.__name__}()" if isinstance(loss, type) else ""
        raise SpecError(f"`loss` must be a function of (outputs, targets), got {shown(loss)}{hint}")
    if (reduction := getattr(loss, "reduction", "mean")) != "mean":
        raise SpecError(
            f"`loss` {_name(loss)} has reduction={reduction!r}; it must be the mean over a batch: 'mean'"
        )
    inputs, targets = as_pair(batch, who)
    outputs, cast = tried(model, inputs, who)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    applied = isinstance(inputs, Tensor) and not any(p.is_meta for p in model.parameters())
    if (
        applied
        and not isinstance(outputs, Tensor)
        and (outputs is None or loss is None or _named(loss)[0] != "other")
    ):
        found = "None" if outputs is None else f"a {type(outputs).__name__}"
        raise SpecError(
            f"the model returns {found}, not a tensor; return outputs alone, or give `objective`"
        )
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ProblemKind("other", F.cross_entropy if loss is None else loss, cast, dtype=dtype)
    kind, measure, logits = _named(loss) if loss is not None else _guessed(outputs, targets, who)
    if kind == "classes" and (outputs.dim() < 2 or outputs.shape[1] == 1):
        raise SpecError(
            f"the model gives one output per example, and cross-entropy needs one per class; give `loss`: "
            f"{LOSSES.split(', C')[0]}"
        )
    if kind == "binary" and outputs[0].numel() > 1:
        kind = "labels"
    if any(p.requires_grad for p in model.parameters()) and not outputs.requires_grad:
        raise SpecError(
            "the outputs of the model have no gradient; remove detach() and no_grad() from its forward()"
        )
    takes_logits = logits or _function_of(measure) in (nn.CrossEntropyLoss, F.cross_entropy)
    if takes_logits and _between_0_and_1(model, inputs.to(outputs.device, cast), outputs):
        last, other = (
            ("Softmax", "NLLLoss() of log-probabilities")
            if kind == "classes"
            else ("Sigmoid", "BCELoss()")
        )
        warnings.warn(
            f"the outputs of the model stay between 0 and 1, but the loss, {_name(measure)}, takes logits and applies "
            f"a {last.lower()} itself; remove {last} from the model, or give loss={other}",
            stacklevel=2,
        )
    if _function_of(measure) in BY_PROBABILITY and _leaves_0_and_1(
        model, inputs.to(outputs.device, cast), outputs
    ):
        raise SpecError(
            f"the outputs of the model are not bound to 0 to 1, and `loss` {_name(measure)} takes probabilities; give "
            "loss=BCEWithLogitsLoss(), or end the model with Sigmoid"
        )
    reshaped = kind == "other" and _check_own(measure, outputs, targets)
    return ProblemKind(
        kind, measure, cast, tuple(outputs.shape[1:]), dtype, logits, loss is None, reshaped
    )


def _between_0_and_1(model: nn.Module, inputs: Tensor, outputs: Tensor) -> bool:
    """Whether outputs stay between 0 and 1 whatever the weights, as after a sigmoid or a softmax."""

    def inside(found: Any) -> bool:
        return isinstance(found, Tensor) and bool(((found >= 0) & (found <= 1)).all())

    untold = next(model.parameters(), None) is None or not bool(
        ((outputs > 0) & (outputs < 1)).any()
    )
    if untold or not inside(outputs):
        return False
    try:
        return all(inside(_applied(model, inputs, "", scaled_by=by)) for by in (30.0, -30.0))
    except DataError:
        return False


def _leaves_0_and_1(model: nn.Module, inputs: Tensor, outputs: Tensor) -> bool:
    """Whether outputs are below 0 or above 1, with these weights or with others."""

    def outside(found: Tensor) -> bool:
        return bool(((found < 0) | (found > 1)).any())

    try:
        return outside(outputs) or any(
            outside(_applied(model, inputs, "", scaled_by=by)) for by in (30.0, -30.0)
        )
    except DataError:
        return False


def _check_own(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Tries a loss of one's own; True: targets must get the shape of the outputs, so that nothing is broadcast."""
    what, trains = f"`loss` {_name(loss)}", outputs.is_floating_point()
    targets = (targets if targets.is_floating_point() else targets.long()).to(outputs.device)
    outputs = outputs.detach().requires_grad_(trains)
    with drawing(0, outputs.device), torch.enable_grad():
        other = outputs.shape != targets.shape and outputs.numel() == targets.numel()
        reshaped = other and _broadcasts(loss, outputs, targets)
        targets = targets.reshape(outputs.shape) if reshaped else targets
        calls = [
            functools.partial(loss, torch.cat([outputs] * n), torch.cat([targets] * n))
            for n in (1, 2)
        ]
        once, twice = (one_number(call, what, "(outputs, targets)", trains) for call in calls)
    if abs(once) > 1e-6 and math.isclose(twice, 2 * once, rel_tol=1e-4):
        raise SpecError(
            f"{what} is a sum: it doubles when a batch is doubled; it must be the mean over a batch"
        )
    return reshaped


def _broadcasts(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether a loss is the mean of its single examples only if targets have the shape of the outputs.

    A loss that squeezes outputs itself needs targets as they are. The examples are made up: real ones may be equal.
    """
    made = torch.rand(5, *outputs.shape[1:]).to(outputs)
    wanted = (torch.arange(5 * targets[0].numel()) % 2).reshape(5, *targets.shape[1:]).to(targets)

    def value(o: Tensor, t: Tensor) -> float:
        try:
            with torch.no_grad():
                return float(loss(o, t))
        except Exception:
            return math.nan

    mean = sum(value(made[i : i + 1], wanted[i : i + 1]) for i in range(len(made))) / len(made)
    as_given, as_outputs = value(made, wanted), value(made, wanted.reshape(made.shape))
    return math.isclose(as_outputs, mean, rel_tol=1e-3) and not math.isclose(
        as_given, mean, rel_tol=1e-3
    )


def _function_of(loss: Any) -> Any:
    """The class or function of torch that a loss is of."""
    inner = loss.func if isinstance(loss, functools.partial) else loss
    return type(inner) if isinstance(inner, nn.Module) else inner


def _named(loss: OutputLoss) -> tuple[Kind, OutputLoss, bool | None]:
    """The kind of problem that a loss of torch is for."""
    named = _function_of(loss)
    if named in BY_CLASS:
        return "classes", loss, None
    if named in BY_LOGIT or named in BY_PROBABILITY:
        return "binary", loss, named in BY_LOGIT
    return ("numbers" if named in OF_NUMBERS else "other"), loss, None


def _guessed(outputs: Tensor, targets: Tensor, who: str) -> tuple[Kind, OutputLoss, bool | None]:
    """The kind of problem where no loss is given."""
    if targets.is_floating_point():
        raise SpecError(
            f"{who} has floating-point targets, which need a `loss`; of torch.nn: {LOSSES}"
        )
    per_target = outputs[0].numel() == targets[0].numel()
    if per_target and (
        outputs.dim() == 1 or outputs[0].numel() == 1 or outputs.shape == targets.shape
    ):
        return "binary", F.binary_cross_entropy_with_logits, True
    return "classes", F.cross_entropy, None


def as_pair(batch: Batch, who: str) -> tuple[Any, Any]:
    """(inputs, targets) of a batch; of named columns, the target column and the others."""
    if isinstance(batch, Mapping):
        return _of_columns(batch, who)
    if isinstance(batch, Tensor) or len(batch) == 1:
        raise DataError(
            f"{who} has inputs but no targets; give (inputs, targets), or `objective` in place of `loss`"
        )
    if len(batch) != 2:
        raise DataError(
            f"{who} has {len(batch)} parts; give (inputs, targets), or `objective` in place of `loss`"
        )
    return batch[0], batch[1]


def _of_columns(batch: Mapping[str, Any], who: str) -> tuple[Any, Any]:
    name = next((name for name in TARGETS if name in batch), None)
    others = [column for key, column in batch.items() if key != name]
    columns = ", ".join(batch)
    if name is None or not others:
        raise DataError(
            f"{who} has the columns {columns}, none of them a target (label, target or y); give (inputs, targets)"
        )
    if len(others) == 1:
        return others[0], batch[name]
    if not all(isinstance(column, Tensor) and column.dim() == 1 for column in others):
        raise DataError(
            f"{who} has the columns {columns}; give (inputs, targets), or `objective` in place of `loss`"
        )
    return torch.stack([column.double() for column in others], 1), batch[name]


def tried(model: nn.Module, inputs: Any, who: str) -> tuple[Any, torch.dtype | None]:
    """(outputs, the type that inputs must be converted to) of a few examples; the model stays as it was."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not isinstance(inputs, Tensor) or (parameter is not None and parameter.is_meta):
        return None, None
    if parameter is None:
        return _applied(model, inputs, who), None
    if inputs.is_floating_point():
        return _applied(model, inputs.to(parameter), who), parameter.dtype
    kinds = (
        [inputs.dtype]
        if inputs.dtype in (torch.int64, torch.uint8)
        else [inputs.dtype, torch.int64]
    )
    for kind in kinds:  # token ids, or numbers that the model converts itself
        try:
            return _applied(model, inputs.to(parameter.device, kind), who), kind
        except DataError:
            continue
    if inputs.dtype == torch.uint8:
        raise DataError(
            f"{who} has inputs of uint8, which the model does not take; convert images by x.float() / 255"
        )
    return _applied(model, inputs.to(parameter), who), parameter.dtype


def _applied(model: nn.Module, inputs: Tensor, who: str, scaled_by: float = 1.0) -> Any:
    """The model's outputs in evaluation mode, also with all weights multiplied by a number."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad(), drawing(0, inputs.device):
            if scaled_by == 1.0:
                return model(inputs)
            weights = {name: scaled_by * p.detach() for name, p in model.named_parameters()}
            return functional_call(model, weights, (inputs,))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{who} has inputs of shape {_of_one(inputs.shape[1:])} that the model refuses: {why}"
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True, eq=False)
class Converted:
    """Examples that are converted batch by batch."""

    data: ClientData
    kind: ProblemKind
    who: str

    def __len__(self) -> int:
        return len(self.data)

    def take(self, index: Tensor) -> Batch:
        """(inputs, targets) as the model and the loss take them."""
        return self.kind.batch(self.data.take(index), self.who)


def converted(data: ClientData, kind: ProblemKind, who: str) -> ClientData:
    """A client's data as the model and the loss take it; tensors are converted and checked at once."""
    if isinstance(data, Loader):
        inner = converted(data.data, kind, who)
        return Loader(
            inner, data.examples, data.batch_size, data.drop_last, data.ordered, data.sampler
        )
    if isinstance(data, Tensors | NamedTensors):
        pair = kind.batch(data.parts, who)
        return Tensors(pair)
    return Converted(data, kind, who)


def _of_one(shape: Any) -> str:
    """A shape in words."""
    return f"{tuple(shape)} per example" if len(shape) else "one per example"


def _odd(targets: Tensor) -> float:
    return float(targets[targets != targets.round()].flatten()[0])


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))
