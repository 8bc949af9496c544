"""Why controls help or hurt: how far a client's gradient moves during its local steps, and how old its control is.

    python benchmarks/drift.py [--rounds 30] [--lr 0.3 0.1 0.03] [--steps 20 5]

SCAFFOLD on the CIFAR-100 laptop benchmark (disjoint classes). After `--rounds` rounds, for each client, with full
gradients over its own data and relative to ‖∇f_i(x)‖:

    moved     ‖∇f_i(y_K) − ∇f_i(x)‖    how much of the gradient is another one after the K local steps
    control   ‖c_i − ∇f_i(x)‖          how wrong the control is that corrects those steps
    apart     ‖∇f_i(x) − ∇F(x)‖        what a control is there to remove

Controls can remove what sets clients apart only where `control` is well below `apart`. The same for the output head
alone. Writes out/bench-drift.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.study.parse import committed

ROOT = Path(__file__).parents[1]


def spec_of(lr: float, steps: int) -> Spec:
    """SCAFFOLD at the laptop scale."""
    part = committed("cifar100", "laptop").parts[0]
    return part.spec(part.variant("scaffold"), {"method.lr": lr, "method.local_steps": steps})


def measure(problem: Problem, spec: Spec, rounds: int) -> dict[str, dict[str, float]]:
    """The three ratios, mean over clients, for all weights and for the head."""
    method: Any = spec.method
    clients_end = Simulator(method, problem)
    loop = Loop(method, problem, clients_end, (0,), problem.clients)
    with torch.inference_mode():
        for _ in range(rounds):
            loop.step()
    x, c = loop.server.x, loop.server.c
    own = clients_end.clients().c
    rnd = loop._round()
    here, after = [], []
    for place in range(problem.clients):
        one = rnd.subset(np.array([place]))
        client = int(one.ids[0, 0])
        f = problem.cohort(one)
        here.append(f.full_grad(x))
        with torch.inference_mode():
            down = type(method.broadcast(loop.server, one))(x, c)
            state = method.init_client(x, problem.layout)
            state = type(state)(own[:, client : client + 1])
            _, up = method.client_step(state, down, problem.cohort(one), one)
        after.append(problem.cohort(one).full_grad((x + up.dy).clone()))
    mean = torch.cat(here, 1).mean(1, keepdim=True)
    blocks = problem.layout.blocks
    ends = np.cumsum([0, *(b.size for b in blocks)])
    head = torch.zeros(problem.layout.size, dtype=torch.bool)
    for block, start, end in zip(blocks, ends, ends[1:], strict=False):
        head[start:end] = block.name.startswith("head.")
    out: dict[str, dict[str, float]] = {}
    for name, where in {"all": torch.ones_like(head), "head": head}.items():
        sums = {"moved": 0.0, "control": 0.0, "apart": 0.0}
        for place in range(problem.clients):
            g, later = here[place][0, 0, where], after[place][0, 0, where]
            control = own[0, int(rnd.ids[0, place]), where]
            for key, other in {"moved": later, "control": control, "apart": mean[0, 0, where]}.items():
                sums[key] += float((g - other).norm() / g.norm()) / problem.clients
        out[name] = sums
    return out


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.3, 0.1, 0.03])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| η | K | rounds | moved | control | apart | head: moved | control | apart |", "|---" * 9 + "|"]
    for steps in args.steps:
        for lr in args.lr:
            spec = spec_of(lr, steps)
            found = measure(spec.task.build((0,), spec), spec, args.rounds)
            cells = [f"{found[part][key]:.2f}" for part in ("all", "head") for key in ("moved", "control", "apart")]
            lines.append(f"| {lr:g} | {steps} | {args.rounds} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-drift.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
