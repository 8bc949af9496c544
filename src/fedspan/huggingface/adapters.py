"""To PEFT: what training changed as a LoRA adapter that PEFT loads.

A round of SSF changes a fused weight by B P. That is a LoRA adapter with lora_A = P and lora_B = B, at scale 1. Tensors
that are trained in full are saved with it: biases of such layers as lora_bias, other modules as modules_to_save. After
many rounds, each in a subspace of its own, the change of a weight has full rank. Save it as a checkpoint
(`save_pretrained`), or as an adapter of a given rank, by truncated SVD, whose error is returned.

Files are safetensors only. `lora` is a local step of LoRA as PEFT trains it, on the layers that fedspan projects: the
step that SSF's memory is compared with.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedspan.core.checkpoint import write_tensors
from fedspan.core.errors import SpecError, at_least
from fedspan.core.extras import needs
from fedspan.core.method import Footprint
from fedspan.nn.layers import is_transposed
from fedspan.nn.projection_rules import ProjectionRule

WEIGHTS = "adapter_model.safetensors"
Loss = Callable[[nn.Module], Tensor]
Step = Callable[[], None]
RATE = 1e-6  # of LoRA's steps; nothing depends on it
Pairs = dict[str, tuple[Tensor, Tensor]]
NEGLIGIBLE = 1e-6  # singular values below this part of the largest are rounding


def export_change(
    before: nn.Module, after: nn.Module, directory: Path | str, rank: int | None = None
) -> float:
    """Writes what training changed as a PEFT adapter of `before`, the closest one of the given rank.

    Args:
        before: The model before training.
        after: The same model after training.
        directory: Where to write `adapter_config.json` and `adapter_model.safetensors`.
        rank: The adapter's rank. None gives each layer the rank of its change, which is exact.

    Returns:
        The relative error of the adapter, ‖ΔW − B A‖ / ‖ΔW‖ over all adapted weights.

    """
    if rank is not None:
        at_least("rank", rank, 1)
    old = dict(before.named_parameters())
    pairs, full, error, size = Pairs(), dict[str, Tensor](), 0.0, 0.0
    for name, parameter in after.named_parameters():
        if name not in old or old[name].shape != parameter.shape:
            raise SpecError(
                f"the two models differ in {name!r}; give the same model before and after training"
            )
        new, was = parameter.detach().cpu(), old[name].detach().cpu()
        if torch.equal(new, was):
            continue
        layer, _, last = name.rpartition(".")
        module = before.get_submodule(layer)
        transposed = is_transposed(module)
        if last != "weight" or not (transposed or type(module) in (nn.Linear, nn.Embedding)):
            full[name] = new  # PEFT can adapt weights of these layers alone
            continue
        delta = new.double() - was.double()
        u, s, v = torch.linalg.svd(delta.mT if transposed else delta, full_matrices=False)
        r = int((s > NEGLIGIBLE * s[0]).sum()) if rank is None else min(rank, len(s))
        pairs[layer] = (u[:, :r] * s[:r]).to(new.dtype), v[:r].to(new.dtype)
        error += float(s[r:].square().sum())
        size += float(delta.square().sum())
    _write(Path(directory), before, pairs, full)
    return (error / size) ** 0.5 if size else 0.0


def _write(directory: Path, model: nn.Module, pairs: Pairs, full: dict[str, Tensor]) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as PEFT reads them.

    Args:
        directory: Where to write them.
        model: The model that the adapter belongs to.
        pairs: Layer → (B, A): its weight changes by B A.
        full: Tensors after training that are trained in full: the bias of an adapted Linear is saved as a change,
            others with their module.
    """
    needs("nlp", "peft")
    from peft import LoraConfig

    start, arrays, modules = "base_model.model", dict[str, Tensor](), dict[str, nn.Module]()
    biases: dict[str, Tensor] = {}  # layer → change
    for name, value in full.items():
        layer, _, last = name.rpartition(".")
        module = model.get_submodule(layer)
        linear = type(module) is nn.Linear or is_transposed(module)
        if last == "bias" and linear and layer in pairs:
            biases[layer] = value - module.get_parameter(last).detach().cpu()
            continue
        if not layer or any(True for _ in module.children()):
            raise SpecError(
                f"{name!r} is trained in full, and PEFT cannot save it by itself; save the model with save_pretrained"
            )
        modules[layer] = module
        for key, one in module.state_dict().items():
            arrays.setdefault(f"{start}.{layer}.{key}", one.cpu())
        arrays[f"{start}.{name}"] = value
    if not pairs:
        raise SpecError("no layer of the model has changed; there is nothing to export")
    adapted = {layer: model.get_submodule(layer) for layer in pairs}
    tables = [layer for layer, module in adapted.items() if isinstance(module, nn.Embedding)]
    if biases and tables:
        raise SpecError(
            f"PEFT has no adapter for {tables[0]!r} together with biases; freeze either, or use save_pretrained"
        )
    for layer, (b, a) in pairs.items():
        name = f"{start}.{layer}"
        if layer in tables:  # its two tensors are transposed
            arrays |= {f"{name}.lora_embedding_A": b.mT, f"{name}.lora_embedding_B": a.mT}
        else:
            arrays |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if biases:
            arrays[f"{name}.lora_B.bias"] = biases.get(layer, b.new_zeros(b.shape[0]))
    most = max(b.shape[1] for b, _ in pairs.values())
    others = {f"^{layer}": b.shape[1] for layer, (b, _) in pairs.items() if b.shape[1] != most}
    config: Any = LoraConfig(
        r=most,
        lora_alpha=most,
        rank_pattern=others,
        alpha_pattern=dict(others),
        target_modules=list(pairs),
        modules_to_save=list(modules) or None,
        lora_bias=bool(biases),
        fan_in_fan_out=any(map(is_transposed, adapted.values())),
        inference_mode=True,
    )
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: one.contiguous() for name, one in arrays.items()}
    write_tensors(directory / WEIGHTS, arrays, {"format": "pt"})
    config.save_pretrained(str(directory))


def lora(
    model: nn.Module, loss: Loss, choices: Sequence[ProjectionRule], footprint: Footprint
) -> tuple[Step, nn.Module, int]:
    """(a local step, the model with adapters, numbers trained) of a method that declares adapters."""
    adapted = with_adapters(model, choices, footprint)
    step = stepper(adapted, loss, round(footprint.optimizer / max(1, footprint.trained)))
    return step, adapted, sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def with_adapters(
    model: nn.Module, choices: Sequence[ProjectionRule], footprint: Footprint
) -> nn.Module:
    """The model with PEFT's adapters on its fused layers; other trained tensors stay trained."""
    assert footprint.ranks is not None
    needs("nlp", "peft")
    from peft import LoraConfig, get_peft_model

    # PEFT tries one pattern after the other, so one for each rank is quick
    layers: dict[int, list[str]] = {}
    for rule in choices:
        if rule.how == "fused":
            layers.setdefault(footprint.ranks[rule.name], []).append(rule.layer)
    ranks = {f"^({'|'.join(map(re.escape, names))})": rank for rank, names in layers.items()}
    targets = [name for names in layers.values() for name in names]
    full = [model.get_parameter(rule.name) for rule in choices if rule.how == "full"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied and of transposed weights
        config = LoraConfig(rank_pattern=ranks, alpha_pattern=ranks, target_modules=targets)
        adapted: nn.Module = get_peft_model(model, config)
    for parameter in full:
        parameter.requires_grad_(True)
    for name, parameter in adapted.named_parameters():
        a = "lora_A" in name or "lora_embedding_B" in name  # an embedding's A is named B
        if a and not footprint.train_a:
            parameter.requires_grad_(False)
    return adapted


def stepper(model: nn.Module, loss: Loss, states: int = 0) -> Step:
    """A step of torch's own optimizer with so many numbers per trained one: SGD, with momentum, or AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if states not in (0, 1, 2):
        raise SpecError(
            f"an optimizer that keeps {states} numbers per trained one has no counterpart in torch"
        )
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    optimizer = adamw(trained, RATE) if states == 2 else sgd(trained, RATE, momentum=0.9 * states)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step
