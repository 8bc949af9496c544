"""`fedspan reproduce`: a study of the paper, or of this library."""

from fedspan.cli._options import CountOrNone, Jobs, Out, command_line


def command(
    study: str,
    out: Out,
    scale: str | None = None,
    seeds: CountOrNone = None,
    jobs: Jobs = 1,
    again: bool = False,
) -> None:
    """Regenerate a study: tables, figures and one page.

    Finished runs are kept.

    Args:
        study: The study: toy, mnist, cifar100, nlp, options, preconditioner, privacy, bytes, control, flamby-brca or
            flamby-heart; or a TOML file of a study.
        scale: smoke, laptop, paper or full. Default: the study's own.
        seeds: Number of seeds. Default: the scale's own.
        again: Discard earlier results in --out.
    """
    from fedspan.cli._tables import console
    from fedspan.study import conduct

    conduct.reproduce(
        study, out, scale=scale, seeds=seeds, jobs=jobs, again=again, console=console, line=command_line()
    )  # fmt: skip
