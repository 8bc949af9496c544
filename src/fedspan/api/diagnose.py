"""`diagnose`: a spec's step sizes against the convergence theory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedspan.api.run import as_spec
from fedspan.api.step_size import built
from fedspan.core.spec import Spec
from fedspan.theory.diagnosis import Diagnosis
from fedspan.theory.diagnosis import diagnose as _diagnose


def diagnose(spec: Spec | Path | str | Mapping[str, Any]) -> Diagnosis:
    """Holds a spec's step sizes against the conditions of the convergence theorem, before it runs.

    Args:
        spec: A `Spec`, the path of a TOML file, or a table of plain values. Where its `lr` is "search" or "auto", the
            step of the corollary is examined.

    Returns:
        Estimated constants, conditions, safe steps and the bound.
    """
    spec = as_spec(spec)
    method, problem, clients_per_round = built(spec)
    method = dataclasses.replace(method, lr=spec.method.lr)
    return _diagnose(method, problem, clients_per_round, spec.rounds, spec)
