"""`fedspan diagnose`: a spec's step sizes against the theory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedspan.cli._options import Changes, SpecFile, Threads, load_spec

if TYPE_CHECKING:
    from fedspan.theory.diagnosis import Diagnosis


def command(spec: SpecFile, changes: Changes = None, threads: Threads = 1) -> None:
    """Check a spec's step sizes against the convergence theory."""
    from fedspan.api.diagnose import diagnose

    _show(diagnose(load_spec(spec, changes, threads)))


def _show(found: Diagnosis) -> None:
    """Print estimates, conditions, step sizes, the bound at the safe ones, and what lies outside the theory."""
    from rich.markup import escape

    from fedspan.cli._tables import console, say, show

    known = found.estimates
    estimates = {
        "L = max L_i": known.L, "σ²": known.sigma2, "Δ_F": known.gap, "C_0": known.control,
        "‖∇F(x⁰)‖²": known.grad_sq,
    }  # fmt: skip
    show(
        ("estimate", "value", "how"),
        [(name, f"{one.value:.4g}", one.note) for name, one in estimates.items()],
    )
    say("")
    rows = []
    for kind, conditions in (("", found.conditions), ("sufficient: ", found.proved)):
        for one in conditions:
            broken = f"[red]no[/], {one.excess:.3g} times the limit"
            met = "[green]yes[/]" if one.holds else broken
            rows.append((kind + one.name, f"{one.value:.3g}", f"{one.limit:.3g}", met))
    show(("condition", "value", "limit", "holds"), rows)
    say("")
    steps, setting = {"of the spec": found.steps}, found.setting
    if found.steps == found.safe:
        steps = {}
    steps["safe: the corollary's" if setting.share == 1 else "safe: for sampled clients"] = (
        found.safe
    )
    show(
        ("steps", "η_l = lr", "η_g = server.lr", "η̃"),
        [
            (
                name,
                *(f"{v:.3g}" for v in (one.local, one.server(setting.local_steps), one.effective)),
            )
            for name, one in steps.items()
        ],
    )
    say(
        f"guaranteed after {setting.rounds:,} rounds with the safe steps: min ‖∇F‖² ≤ {found.bound:.3g} as "
        f"printed, {found.bound_proved:.3g} as proved"
    )
    for warning in found.warnings:
        console.print(
            "[yellow]outside the theory[/]:",
            escape(warning),
            highlight=False,
            soft_wrap=not console.is_terminal,
        )
