"""`fedspan tune`: settings of a spec's method for a budget."""

import typer

from fedspan.cli._options import Changes, Grids, Plugin, SpecFile, Threads, load_spec


def command(
    spec: SpecFile,
    budget: list[str] | None = None,
    grid: Grids = None,
    changes: Changes = None,
    plugin: Plugin = None,
    threads: Threads = 1,
) -> None:
    """Propose rank, bits, steps and learning rate for a budget.

    The table has all settings that were tried. Below it is the method for the spec.

    Args:
        budget: What may be spent: total=50MB, up=10MB or rounds=200.
        grid: Values to choose from, as in rank=0.05,0.1 or local_steps=5,10 or lr=search.
    """
    if not grid and not budget:
        raise typer.BadParameter("give --budget, or --grid with values to choose from")
    import tomli_w

    from fedspan.cli._tables import say, show
    from fedspan.core.spec import with_values
    from fedspan.core.tables import describe
    from fedspan.study.compare import tune
    from fedspan.study.request import grids_of

    given = load_spec(spec, changes, threads, plugin)
    found = tune(given.method, given, tune=grids_of(grid) if grid else None, budget=budget)
    if found.rows:
        heads = [key for key in found.rows[0] if any(row[key] for row in found.rows)]
        texts = [[_text(row[key]) for key in heads] for row in found.rows]
        show([head.replace("_", " ") for head in heads], texts, left=1)
    say(f"\n{found.summary()}\n")
    if given.epochs is not None and "local_steps" in found.settings:
        typer.echo("# delete `epochs` from the spec: it would replace local_steps")
    method = with_values(describe(found.method, changed=True), found.settings)
    typer.echo(tomli_w.dumps({"rounds": found.rounds, "method": method}), nl=False)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
