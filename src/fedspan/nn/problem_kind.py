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

import contextlib
import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from fedspan.core.errors import DataError, SpecError, shown
from fedspan.core.metric import IGNORED
from fedspan.core.registry import is_registered
from fedspan.metrics._collected import one_number
from fedspan.nn.batches import Batch, ClientData, Loader, Tensors, drawing, on_tensors, placed
from fedspan.nn.client_data import narrowed

OutputLoss = Callable[[Tensor, Tensor], Tensor]
Kind = Literal["classes", "binary", "labels", "numbers", "other"]

BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)
BY_LOGIT = (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits)
BY_PROBABILITY = (nn.BCELoss, F.binary_cross_entropy)
OF_NUMBERS = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip
KNOWN = (*BY_CLASS, *BY_LOGIT, *BY_PROBABILITY, *OF_NUMBERS)
TARGETS = ("label", "labels", "target", "targets", "y")  # names of a target column
LOSSES = "MSELoss() for numbers, BCEWithLogitsLoss() for yes or no, CrossEntropyLoss() for classes"
USUAL = {
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
    logits: bool | None = None  # whether an output per target is a logit; None: not known
    guessed: bool = False  # whether no loss is given; then every target must be a class
    reshaped: bool = False  # whether targets of a loss of one's own get the shape of the outputs
    weighted: bool = False  # whether a batch of three parts has weights of its examples
    class_weights: tuple[float, ...] | None = None
    pos_weight: float | None = None

    def batch(self, batch: Batch, who: str) -> tuple[Any, ...]:
        """(inputs, targets) as the model and the loss take them, and weights of the examples, if any."""
        weights: tuple[Any, ...] = ()
        if self.weighted and len(batch) == 3:
            batch, weights = batch[:2], tuple(batch[2:])
        inputs, targets = as_pair(batch, who)
        if isinstance(targets, Tensor):
            convert = {"classes": self._classes, "other": self._others}.get(
                self.kind, self._numbers
            )
            targets = convert(targets, who)
        return cast_inputs(inputs, self.dtype, self.inputs, who), targets, *weights

    def _others(self, targets: Tensor, who: str) -> Tensor:
        targets = whole(targets)
        return targets.reshape(len(targets), *self.outputs) if self.reshaped else targets

    def minimized(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """The loss of training: with weights of examples or classes their weighted mean over the batch."""
        if weights is None and self.class_weights is None and self.pos_weight is None:
            return self.loss(outputs, targets)
        by_class = self.kind == "classes" and not targets.is_floating_point()
        if self.kind == "classes" and not by_class and (self.class_weights or self.pos_weight):
            raise SpecError(
                "`class_weights` and `pos_weight` need class numbers, not probabilities"
            )
        like: Any = {"dtype": outputs.dtype, "device": outputs.device}
        loss: Any = self.loss
        if self.pos_weight is not None and self.kind != "classes":
            factor = torch.tensor(self.pos_weight, **like)
            loss = functools.partial(F.binary_cross_entropy_with_logits, pos_weight=factor)
        if isinstance(loss, nn.Module):
            loss = copy.copy(loss)
            loss.reduction = "none"
            each = loss(outputs, targets)
        else:
            each = loss(outputs, targets, reduction="none")
        if self.pos_weight is not None and by_class:
            each = each * (1 + (self.pos_weight - 1) * targets)
        by = torch.ones_like(each)
        if weights is not None:
            by = by * weights.view(-1, *[1] * (each.dim() - 1))
        if self.class_weights is not None:
            by = by * torch.tensor(self.class_weights, **like)[targets.long().clamp_min(0)]
        if by_class:
            by = by * (targets != getattr(self.loss, "ignore_index", IGNORED))
        return (by * each).sum() / by.sum().clamp_min(1e-12)  # type: ignore[no-any-return]

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
        if len(odd := targets[targets != targets.long()]):
            raise DataError(
                f"{who} has targets that are not class numbers, such as {float(odd[0]):g}; {LOSSES}"
            )
        targets = targets.long()
        wrong = (targets < 0) | (targets >= count)
        if not self.guessed:
            wrong &= targets != getattr(self.loss, "ignore_index", IGNORED)
        if wrong.any():
            raise DataError(
                f"{who} has a target of class {int(targets[wrong][0])}, but the model has {count} outputs, for "
                f"classes 0 to {count - 1}"
            )
        return targets

    def _numbers(self, targets: Tensor, who: str) -> Tensor:
        shape = targets.shape[1:]
        if [n for n in shape if n != 1] != [n for n in self.outputs if n != 1]:
            raise DataError(
                f"{who} has targets of shape {_of_one(shape)}, the model outputs of shape {_of_one(self.outputs)}; "
                f"`loss` {_name(self.loss)} compares one with the other"
            )
        if self.kind != "numbers" and targets.numel():
            low, high = map(float, targets.aminmax())
            if not 0 <= low <= high <= 1:
                raise DataError(
                    f"{who} has the target {low if low < 0 else high:g}, and `loss` {_name(self.loss)} needs 0 to 1; "
                    "class numbers need a model with one output per class"
                )
        return narrowed(targets.reshape(len(targets), *self.outputs), self.dtype, who)

    def for_metrics(self, targets: Any) -> Any:
        """Targets as metrics take them: class numbers also where the loss takes probabilities of classes."""
        numbers = self.kind != "classes" or not isinstance(targets, Tensor)
        return targets if numbers or not targets.is_floating_point() else targets.argmax(1)


def problem_kind(model: nn.Module, batch: Batch, loss: OutputLoss | None, who: str) -> ProblemKind:
    """Applies the model to a few examples, to see what it gives, and finds the kind of problem."""
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        hint = f"; write {loss.__name__}()" if isinstance(loss, type) else ""
        if is_registered(loss):
            hint = "; give a method by name: method=…"
        raise SpecError(f"`loss` must be a function of (outputs, targets), got {shown(loss)}{hint}")
    if (reduction := getattr(loss, "reduction", "mean")) != "mean":
        raise SpecError(
            f"`loss` {_name(loss)} has reduction={reduction!r}; it must be the mean over a batch: 'mean'"
        )
    inputs, targets = as_pair(batch, who)
    outputs, cast = tried(model, inputs, who)
    parameters = list(model.parameters())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    known = function_of(loss)
    if not isinstance(outputs, Tensor):
        applied = cast is not None and not any(p.is_meta for p in parameters)
        if applied and (outputs is None or loss is None or known in KNOWN):
            found = "None" if outputs is None else f"a {type(outputs).__name__}"
            raise SpecError(
                f"the model returns {found}, not a tensor; return outputs alone, or give `objective`"
            )
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ProblemKind("other", F.cross_entropy if loss is None else loss, cast, dtype=dtype)
    guessed = loss is None
    if loss is None:  # integers decide
        if targets.is_floating_point():
            raise SpecError(
                f"{who} has floating-point targets, which need a `loss`; of torch.nn: {LOSSES}"
            )
        size = outputs[0].numel()
        single = outputs.dim() == 1 or size == 1 or outputs.shape == targets.shape
        one_each = single and size == targets[0].numel()
        known = loss = F.binary_cross_entropy_with_logits if one_each else F.cross_entropy
    kind: Kind = "numbers" if known in OF_NUMBERS else "other"
    if known in BY_CLASS:
        kind = "classes"
    elif known in (*BY_LOGIT, *BY_PROBABILITY):
        kind = "labels" if outputs[0].numel() > 1 else "binary"
    if kind == "classes" and (outputs.dim() < 2 or outputs.shape[1] == 1):
        raise SpecError(
            f"the model gives one output per example, and cross-entropy needs one per class; give `loss`: "
            f"{LOSSES.split(', C')[0]}"
        )
    if any(p.requires_grad for p in parameters) and not outputs.requires_grad:
        raise SpecError(
            "the outputs of the model have no gradient; remove detach() and no_grad() from its forward()"
        )
    moved = placed(cast_inputs(inputs, dtype, cast, who), outputs.device)
    _check_range(model, moved, outputs, loss)
    reshaped = kind == "other" and _check_own(loss, outputs, targets)
    logits = known in BY_LOGIT if kind in ("labels", "binary") else None
    return ProblemKind(kind, loss, cast, tuple(outputs.shape[1:]), dtype, logits, guessed, reshaped)


def _check_range(model: nn.Module, inputs: Any, outputs: Tensor, loss: OutputLoss) -> None:
    """Warns of probabilities where a loss takes logits, and refuses logits where it takes probabilities.

    Outputs of a sigmoid or a softmax stay between 0 and 1 whatever the weights; others leave this range.
    """
    known = function_of(loss)
    logits = known in (*BY_LOGIT, nn.CrossEntropyLoss, F.cross_entropy)
    if not logits and known not in BY_PROBABILITY:
        return

    def outside(found: Tensor) -> bool:
        return bool(((found < 0) | (found > 1)).any())

    try:
        leaves = outside(outputs) or any(
            outside(_applied(model, inputs, "", scaled_by=by)) for by in (30.0, -30.0)
        )
    except DataError:
        return
    if leaves and not logits:
        raise SpecError(
            f"the outputs of the model are not bound to 0 to 1, and `loss` {_name(loss)} takes probabilities; give "
            "loss=BCEWithLogitsLoss(), or end the model with Sigmoid"
        )
    told = any(True for _ in model.parameters()) and bool(((outputs > 0) & (outputs < 1)).any())
    if logits and told and not leaves:
        last, other = "Softmax", "NLLLoss() of log-probabilities"
        if known in BY_LOGIT:
            last, other = "Sigmoid", "BCELoss()"
        warnings.warn(
            f"the outputs of the model stay between 0 and 1, but the loss, {_name(loss)}, takes logits and applies "
            f"a {last.lower()} itself; remove {last} from the model, or give loss={other}",
            stacklevel=3,
        )


def _check_own(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Tries a loss of one's own; True: targets must get the shape of the outputs, so that nothing is broadcast."""
    what, trains = f"`loss` {_name(loss)}", outputs.is_floating_point()
    targets, outputs = whole(targets).to(outputs.device), outputs.detach().requires_grad_(trains)
    with drawing(0, outputs.device), torch.enable_grad():
        other = outputs.shape != targets.shape and outputs.numel() == targets.numel()
        reshaped = other and _broadcasts(loss, outputs, targets)
        targets = targets.reshape(outputs.shape) if reshaped else targets
        once, twice = (
            one_number(
                functools.partial(loss, torch.cat([outputs] * n), torch.cat([targets] * n)),
                what, "(outputs, targets)", trains,
            )
            for n in (1, 2)
        )  # fmt: skip
    if doubles(once, twice):
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

    mean = sum(map(value, made.split(1), wanted.split(1))) / len(made)
    as_outputs, as_given = (
        math.isclose(value(made, t), mean, rel_tol=1e-3)
        for t in (wanted.reshape(made.shape), wanted)
    )
    return as_outputs and not as_given


def whole(targets: Tensor) -> Tensor:
    """Targets that are not floating-point as int64."""
    return targets if targets.is_floating_point() else targets.long()


def function_of(loss: Any) -> Any:
    """The class or function of torch that a loss is of."""
    inner = loss.func if isinstance(loss, functools.partial) else loss
    return type(inner) if isinstance(inner, nn.Module) else inner


def as_pair(batch: Batch, who: str) -> tuple[Any, Any]:
    """(inputs, targets) of a batch; of named columns, the target column and the others."""
    if not isinstance(batch, Mapping):
        if isinstance(batch, Tensor) or len(batch) != 2:
            single = isinstance(batch, Tensor) or len(batch) == 1
            found = "inputs but no targets" if single else f"{len(batch)} parts"
            raise DataError(
                f"{who} has {found}; give (inputs, targets), or `objective` in place of `loss`"
            )
        return batch[0], batch[1]
    name = next((name for name in TARGETS if name in batch), None)
    others = [column for key, column in batch.items() if key != name]
    columns = f"{who} has the columns {', '.join(batch)}"
    if name is None or not others:
        raise DataError(
            f"{columns}, none of them a target (label, target or y); give (inputs, targets)"
        )
    if len(others) == 1:
        return others[0], batch[name]
    if not all(isinstance(column, Tensor) and column.dim() == 1 for column in others):
        raise DataError(f"{columns}; give (inputs, targets), or `objective` in place of `loss`")
    return torch.stack([column.double() for column in others], 1), batch[name]


def tried(model: nn.Module, inputs: Any, who: str) -> tuple[Any, torch.dtype | None]:
    """(outputs, the type that inputs must be converted to) of a few examples; the model stays as it was."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    parts = parts_of(inputs)
    if not parts or (parameter is not None and parameter.is_meta):
        return None, None
    if parameter is None:
        return _applied(model, inputs, who), None

    def apply(kind: torch.dtype) -> tuple[Any, torch.dtype]:
        moved = placed(cast_inputs(inputs, parameter.dtype, kind, who), parameter.device)
        return _applied(model, moved, who), kind

    whole = {part.dtype for part in parts if not part.is_floating_point()}
    if not whole:
        return apply(parameter.dtype)
    other = () if torch.uint8 in whole else (torch.int64,)
    for kind in dict.fromkeys((*whole, *other)):
        with contextlib.suppress(DataError):  # token ids, or numbers that the model converts itself
            return apply(kind)
    if torch.uint8 in whole:
        raise DataError(
            f"{who} has inputs of uint8, which the model does not take; convert images by x.float() / 255"
        )
    return apply(parameter.dtype)


def parts_of(inputs: Any) -> list[Tensor]:
    """The tensors of inputs: one, or those of a dictionary or a tuple; none if there is anything else."""
    parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return list(parts) if all(isinstance(part, Tensor) for part in parts) else []


def cast_inputs(inputs: Any, floats: torch.dtype, others: torch.dtype | None, who: str) -> Any:
    """Inputs whose tensors have these types, floating-point ones the first and others the second; None: their own."""

    def cast(part: Tensor) -> Tensor:
        kind = floats if part.is_floating_point() else others
        return part if kind is None else narrowed(part, kind, who)

    return inputs if others is None else on_tensors(cast, inputs)


def call_of(model: Any, inputs: Any) -> functools.partial[Any]:
    """`model(**inputs)` or `model(*inputs)` of a dictionary or tuple that its forward() takes, else `model(inputs)`."""
    if isinstance(inputs, Mapping | list | tuple):
        args, named = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        with contextlib.suppress(TypeError):
            inspect.signature(getattr(model, "forward", model)).bind(*args, **named)
            return functools.partial(model, *args, **named)
    return functools.partial(model, inputs)


def _applied(model: nn.Module, inputs: Any, who: str, scaled_by: float = 1.0) -> Any:
    """The model's outputs in evaluation mode, also with all weights multiplied by a number."""
    parts = parts_of(inputs)
    try:
        with on_trial(model, parts[0].device):
            call = call_of(model, inputs)
            if scaled_by == 1.0:
                return call()
            weights = {name: scaled_by * p.detach() for name, p in model.named_parameters()}
            return functional_call(model, weights, call.args, call.keywords)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        shapes = " and ".join(_of_one(one.shape[1:]) for one in parts)
        raise DataError(
            f"{who} has inputs of shape {shapes} that the model refuses: {why}"
        ) from None


@contextlib.contextmanager
def on_trial(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Applies a model in evaluation mode with gradients and fixed draws; the model stays as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad(), drawing(0, device):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def doubles(once: float, twice: float) -> bool:
    """Whether a loss of a batch and of the same batch twice is a sum over the batch."""
    return abs(once) > 1e-6 and math.isclose(twice, 2 * once, rel_tol=1e-4)


def converted(data: ClientData, kind: ProblemKind, who: str) -> ClientData:
    """A client's data as the model and the loss take it; tensors are converted and checked at once."""
    if isinstance(data, Loader):
        return replace(data, data=converted(data.data, kind, who))
    if isinstance(data, Tensors):
        return Tensors(kind.batch(data.take(slice(None)), who))
    return Converted(data, kind, who)


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


def _of_one(shape: Any) -> str:
    """A shape in words."""
    return f"{tuple(shape)} per example" if len(shape) else "one per example"


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))
