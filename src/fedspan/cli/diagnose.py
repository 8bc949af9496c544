"""`fedspan diagnose`: a spec's step sizes against the theory."""

from __future__ import annotations

from typing import Annotated

import typer

from fedspan.cli._options import Changes, SpecFile, Threads, load_spec


def command(
    spec: SpecFile,
    changes: Changes = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target", help="‖∇F‖ to forecast for. Default: a tenth of that at the start."
        ),
    ] = None,
    threads: Threads = 1,
) -> None:
    """Check a spec's step sizes against the convergence theory."""
    from fedspan.api.diagnose import diagnose
    from fedspan.cli import _diagnosis_table
    from fedspan.cli._tables import console

    _diagnosis_table.diagnosis(diagnose(load_spec(spec, changes, threads), target), console)
