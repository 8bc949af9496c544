"""Which tensors of a torch module are projected, which are sent in full, and why.

A weight is fused if it belongs to a plain Linear, Conv1d, Conv2d or Embedding, or to the transposed Linear of GPT-2,
and is used through such layers alone: its gradient is formed inside the subspace (`nn.layers`). A weight tied between
an embedding and an output head is fused as well. Other large tensors are projected: their full gradient is formed, and
then P applied. Biases, norms, small tensors and an output head with a weight of its own are trained and sent in full.
"""

import fnmatch
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedspan.core.digest import digest
from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout
from fedspan.nn.layers import is_plain, is_transposed

MIN_NUMEL = 512  # smaller tensors are sent in full: their few numbers are not worth a subspace
SAMPLE = 4096  # numbers of a frozen tensor that are looked at to tell it from another

How = Literal["fused", "projected", "full"]


@dataclass(frozen=True)
class ProjectionRule:
    """What becomes of one trained tensor."""

    name: str
    shape: tuple[int, ...]
    how: How  # fused: gradient formed in the subspace; projected: full gradient, then P; full: trained and sent in full
    why: str  # the reason, where it is not the usual one
    layer: str = ""  # the fused layer's name
    also: tuple[str, ...] = ()  # the other layers that share the weight
    axis: int = 1  # the input side


def projection_rules(
    model: nn.Module,
    project_modules: Sequence[str] = (),
    full_modules: Sequence[str] = (),
    frozen_modules: Sequence[str] | None = None,
    min_numel: int = MIN_NUMEL,
) -> list[ProjectionRule]:
    """One rule for each tensor that is trained, in the order of `named_parameters`.

    Patterns match tensors (`"blocks.*.weight"`), modules with all that is inside them (`"head"`, `"blocks.0"`), and
    the end of either name, as PEFT's `target_modules` does (`"q_proj"`).

    Args:
        model: The module. Tensors that match `frozen_modules` no longer require a gradient afterwards.
        project_modules: Projected although they are small or the output head.
        full_modules: Trained and sent in full.
        frozen_modules: Neither trained nor sent; None: none.
        min_numel: Tensors with fewer numbers are sent in full.

    Raises:
        SpecError: A pattern matches nothing, or nothing is left to train.
    """
    all_names: dict[int, list[str]] = {}  # of a tensor; a tied weight has several
    for name, p in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(p), []).append(name)
        if nn.parameter.is_lazy(p):
            raise SpecError(
                f"the model's {name!r} has no shape yet; apply the model to a batch once before the run"
            )
    names = {name: all_names[id(p)] for name, p in model.named_parameters()}
    for name in _named(frozen_modules or (), names, "frozen_modules", "tensor"):
        model.get_parameter(name).requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        what = " that require a gradient" if names else ", so there is nothing to train"
        raise SpecError(f"the model has no parameters{what}; give one with layers")
    names = {name: names[name] for name in trained}
    in_full = _named(full_modules, names, "full_modules", "trained tensor")
    chosen = _named(project_modules, names, "project_modules", "trained tensor")
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    layers: dict[int, list[str]] = {}  # weight → the plain layers that have it
    head = None  # the weight of the last layer
    for name, module in model.named_modules():
        if is_plain(module):
            layers.setdefault(id(module.weight), []).append(name)
            head = head if isinstance(module, nn.Embedding) else id(module.weight)
    rules = []
    for name, p in trained.items():
        own, count = layers.get(id(p), []), uses[id(p)]
        axes = {int(not is_transposed(model.get_submodule(layer))) for layer in own}
        plain = len(axes) == 1 and len(own) == count
        axis = axes.pop() if plain else 1
        how: How = "full"
        if name in in_full:
            why = "named in `full_modules`"
        elif p.dim() < 2 or p.shape[axis] < 2:
            why = "no input side to project"
        elif id(p) == head and count == 1 and name not in chosen:
            why = "output head"
        elif p.numel() < min_numel and name not in chosen:
            why = f"fewer than {min_numel} numbers"
        else:
            how = "fused" if plain else "projected"
            why = "" if plain else "not a plain Linear, Conv1d, Conv2d or Embedding"
            if count > 1:
                why = f"tied: used in {count} places"
        first, *others = own if how == "fused" else [""]
        rules.append(ProjectionRule(name, tuple(p.shape), how, why, first, tuple(others), axis))
    return rules


def _named(
    patterns: Sequence[str], names: Mapping[str, Sequence[str]], argument: str, what: str
) -> set[str]:
    """The tensors of which a pattern matches a name, a module that contains it, or the end of such a name."""
    found = set[str]()
    for pattern in patterns:
        own = {
            name
            for name, known in names.items()
            for one in known
            for path in itertools.accumulate(one.split("."), "{}.{}".format)
            if fnmatch.fnmatchcase(f".{path}", f"*.{pattern}")
        }
        if not own:
            shown = ", ".join(list(names)[:6])
            raise SpecError(
                f"`{argument}` {pattern!r} matches no {what} of the model; it has {shown}, …"
            )
        found |= own
    return found


def layout_of(
    rules: Sequence[ProjectionRule], dtype: torch.dtype = torch.float32, fixed: str = ""
) -> Layout:
    """The flat vector of a model; a weight is projected on its input side (channels, for a convolution)."""
    blocks = (Block(r.name, r.shape, None if r.how == "full" else r.axis) for r in rules)
    return Layout(tuple(blocks), dtype, fixed)


def frozen_digest(model: nn.Module) -> str:
    """A hash of the names, types, shapes and a sample of the numbers of frozen tensors; empty: there are none."""
    found = list[str | bytes]()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            found.append(f"{name} {p.dtype} {p.numel()} ")
            if not p.is_meta:  # an outline has no numbers
                sample = p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLE)]
                found.append(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest(*found) if found else ""


def state_dtype(weights: torch.dtype) -> torch.dtype:
    """The type of x, controls and steps: weights in bfloat16 are roundings of a float32 x, whose small steps add up."""
    if weights == torch.float16:
        raise SpecError(
            "weights in float16 would need their loss scaled; use torch.bfloat16 or torch.float32"
        )
    return torch.promote_types(weights, torch.float32)


def summary(rules: Sequence[ProjectionRule]) -> str:
    """A readable table with one line per tensor."""
    width = max(len(rule.name) for rule in rules)
    return "\n".join(
        f"{r.name:{width}}  {r.how:9}  {'×'.join(map(str, r.shape)) or '1':16}  {r.why}".rstrip()
        for r in rules
    )
