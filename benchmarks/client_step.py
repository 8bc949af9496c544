"""Cost of one local step on the client: full training, LoRA (where `peft` is installed), and SSF inside a subspace.

    python benchmarks/client_step.py [--repeats 15] [--threads 2]

Steps of all kinds are timed in turn, and ratios are of medians. Memory is counted on tensors: gradients of weights, and
what the forward pass keeps for the backward pass, parameters themselves apart. Writes out/bench-client-step.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core import registry
from fedspan.core.projector import draw
from fedspan.nn.cover import choose, layout_of
from fedspan.nn.models import build
from fedspan.nn.restricted import FlatModule, Restricted

ROOT = Path(__file__).parents[1]
RATIOS = (0.05, 0.1, 0.2)
Step = tuple[Callable[[], Any], Callable[[], tuple[int, int]]]  # (do one step, bytes of (gradients, kept activations))


class Encoder(nn.Module):
    """Six transformer layers of 256 numbers, written with plain Linear layers."""

    def __init__(self, width: int = 256, layers: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores from the mean over positions."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def kept_by(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int:
    """Bytes that a forward pass keeps, the module's own tensors apart; each storage once."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        keep = loss(model)
    del keep
    return sum(sizes.values())


def full(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Step:
    """All weights, plain SGD."""
    params = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        for p, g in zip(params, torch.autograd.grad(loss(model), params), strict=True):
            p.data.add_(g, alpha=-1e-6)

    return step, lambda: (sum(4 * p.numel() for p in params), kept_by(model, loss))


def subspace(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], projector: str, ratio: float) -> Step:
    """SSF's step inside x + range(Pᵀ)."""
    choices = choose(model)
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(registry.build("projector", {"name": projector, "rank": ratio}), layout, (0,), 0)
    inside = Restricted(module, choices, module.flat.detach().clone().view(1, 1, -1), P).__enter__()
    z, u = torch.zeros(1, 1, P.rank), torch.zeros(1, 1, P.rank)

    def step() -> None:
        nonlocal z
        z = torch.add(z, inside.grad(z, loss) + u, alpha=-1e-6)

    return step, lambda: (4 * P.rank, kept_by(model, loss))


def lora(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], numbers: int) -> Step | None:
    """LoRA by PEFT on the same layers, at a rank that trains about as many numbers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return None
    names = [c.layer for c in choose(model) if c.how == "covered"]
    per_rank = sum(sum(c.shape[:2]) for c in choose(model) if c.how == "covered")
    adapted = get_peft_model(
        model, LoraConfig(r=max(1, round(numbers / per_rank)), target_modules=names, lora_dropout=0.0)
    )
    return full(adapted, loss)


def workloads() -> dict[str, tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]:
    """Name → (model, loss on a fixed batch)."""
    torch.manual_seed(0)
    flat, images, words = torch.randn(1024, 768), torch.randn(32, 3, 32, 32), torch.randn(16, 64, 256)
    mlp = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    labels = {n: torch.arange(n) % 10 for n in (1024, 32, 16)}
    return {
        "MLP 768-768-768-10, batch 1024": (mlp, lambda m: F.cross_entropy(m(flat), labels[1024])),
        "transformer encoder, 6 × 256, 16 × 64": (Encoder(), lambda m: F.cross_entropy(m(words), labels[16])),
        "ResNet-20, batch 32": (build("resnet20", (3, 32, 32), 10), lambda m: F.cross_entropy(m(images), labels[32])),
    }


def main() -> None:
    """Time every kind of step on every model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = []
    for name, (model, loss) in workloads().items():
        numbers = sum(
            c.shape[0] * round(0.1 * c.shape[1]) for c in choose(model) if c.how == "covered" and len(c.shape) == 2
        )
        kinds: dict[str, Step | None] = {"full": full(copy.deepcopy(model), loss)}
        for projector in ("coordinate", "gaussian"):
            for ratio in RATIOS:
                kinds[f"SSF {projector}, ρ = {ratio:g}"] = subspace(copy.deepcopy(model), loss, projector, ratio)
        if numbers:
            kinds["LoRA (PEFT), trained numbers of ρ = 0.1"] = lora(copy.deepcopy(model), loss, numbers)
        ready = {kind: step for kind, step in kinds.items() if step is not None}
        times: dict[str, list[float]] = {kind: [] for kind in ready}
        for repeat in range(args.repeats + 2):
            for kind, (step, _) in ready.items():
                began = time.perf_counter()
                step()
                if repeat >= 2:
                    times[kind].append(time.perf_counter() - began)
        base, memory = statistics.median(times["full"]), ready["full"][1]()
        lines += [
            "",
            f"**{name}**",
            "",
            "| step | ms | time / full | weight gradients / full | kept activations / full |",
            "|---|---|---|---|---|",
        ]
        for kind, (_, count) in ready.items():
            middle, (grads, kept) = statistics.median(times[kind]), count()
            parts = f"{middle / base:.2f} | {grads / memory[0]:.2f} | {kept / memory[1]:.2f}"
            lines.append(f"| {kind} | {middle * 1e3:.1f} | {parts} |")
    text = "\n".join(lines).strip()
    print(text)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-client-step.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
