"""`fedspan reproduce`: a study of the paper, or of this library."""

from __future__ import annotations

from typing import Annotated

import typer

from fedspan.cli._options import Jobs, Out


def command(
    study: Annotated[
        str,
        typer.Argument(
            help="The study: toy, mnist, cifar100, nlp, options, preconditioner, privacy, bytes, control, a9a, "
            "flamby-brca or flamby-heart."
        ),
    ],
    out: Out,
    scale: Annotated[
        str | None,
        typer.Option("--scale", help="smoke, laptop, paper or full. Default: the study's own."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short for --scale smoke.")] = False,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="Number of seeds. Default: the scale's own."),
    ] = None,
    jobs: Jobs = 1,
    again: Annotated[
        bool, typer.Option("--again", help="Discard earlier results in --out.")
    ] = False,
) -> None:
    """Regenerate a study: tables, figures and one page.

    STUDY is toy, mnist, cifar100, nlp, options, preconditioner, privacy, bytes, control, a9a, flamby-brca
    or flamby-heart.
    Finished runs are kept.
    """
    from fedspan.cli._tables import console
    from fedspan.study import conduct

    scale = "smoke" if quick else scale
    conduct.reproduce(study, out, scale=scale, seeds=seeds, jobs=jobs, again=again, console=console)
