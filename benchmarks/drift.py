"""Why controls help or hurt: how far a client's gradient moves during its local steps, and how wrong its control is.

    python benchmarks/drift.py [--rounds 30] [--lr 0.3 0.1 0.03] [--steps 20 5]

SCAFFOLD with a ResNet-8 on 20 classes of CIFAR-100 at half size, four clients with five classes each. After `--rounds`
rounds, per client, with full gradients over its own data and relative to ‖∇f_i(x)‖:

    moved     ‖∇f_i(y_K) − ∇f_i(x)‖    how much the gradient changes during the K local steps
    control   ‖c_i − ∇f_i(x)‖          how wrong the control is that corrects these steps
    apart     ‖∇f_i(x) − ∇F(x)‖        what a control has to remove

Controls can remove the differences between clients only where `control` is well below `apart`. The same is shown for
the output head alone. Writes out/bench-drift.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.theory.gradient_probe import full_grads

ROOT = Path(__file__).parents[1]
TASK = {
    "name": "classification",
    "data": "cifar100",
    "classes": 20,
    "shrink": 2,
    "model": "resnet8",
    "partition": {"name": "classes", "clients": 4, "classes_per_client": 5},
}
RATIOS = ("moved", "control", "apart")


def spec_of(lr: float, steps: int) -> Spec:
    """SCAFFOLD on the task above."""
    method = {"name": "scaffold", "lr": lr, "local_steps": steps}
    return Spec.from_table(
        {"rounds": 1, "method": method, "task": TASK, "participation": {"weights": "uniform"}}
    )


def measure(problem: Problem, method: Any, rounds: int) -> dict[str, dict[str, float]]:
    """The three ratios, mean over clients, for all weights and for the head."""
    clients = Simulator(method, problem)
    loop = Loop(method, problem, clients, (0,), problem.clients)
    with torch.inference_mode():
        for _ in range(rounds):
            loop.step()
    x, own, rnd = loop.server.x, clients.clients().c, loop._round()
    length = method.lr * method.local_steps  # of a plain step along the mean gradient
    here, down, after = full_grads(problem, x), method.broadcast(loop.server, rnd), []
    for place, client in enumerate(rnd.ids[0]):
        one = rnd.subset(np.array([place]))
        state = Bundle(c=own[:, client : client + 1])
        with torch.inference_mode():
            _, up = method.client_step(state, down, problem.cohort(one), one)
        after.append(full_grads(problem, x - length * (down.Pc + up.v), np.array([client])))
    order = np.argsort(rnd.ids[0])
    others = {
        "moved": torch.cat([after[i] for i in order], 1),
        "control": own,
        "apart": here.mean(1, keepdim=True),
    }
    sizes = [block.size for block in problem.layout.blocks]
    head = torch.cat(
        [
            torch.full((n,), b.name.startswith("head."))
            for n, b in zip(sizes, problem.layout.blocks, strict=True)
        ]
    )
    return {
        name: {
            key: float(((here - v)[..., w].norm(dim=-1) / here[..., w].norm(dim=-1)).mean())
            for key, v in others.items()
        }
        for name, w in {"all": torch.ones_like(head), "head": head}.items()
    }


def main() -> None:
    """Measure and write the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.3, 0.1, 0.03])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 5])
    args = parser.parse_args()
    if args.short:
        args.rounds, args.lr, args.steps = 1, [0.1], [2]
    torch.set_num_threads(1)
    lines = [
        "| η | K | rounds | moved | control | apart | head: moved | control | apart |",
        "|---" * 9 + "|",
    ]
    for steps in args.steps:
        for lr in args.lr:
            spec = spec_of(lr, steps)
            found = measure(spec.task.build((0,), spec), spec.method, args.rounds)
            cells = [f"{found[part][key]:.2f}" for part in ("all", "head") for key in RATIOS]
            lines.append(f"| {lr:g} | {steps} | {args.rounds} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-drift.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
