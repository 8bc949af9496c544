"""`diagnose`: a spec's step sizes against the convergence theory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedspan.api.run import as_spec
from fedspan.api.step_size import built
from fedspan.core.errors import SpecError, positive
from fedspan.core.spec import Spec
from fedspan.theory.diagnosis import Diagnosis
from fedspan.theory.diagnosis import diagnose as _diagnose

SMALLEST = 1e-30  # ‖∇F‖ whose forecast is still a number


def diagnose(spec: Spec | Path | str | Mapping[str, Any], target: float | None = None) -> Diagnosis:
    """Holds a spec's step sizes against the conditions of the convergence theorem, before it runs.

    Args:
        spec: A `Spec`, the path of a TOML file, or a table of plain values. Where its `lr` is "search" or "auto", the
            step of the corollary is examined.
        target: ‖∇F‖ to forecast rounds and bytes for; by default a tenth of that at the start.

    Returns:
        Estimated constants, conditions, safe steps and the forecast.
    """
    if target is not None:
        positive("target", target)
        if target < SMALLEST:
            raise SpecError(f"`target` must be at least {SMALLEST}, got {target!r}")
    spec = as_spec(spec)
    method, problem, clients_per_round = built(spec)
    method = dataclasses.replace(method, lr=spec.method.lr)
    return _diagnose(method, problem, clients_per_round, spec.rounds, target, settings=spec)
