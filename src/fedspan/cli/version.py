"""`fedspan version`: the versions that a run's numbers depend on."""

import typer


def command() -> None:
    """Show the versions of fedspan, Python, torch and NumPy."""
    from fedspan.core.extras import versions

    typer.echo("  ".join(f"{name} {number}" for name, number in versions().items()))
