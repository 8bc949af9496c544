"""The tables of a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedspan.cli._tables import size, table

if TYPE_CHECKING:
    from fedspan.theory.diagnosis import Diagnosis
    from fedspan.theory.theorem import Condition


def diagnosis(found: Diagnosis, console: Console) -> None:
    """Estimates, conditions, step sizes, guaranteed rounds and bytes, and what lies outside the theory."""
    known = found.estimates
    rows = {
        "L = max L_i": known.L, "L of F": known.L_mean, "σ²": known.sigma2, "Δ_F": known.gap, "C_0": known.control,
        "‖∇F(x⁰)‖²": known.grad_sq,
    }  # fmt: skip
    console.print(
        table(
            ("estimate", "value", "how"), [(k, f"{e.value:.4g}", e.note) for k, e in rows.items()]
        ),
        "",
    )
    checked = [(c.name, f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.conditions]
    checked += [
        (f"sufficient: {c.name}", f"{c.value:.3g}", f"{c.limit:.3g}", _met(c)) for c in found.proved
    ]
    console.print(table(("condition", "value", "limit", "holds"), checked), "")
    own = {} if found.steps == found.safe else {"of the spec": found.steps}
    safe = "safe: the corollary's" if found.setting.share == 1 else "safe: for sampled clients"
    lines = [(n, f"{s.local:.3g}", f"{s.server(found.setting.local_steps):.3g}", f"{s.effective:.3g}")
             for n, s in (own | {safe: found.safe}).items()]  # fmt: skip
    console.print(table(("steps", "η_l = lr", "η_g = server.lr", "η̃"), lines))
    console.print(
        f"guaranteed after {found.setting.rounds:,} rounds with the safe steps: min ‖∇F‖² ≤ {found.bound:.3g} as "
        f"printed, {found.bound_proved:.3g} as proved\n", highlight=False, soft_wrap=not console.is_terminal,
    )  # fmt: skip
    console.print(f"guaranteed rounds and bytes until ‖∇F‖ ≤ {found.target:.3g}", highlight=False)
    ahead = [
        (f"{f.rho:g}", f"{f.printed:.3g}", f"{f.rounds:.3g}", size(f.up), size(f.down))
        for f in found.forecast
    ]
    console.print(table(("ρ", "rounds, as printed", "as proved", "up", "down"), ahead))
    for warning in found.warnings:
        console.print(
            "[yellow]outside the theory[/]:",
            escape(warning),
            highlight=False,
            soft_wrap=not console.is_terminal,
        )


def _met(condition: Condition) -> str:
    return (
        "[green]yes[/]"
        if condition.holds
        else f"[red]no[/], {condition.excess:.3g} times the limit"
    )
