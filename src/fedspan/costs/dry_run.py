"""Run code on tensors without values, and count every byte that would be alive as it comes and goes.

Torch's meta device has shapes and types and no data, so the real code of a round or a training step runs for a model
of any size. What is counted is what torch itself allocates: weights, gradients, what autograd keeps, and the values in
between. Buffers inside a kernel are not seen; on a CPU they are a few megabytes.
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NOWHERE = torch.device("meta")
# What reads a number out of a tensor; the second in inference mode
NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
SEEN = "fedspan_seen"  # attribute of a storage: what counts it until it is gone, or False where it was made unseen


def empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and type without values."""
    return torch.empty_like(tensor, device=NOWHERE)


class Live(TorchDispatchMode):
    """Run operations without values where an operand has none, and count bytes alive: now, and the most so far.

    Args:
        device: The device whose tensors are counted. None: no tensors are.
    """

    def __init__(self, device: torch.device | None = NOWHERE) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.now, self.peak = device, 0, 0
        self.paused = False  # tensors made meanwhile are not counted
        self.touching = False  # but are once an operation uses them

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip it torch would load its compiler, which takes seconds

    def count(self, tensors: Iterable[Any], unseen: bool = False) -> None:
        """Count the tensors' storages until they are gone; with `unseen` also those that were made while paused."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device == self.device:
                storage = tensor.untyped_storage()
                seen = getattr(storage, SEEN, None)
                if seen is None or (unseen and seen is False):
                    setattr(storage, SEEN, not self.paused and _Seen(self, storage.nbytes()))

    def restart(self) -> int:
        """Forget the peak, and return the bytes alive now."""
        gc.collect()
        self.peak = self.now
        return self.now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count tensors made meanwhile."""
        self.paused = True
        yield
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NUMBERS and args[0].is_meta:
            return args[0].dtype != torch.bool and 1  # as a number one, as a condition false
        # Operands, also those in lists; much faster than torch's own way, and done for every operation.
        parts = (arg if isinstance(arg, list | tuple) else (arg,) for arg in args)
        operands = [t for part in parts for t in part if isinstance(t, torch.Tensor)]
        if self.touching:
            self.count(operands, unseen=True)
        if len({t.is_meta for t in operands}) == 2:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t if t.is_meta else empty(t), (args, kwargs)
            )
        out = func(*args, **kwargs)
        if self.device is not None:
            self.count(tree_leaves(out))
        return out


class _Seen:
    def __init__(self, live: Live, size: int) -> None:
        self.live, self.size = live, size
        live.now += size
        live.peak = max(live.peak, live.now)

    def __del__(self) -> None:
        self.live.now -= self.size


_attention = F.scaled_dot_product_attention


def _fused(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute attention by the kernel that a CPU uses, if any: the meta device would form the probabilities."""
    if len(args) != 3 or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        return _attention(*args, **kwargs)
    own = {name: kwargs[name] for name in ("attn_mask", "scale") if kwargs.get(name) is not None}
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: torch.Tensor = kernel(*args, 0.0, bool(kwargs.get("is_causal")), **own)[0]
    return found


@contextlib.contextmanager
def rehearsal() -> Iterator[Live]:
    """Make new tensors without values, and count them all."""
    gc.freeze()  # what is there already need not be searched for garbage
    F.scaled_dot_product_attention = _fused  # a mode of torch would not see a backward pass
    try:
        with torch.device(NOWHERE), Live() as live:
            yield live
    finally:
        F.scaled_dot_product_attention = _attention
        gc.unfreeze()
