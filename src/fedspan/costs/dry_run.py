"""A training step on tensors without numbers, with every byte that would be alive counted as it comes and goes.

Torch's meta device knows shapes and types and holds no data, so the very code of a step can be run for a model of any
size. What is seen is what torch itself allocates: weights, gradients, what autograd keeps, and the values in between.
Buffers inside a kernel are not seen; on a CPU they are a few megabytes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEEN = "fedspan_seen"  # of a storage that is counted; it goes with the storage


class Live(TorchDispatchMode):
    """Bytes of the tensors alive: now, and at most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    def count(self, tensor: torch.Tensor) -> None:
        """Take a tensor's storage into account until it is gone."""
        storage = tensor.untyped_storage()
        if getattr(storage, SEEN, None) is None:
            setattr(storage, SEEN, _Seen(self, storage.nbytes()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype != torch.bool and 1  # a number is asked for: one; and is a mask all ones: no
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.count(value)
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
    """Attention by the kernel that a CPU takes, where it has one: the meta device would write out the probabilities."""
    if len(args) != 3 or kwargs.get("dropout_p") or kwargs.get("enable_gqa"):
        return _attention(*args, **kwargs)
    own = {name: kwargs[name] for name in ("attn_mask", "scale") if kwargs.get(name) is not None}
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: torch.Tensor = kernel(*args, 0.0, bool(kwargs.get("is_causal")), **own)[0]
    return found


@contextlib.contextmanager
def rehearsal() -> Iterator[Live]:
    """New tensors have no numbers, and all are counted."""
    live = Live()
    with torch.device("meta"), mock.patch.object(F, "scaled_dot_product_attention", _fused), live:
        yield live


def peak_of(step: Callable[[], Any], live: Live) -> int:
    """Bytes alive at most during a step."""
    gc.collect()
    live.peak = live.now
    step()
    return live.peak
