"""What the command line prints: results, plans and diagnoses as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from fedspan.core.layout import Layout
    from fedspan.costs.model_plan import ModelPlan
    from fedspan.costs.traffic import Cost
    from fedspan.engine.run_dir import Result
    from fedspan.theory.diagnosis import Diagnosis
    from fedspan.theory.theorem import Condition


def result(found: Result, out: Path, console: Console) -> None:
    """The last row of each seed of a run."""
    from fedspan.engine.history import PLAIN

    table = Table(box=None, header_style="dim")
    metrics = [k for k in found.rows[0][-1] if k not in PLAIN]
    for name in ("seed", "status", "round", *metrics, "up", "down", "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for number, seed in enumerate(found.seeds):
        last = found.rows[number][-1]
        values = ["-" if last[name] is None else f"{last[name]:.4g}" for name in metrics]
        sizes = [f"{last[name] / 1e6:.2f} MB" for name in ("up_bytes", "down_bytes")]
        table.add_row(str(seed), found.status(number), str(last["round"]), *values, *sizes, f"{last['seconds']:.1f}")
    console.print(table)
    console.print(f"results in {out}", highlight=False)


def costs(layout: Layout, of: Mapping[str, Cost], rounds: int, console: Console) -> None:
    """What a spec's run would cost with each method."""
    console.print(f"{layout.size:,} numbers in {len(layout.blocks)} tensors; {rounds:,} rounds", highlight=False)
    heads = ("up", "down", "up, run", "down, run", "state", "disk", "server", "copies")
    rows = [(name, *(size(value) for value in cost.sizes())) for name, cost in of.items()]
    console.print(_sized("method", heads, rows))
    console.print(
        "up, down: one client and round; run: all clients and rounds; state, disk: of one client; server: model, "
        "controls and log; copies: of all clients' states, on the server's disk",
        highlight=False,
    )


def model_costs(plan: ModelPlan, console: Console) -> None:
    """What a model would cost a client with each method."""
    console.print(
        f"{plan.parameters:,} parameters, {plan.layout.size:,} of them trained; SSF at rank {plan.share:.4g}, LoRA at "
        f"{plan.ranks[0]}, FFA-LoRA at {plan.ranks[1]}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    sent = [
        (line.method, f"{line.memory.trained:,}", size(line.up), size(line.down), size(line.disk))
        for line in plan.lines
    ]
    console.print(_sized("method", ("numbers", "up", "down", "disk"), sent), "")
    parts = ("weights", "gradients", "activations", "optimizer", "controls", "peak")
    held = [(line.method, *(size(getattr(line.memory, part)) for part in parts)) for line in plan.lines]
    console.print(_sized("memory", parts, held))
    console.print(
        "of one client; numbers: trained; up, down: a round, once it has the model; weights to peak: memory in a local "
        "step; disk: two versions of its controls and its copy of the model",
        highlight=False,
        soft_wrap=True,
    )


def diagnosis(found: Diagnosis, console: Console) -> None:
    """Estimates, conditions, step sizes, guaranteed rounds and bytes, and what lies outside the theory."""
    known = found.estimates
    rows = {
        "L = max L_i": known.L, "L of F": known.L_mean, "σ²": known.sigma2, "Δ_F": known.gap, "C_0": known.control,
        "‖∇F(x⁰)‖²": known.grad_sq,
    }  # fmt: skip
    console.print(_listed(("estimate", "value", "how"), [(k, f"{e.value:.4g}", e.note) for k, e in rows.items()]), "")
    checked = [(c.name, f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.conditions]
    checked += [(f"sufficient: {c.name}", f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.proved]
    console.print(_listed(("condition", "value", "limit", "holds"), checked), "")
    own = {} if found.steps == found.safe else {"of the spec": found.steps}
    lines = [(n, f"{s.local:.3g}", f"{s.server(found.setting.local_steps):.3g}", f"{s.effective:.3g}")
             for n, s in (own | {"safe: the corollary's": found.safe}).items()]  # fmt: skip
    console.print(_listed(("steps", "η_l = lr", "η_g = server_lr", "η̃"), lines))
    console.print(
        f"guaranteed after {found.setting.rounds:,} rounds with the safe steps: min ‖∇F‖² ≤ {found.bound:.3g} as "
        f"printed, {found.bound_proved:.3g} as proved\n", highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"guaranteed rounds and bytes until ‖∇F‖ ≤ {found.target:.3g}", highlight=False)
    ahead = [(f"{f.rho:g}", f"{f.printed:.3g}", f"{f.rounds:.3g}", size(f.up), size(f.down)) for f in found.forecast]
    console.print(_listed(("ρ", "rounds, as printed", "as proved", "up", "down"), ahead))
    for warning in found.warnings:
        console.print("[yellow]outside the theory[/]:", escape(warning), highlight=False, soft_wrap=True)


def size(value: float) -> str:
    """Bytes with a unit, in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def _sized(first: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(first, box=None, header_style="dim", padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _listed(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*heads, box=None, header_style="dim", padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _met(condition: Condition) -> str:
    return "[green]yes[/]" if condition.holds else f"[red]no[/], {condition.excess:.3g} times the limit"
