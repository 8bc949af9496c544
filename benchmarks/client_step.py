"""Cost of one local step on the client: full training, LoRA (where `peft` is installed), and SSF inside a subspace.

    python benchmarks/client_step.py [--repeats 15]

Steps of all kinds take turns on one thread; times are least CPU times. Memory is counted on tensors, in MB: all
parameters (with what a method keeps beside them), gradients of what is trained, what the forward pass keeps for the
backward pass (each storage once), the state of an optimizer with momentum (one number for each that is trained), and
their sum. "Covered" is what the covered layers alone keep. LoRA trains as many numbers as SSF at ρ = 0.1. Writes
out/bench-client-step.md.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core import tables
from fedspan.core.config import Training
from fedspan.core.projector import draw
from fedspan.costs.dry_run import Live
from fedspan.nn.models import build
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.objective import Finish, GradientDirection
from fedspan.nn.projection_rules import layout_of, projection_rules
from fedspan.optimizers.sgd import SGD

ROOT = Path(__file__).parents[1]
RATIOS = (0.05, 0.1, 0.2)
WANTED = {"MLP": 0.7, "transformer": 0.78, "ResNet": 0.85}  # of a full step, at ρ = 0.1
Loss = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A way of training a model."""

    model: nn.Module
    step: Callable[[], Any]
    trained: int  # numbers
    beside: int = 0  # numbers kept beside the parameters

    def memory(self, loss: Loss, batch: torch.Tensor, layers: list[str]) -> dict[str, float]:
        """MB of each part."""
        parameters = sum(p.numel() for p in self.model.parameters()) + self.beside
        kept, covered = kept_by(self.model, loss, batch), kept_inside(self.model, loss, layers)
        parts = {
            "parameters": 4 * parameters,
            "gradients": 4 * self.trained,
            "kept": kept,
            "optimizer": 4 * self.trained,
        }
        parts |= {"sum": sum(parts.values()), "covered": covered}
        return {name: size / 1e6 for name, size in parts.items()}


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
        q, k, v = (
            f(y).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def kept_by(model: nn.Module, loss: Loss, batch: torch.Tensor) -> int:
    """Bytes that a forward pass keeps, the module's own tensors apart, each storage once; the batch if it is saved."""
    saved: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss(model)
    with Live(torch.device("cpu")) as live:
        with live.pause():
            live.count([*model.parameters(), *model.buffers(), batch])
        keep = loss(model)
        size = live.restart()
    del keep
    return size + batch.nbytes * (batch.untyped_storage().data_ptr() in saved)


def kept_inside(model: nn.Module, loss: Loss, layers: list[str]) -> int:
    """The same of some layers alone, by what they save themselves."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    inside: dict[int, int] = {}
    depth = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if depth and storage.data_ptr() not in own:
            inside[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    found = [
        m
        for name, m in model.named_modules()
        if any(name == one or name.endswith(f".{one}") for one in layers)
    ]
    hooks = [
        hook
        for m in found
        for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))
    ]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        keep = loss(model)
    del keep
    for hook in hooks:
        hook.remove()
    return sum(inside.values())


def full(model: nn.Module, loss: Loss) -> Kind:
    """All weights that require a gradient, plain SGD."""
    params = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        loss(model).backward()
        for p in params:
            p.data.add_(p.grad, alpha=-1e-6)
            p.grad = None

    return Kind(model, step, sum(p.numel() for p in params))


def subspace(model: nn.Module, loss: Loss, projector: str, ratio: float) -> Kind:
    """SSF's local step inside x + range(Pᵀ)."""
    choices = projection_rules(model)
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": projector, "rank": ratio}), layout, (0,), 0)
    inside = Restricted(module, choices, module.flat.detach().clone().view(1, 1, -1), P).__enter__()
    z, u = torch.zeros(1, 1, P.rank), torch.zeros(1, 1, P.rank)
    direction = GradientDirection(inside, itertools.repeat(loss), Finish(Training(), u))

    def step() -> None:
        nonlocal z
        z, *_ = SGD().descend(z, direction, 1e-6, 1)

    kept = 3 * P.rank  # z, the correction u, and what lies where the subspace's weights lie
    return Kind(model, step, P.rank, kept)


def lora(model: nn.Module, loss: Loss, numbers: int) -> Kind | None:
    """LoRA by PEFT on the same layers, at a rank that trains about as many numbers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return None
    covered = [c for c in projection_rules(model) if c.how == "fused"]
    per_rank = sum(c.shape[0] + math.prod(c.shape[1:]) for c in covered)
    config = LoraConfig(
        r=max(1, round(numbers / per_rank)),
        target_modules=[c.layer for c in covered],
        lora_dropout=0.0,
    )
    return full(get_peft_model(model, config), loss)


def workloads() -> dict[str, tuple[nn.Module, Loss, torch.Tensor]]:
    """Name → (model, loss on a fixed batch, inputs of the batch)."""
    torch.manual_seed(0)
    flat, images, words = (
        torch.randn(1024, 768),
        torch.randn(32, 3, 32, 32),
        torch.randn(16, 64, 256),
    )
    mlp = nn.Sequential(
        nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)
    )
    resnet = build("resnet20", (3, 32, 32), 10)
    labels = {n: torch.arange(n) % 10 for n in (1024, 32, 16)}
    return {
        "MLP 768-768-768-10, batch 1024": (
            mlp,
            lambda m: F.cross_entropy(m(flat), labels[1024]),
            flat,
        ),
        "transformer encoder, 6 × 256, 16 × 64": (
            Encoder(),
            lambda m: F.cross_entropy(m(words), labels[16]),
            words,
        ),
        "ResNet-20, batch 32": (resnet, lambda m: F.cross_entropy(m(images), labels[32]), images),
    }


def short(repeats: int = 8) -> list[bench.Row]:
    """For `make bench`."""
    torch.set_num_threads(1)
    rows = []
    for name, (model, loss, _) in workloads().items():
        steps = {
            "full": full(copy.deepcopy(model), loss).step,
            "ssf": subspace(copy.deepcopy(model), loss, "coordinate", 0.1).step,
        }
        best = {kind: 1e3 * seconds for kind, seconds in bench.cpu_times(steps, repeats).items()}
        wanted = next(value for word, value in WANTED.items() if name.startswith(word))
        peer, own, ratio = (
            f"full step {best['full']:.1f}",
            f"{best['ssf']:.1f}",
            best["ssf"] / best["full"],
        )
        rows.append(
            bench.Row(
                f"a client's step, {name}, ms", peer, own, ratio, wanted, larger_is_better=False
            )
        )
    return rows


def main() -> None:
    """Time every kind of step on every model."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if args.short:
        print(bench.table(short(repeats=2)))
        return
    torch.set_num_threads(1)
    lines = []
    for name, (model, loss, batch) in workloads().items():
        layers = [c.layer for c in projection_rules(model) if c.how == "fused"]
        ready = {"full": full(copy.deepcopy(model), loss)}
        for projector in ("coordinate", "gaussian"):
            for ratio in RATIOS:
                ready[f"SSF {projector}, ρ = {ratio:g}"] = subspace(
                    copy.deepcopy(model), loss, projector, ratio
                )
        peer = lora(copy.deepcopy(model), loss, ready["SSF coordinate, ρ = 0.1"].trained)
        if peer is not None:
            ready["LoRA (PEFT)"] = peer
        times = bench.cpu_times({kind: one.step for kind, one in ready.items()}, args.repeats)
        memory = {kind: one.memory(loss, batch, layers) for kind, one in ready.items()}
        parts = ["parameters", "gradients", "kept", "optimizer", "sum", "covered"]
        header = [
            "step",
            "trained",
            "ms",
            "time / full",
            *(f"{part}, MB" for part in parts),
            "covered / full",
        ]
        lines += ["", f"**{name}**", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for kind, one in ready.items():
            cells = [
                kind,
                f"{one.trained:,}",
                f"{times[kind] * 1e3:.1f}",
                f"{times[kind] / times['full']:.2f}",
            ]
            cells += [f"{memory[kind][part]:.2f}" for part in parts]
            cells.append(f"{memory[kind]['covered'] / memory['full']['covered']:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines).strip()
    print(text)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-client-step.md").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
