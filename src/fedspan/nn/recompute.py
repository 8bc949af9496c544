"""What the backward pass computes again instead of keeping it: outputs of fused Linear layers, and dropout's masks.

Operations after a layer keep its output: an activation function its argument, attention its queries, keys and values.
A fused Linear keeps almost nothing itself, so its output can be replaced by its input, which is narrower (a
feed-forward layer widens fourfold) or shared (queries, keys and values have one). A mask of dropout is replaced by the
state of the generator that drew it, and attention with dropout, which would keep its probabilities three times, by its
queries, keys and values. Results stay the same to the last bit. The cost is one more product for each output that is
kept, one more draw of each mask, and one more forward pass of attention.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedspan.core.errors import FedspanError
from fedspan.core.seeds import torch_generator

MADE = "fedspan_made"  # an attribute of a storage: its version, and how it is computed again
ON = ("cpu", "meta")  # devices whose random numbers come from torch's default generator
_attend = F.scaled_dot_product_attention


def remember(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns y = x Wᵀ + b, with a note of how it was computed if it is not narrower than x."""
    if y.shape[-1] >= x.shape[-1]:
        given = (x.detach(), weight.detach(), None if bias is None else bias.detach())
        version = x._version

        def product() -> Tensor:
            if given[0]._version != version:
                raise FedspanError(
                    "a layer's input was changed in place after the layer; train without `recompute`"
                )
            return F.linear(*given)

        _note(y, product)
    return y


def _note(made: Tensor, again: Callable[[], Tensor]) -> None:
    """Notes how a tensor that has just been made can be computed again."""
    setattr(made.untyped_storage(), MADE, (made._version, again))


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """A forward pass in this context does not keep what can be computed again."""
    with torch.autograd.graph.saved_tensors_hooks(_give, _take), _Redrawing():
        yield


def _give(kept: Tensor) -> Any:
    """What is kept of a tensor: how it is computed again and its place in that, or the tensor itself."""
    version, again = getattr(kept.untyped_storage(), MADE, (None, None))
    if again is None or kept._version != version:  # changed in place since
        return kept
    return again, kept.shape, kept.stride(), int(kept.storage_offset())


def _take(held: Any) -> Tensor:
    if isinstance(held, Tensor):
        return held
    again, *place = held
    with torch.no_grad():
        return again().as_strided(*place)  # type: ignore[no-any-return]


class _Redrawing(TorchFunctionMode):
    """Replaces dropout, and attention with dropout, by versions whose masks can be drawn again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        drops = func is _attend and kwargs.get("dropout_p") and len(args) == 3
        if drops and args[0].device.type in ON:
            return _Attention.apply(*args, kwargs.pop("attn_mask", None), kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Torch's dropout with a note of how the mask was drawn; nothing is kept if x needs no gradient."""
    if not (training and x.requires_grad and 0 < p < 1) or inplace or x.device.type not in ON:
        return F.dropout(x, p, training, inplace)
    state, mask = torch.get_rng_state(), _drawn(torch.empty_like(x), p)
    shape, stride, dtype, device = mask.shape, mask.stride(), mask.dtype, mask.device

    def again() -> Tensor:
        with _generator_at(state):
            return _drawn(torch.empty_strided(shape, stride, dtype=dtype, device=device), p)

    _note(mask, again)
    return x * mask


def _drawn(place: Tensor, p: float) -> Tensor:
    """0, or 1/(1 − p) with probability 1 − p: in torch's own order."""
    return place.bernoulli_(1 - p).div_(1 - p)


class _Attention(torch.autograd.Function):
    """Attention that keeps only its inputs, and runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *inputs, ctx.options = given
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return _attend(*inputs, **ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        needed = ctx.needs_input_grad
        kept = zip(ctx.saved_tensors, needed[:4], strict=True)
        own = [t if t is None else t.detach().requires_grad_(n) for t, n in kept]
        with torch.enable_grad(), _generator_at(ctx.state):
            out = _attend(*own, **ctx.options)  # type: ignore[arg-type]
        trained = [t for t in own if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(out, trained, grad))
        return tuple(next(found) if n else None for n in needed)


@contextlib.contextmanager
def _generator_at(state: Tensor) -> Iterator[None]:
    with torch_generator():
        torch.set_rng_state(state)
        yield
