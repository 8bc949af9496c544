"""`fedspan tune`: settings of a spec's method for a budget."""

from typing import Annotated

import typer

from fedspan.cli._options import Changes, Plugin, SpecFile, Threads, load_spec

HEADS = {
    "local_steps": "steps",
    "up_bytes_round": "up",
    "down_bytes_round": "down",
    "share": "tried",
}
NOTE = (
    "up, down: bytes of one client per round; seconds: over the link; tried: the share of the budget after which it "
    "was compared, 0 where it allows too few rounds"
)


def command(
    spec: SpecFile,
    budget: Annotated[list[str], typer.Option()],
    link: str | None = None,
    vary: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUES")] = None,
    changes: Changes = None,
    plugin: Plugin = None,
    threads: Threads = 1,
) -> None:
    """Propose rank, bits, steps and learning rate for a budget.

    The budget is of bytes and, with a link, of time. The table has all settings that were tried, the chosen one first.
    Below it is the method for the spec.

    Args:
        budget: What may be spent: total=50MB, up=10MB, rounds=200 or seconds=3600.
        link: A client's connection: up=1MB,down=4MB,latency=0.1,step=0.02.
        vary: Values to choose from, as in rank=0.05,0.1 or bits=32,8 or local_steps=5,10.
    """
    import tomli_w

    from fedspan.cli._tables import say, show
    from fedspan.study.compare import tune
    from fedspan.study.proposal import method_table
    from fedspan.study.request import grid_of

    given = load_spec(spec, changes, threads, plugin)
    varied = dict(grid_of(text, "--vary")[1:] for text in vary or ())
    found = tune(given.method, given, budget=budget, link=link, vary=varied or None)
    heads = [key for key in found.rows[0] if key != "why"]
    texts = [[_text(row[key]) for key in heads] for row in found.rows]
    show([HEADS.get(key, key.replace("_", " ")) for key in heads], texts, left=0)
    say(f"{NOTE}\n\n{found.summary()}\n")
    if given.epochs is not None:
        typer.echo("# delete `epochs` from the spec: it would replace local_steps")
    typer.echo(tomli_w.dumps({"rounds": found.rounds, "method": method_table(found)}), nl=False)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < float("inf") else ""
    return str(value)
