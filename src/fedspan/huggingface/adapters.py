"""To and from PEFT: SSF's changes as LoRA adapters that PEFT loads, and adapters merged into a model to start from.

A round of SSF changes a fused weight by B P. That is a LoRA adapter with lora_A = P and lora_B = B, at scale 1. Tensors
that are trained in full are saved with it: biases of such layers as lora_bias, other modules as modules_to_save. After
many rounds, each in a subspace of its own, the change of a weight has full rank. Save it as a checkpoint
(`save_pretrained`), or as an adapter of a given rank, by truncated SVD, whose error is reported.

    export_round(model, rules, P, z, directory)       PeftModel.from_pretrained(model, directory) computes at x + Pᵀz
    export_change(before, after, directory, rank=16)  the accumulated change, as close as the rank allows
    merge_adapter(model, directory)                   a model to start from

Files are safetensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedspan.core.checkpoint import write_tensors
from fedspan.core.errors import DataError, SpecError, at_least
from fedspan.core.extras import needs
from fedspan.core.layout import Vector
from fedspan.core.linear_map import LinearMap
from fedspan.nn.layers import is_transposed
from fedspan.nn.projection_rules import ProjectionRule

Tensor = torch.Tensor
WEIGHTS = "adapter_model.safetensors"
NEGLIGIBLE = 1e-6  # singular values below this part of the largest are rounding


@dataclass(eq=False)
class _Adapter:
    """The contents of an adapter directory."""

    model: nn.Module
    pairs: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # layer → (B, A): its weight changes by B A
    biases: dict[str, Tensor] = field(default_factory=dict)  # layer → change
    modules: dict[str, dict[str, Tensor]] = field(
        default_factory=dict
    )  # module → its tensors after training


@dataclass(frozen=True)
class Change:
    """How close an adapter comes to a change."""

    error: float  # ‖ΔW − B A‖ / ‖ΔW‖ over all adapted weights
    layers: dict[str, float]  # the same for each layer
    ranks: dict[str, int]  # the adapter's rank for each layer


def export_round(
    model: nn.Module,
    rules: Sequence[ProjectionRule],
    P: LinearMap,
    z: Vector,
    directory: Path | str,
) -> None:
    """Writes the step from x, where `model` is, to x + Pᵀz as a PEFT adapter.

    Args:
        model: The model at x.
        rules: Its projection rules, from `projection_rules(model)`.
        P: The subspace of the round.
        z: The step inside the subspace.
        directory: Where to write `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        SpecError: PEFT has no adapter for a tensor that is projected or trained.

    """
    made = _Adapter(model)
    named = dict(model.named_parameters())
    parts = z.detach().reshape(-1).cpu().split(list(P.sizes))
    for rule, factor, part in zip(rules, P.factors, parts, strict=True):
        if factor is None:
            _full(made, rule.name, named[rule.name].detach().cpu() + part.view(rule.shape))
        elif rule.how == "fused" and len(rule.shape) == 2 and not rule.also:
            made.pairs[rule.layer] = part.view(-1, factor.rank), factor.columns()[0].mT
        else:
            raise SpecError(
                f"{rule.name!r} is projected, and PEFT has no adapter for it; save the model with save_pretrained"
            )
    _write(made, Path(directory))


def export_change(
    before: nn.Module, after: nn.Module, directory: Path | str, rank: int | None = None
) -> Change:
    """Writes what training changed as a PEFT adapter of `before`, the closest one of the given rank.

    Args:
        before: The model before training.
        after: The same model after training.
        directory: Where to write `adapter_config.json` and `adapter_model.safetensors`.
        rank: The adapter's rank. None gives each layer the rank of its change, which is exact.

    Returns:
        The error of the adapter, in all and for each layer.

    """
    if rank is not None:
        at_least("rank", rank, 1)
    made = _Adapter(before)
    old, layers = dict(before.named_parameters()), _layers(before)
    sums = {"left": 0.0, "all": 0.0}
    errors: dict[str, float] = {}
    for name, parameter in after.named_parameters():
        if name not in old or old[name].shape != parameter.shape:
            raise SpecError(
                f"the two models differ in {name!r}; give the same model before and after training"
            )
        new, was = parameter.detach().cpu(), old[name].detach().cpu()
        if torch.equal(new, was):
            continue
        if name in layers:
            layer = layers[name]
            delta = new.double() - was.double()
            b, a, left = _nearest(
                delta.mT if is_transposed(before.get_submodule(layer)) else delta, rank
            )
            made.pairs[layer] = b.to(new.dtype), a.to(new.dtype)
            whole = float(delta.square().sum())
            errors[layer] = (left / whole) ** 0.5
            sums["left"], sums["all"] = sums["left"] + left, sums["all"] + whole
        else:
            _full(made, name, new)
    _write(made, Path(directory))
    ranks = {layer: b.shape[1] for layer, (b, _) in made.pairs.items()}
    return Change((sums["left"] / sums["all"]) ** 0.5 if sums["all"] else 0.0, errors, ranks)


def merge_adapter(model: nn.Module, directory: Path | str) -> nn.Module:
    """Merges a PEFT adapter into the weights of a model.

    Args:
        model: The model that the adapter belongs to.
        directory: The adapter's directory.

    Returns:
        The merged model; the same tensors require a gradient as before.

    """
    needs("nlp", "peft")
    from peft import PeftModel

    if (
        not (Path(directory) / WEIGHTS).is_file()
        or not (Path(directory) / "adapter_config.json").is_file()
    ):
        raise DataError(
            f"{str(directory)!r} has no adapter; it needs adapter_config.json and {WEIGHTS}"
        )
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    merged: nn.Module = PeftModel.from_pretrained(model, str(directory)).merge_and_unload()
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(trained[name])
    return merged


def _nearest(delta: Tensor, rank: int | None) -> tuple[Tensor, Tensor, float]:
    """B and A of the rank, and ‖Δ − B A‖²."""
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    r = int((s > NEGLIGIBLE * s[0]).sum()) if rank is None else min(rank, len(s))
    return u[:, :r] * s[:r], v[:r], float(s[r:].square().sum())


def _layers(model: nn.Module) -> dict[str, str]:
    """Weights that PEFT can adapt → their layers."""
    found = {}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Embedding) or is_transposed(module):
            found[f"{name}.weight"] = name
    return found


def _full(made: _Adapter, name: str, value: Tensor) -> None:
    """Adds a tensor that is trained in full: the bias of a Linear as a change, others with their module."""
    path, _, last = name.rpartition(".")
    parent = made.model.get_submodule(path)
    if (
        last == "bias"
        and (type(parent) is nn.Linear or is_transposed(parent))
        and path not in made.modules
    ):
        made.biases[path] = value - parent.get_parameter(last).detach().cpu()
        return
    if not path or any(True for _ in parent.children()):
        raise SpecError(
            f"{name!r} is trained in full, and PEFT cannot save it by itself; save the model with save_pretrained"
        )
    own = made.modules.setdefault(
        path, {k: v.detach().cpu() for k, v in parent.state_dict().items()}
    )
    own[last] = value
    if path in made.biases:
        own["bias"] = own["bias"] + made.biases.pop(path)


def _write(made: _Adapter, directory: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, as PEFT reads them."""
    needs("nlp", "peft")
    from peft import LoraConfig

    for layer in [
        name for name in made.biases if name not in made.pairs
    ]:  # its weight does not change: save the layer
        own = {k: v.detach().cpu() for k, v in made.model.get_submodule(layer).state_dict().items()}
        made.modules[layer] = own | {"bias": own["bias"] + made.biases.pop(layer)}
    if not made.pairs:
        raise SpecError("no layer of the model has changed; there is nothing to export")
    with_bias, tables = (
        bool(made.biases),
        [n for n in made.pairs if isinstance(made.model.get_submodule(n), nn.Embedding)],
    )
    if with_bias and tables:
        raise SpecError(
            f"PEFT has no adapter for {tables[0]!r} together with biases; freeze either, or use save_pretrained"
        )
    arrays: dict[str, Tensor] = {}
    for layer, (b, a) in made.pairs.items():
        arrays |= _arrays(f"base_model.model.{layer}", b, a, layer in tables)
        if with_bias:
            arrays[f"base_model.model.{layer}.lora_B.bias"] = made.biases.get(
                layer, b.new_zeros(b.shape[0])
            )
    for module, tensors in made.modules.items():
        arrays |= {f"base_model.model.{module}.{name}": tensor for name, tensor in tensors.items()}
    ranks = {layer: b.shape[1] for layer, (b, _) in made.pairs.items()}
    most = max(ranks.values())
    config: Any = LoraConfig(
        r=most,
        lora_alpha=most,
        rank_pattern={f"^{layer}": r for layer, r in ranks.items() if r != most},
        alpha_pattern={f"^{layer}": r for layer, r in ranks.items() if r != most},
        target_modules=list(made.pairs),
        modules_to_save=list(made.modules) or None,
        lora_bias=with_bias,
        fan_in_fan_out=any(is_transposed(made.model.get_submodule(layer)) for layer in made.pairs),
        inference_mode=True,
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(
        directory / WEIGHTS, {k: v.contiguous() for k, v in arrays.items()}, {"format": "pt"}
    )
    config.save_pretrained(str(directory))


def _arrays(name: str, b: Tensor, a: Tensor, table: bool) -> dict[str, Tensor]:
    """PEFT's two tensors of a layer; for an embedding they are transposed."""
    if table:
        return {f"{name}.lora_embedding_A": b.mT, f"{name}.lora_embedding_B": a.mT}
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
