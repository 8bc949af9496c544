"""`fedspan plan`: what a run will cost, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedspan.cli._options import Changes, Plugin, load_plugins, load_spec


def command(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="The spec, a TOML file; or give --model."),
    ] = None,
    changes: Changes = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="Names such as ssf,fedavg. Default: all for a spec, five for a model."
        ),
    ] = None,
    plugin: Plugin = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A Hugging Face model's directory or its config.json."),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--epsilon", help="Also show the noise of differential privacy at this epsilon."
        ),
    ] = None,
    delta: Annotated[float, typer.Option("--delta", help="Delta of --epsilon.")] = 1e-5,
    rank: Annotated[
        float | None, typer.Option("--rank", help="SSF's rank, as a share of a layer's inputs.")
    ] = None,
    trained: Annotated[
        int | None, typer.Option("--trained", min=1, help="Numbers that SSF and LoRA train.")
    ] = None,
    lora_rank: Annotated[
        int,
        typer.Option(
            "--lora-rank",
            min=1,
            help="Without --rank and --trained: train as many numbers as LoRA does.",
        ),
    ] = 8,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts per batch.")] = 16,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens per text.")] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="Type of the weights.")
    ] = "float32",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds.")] = 100,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of clients.")] = 10,
    clients_per_round: Annotated[
        int | None,
        typer.Option("--clients-per-round", min=1, help="Clients per round. Default: all."),
    ] = None,
    frozen_modules: Annotated[
        list[str] | None,
        typer.Option("--frozen-modules", help="Pattern of tensors that are not trained."),
    ] = None,
    optimizer: Annotated[
        Literal["sgd", "momentum", "adamw"],
        typer.Option("--optimizer", help="Optimizer of local steps."),
    ] = "sgd",
    labels: Annotated[
        int | None, typer.Option("--labels", min=2, help="Number of classes, for a classifier.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Gradient checkpointing, for all methods.")
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="SSF's layers recompute outputs instead of keeping them."),
    ] = False,
) -> None:
    """Show what each method costs in bytes, memory and disk.

    Give a spec, or --model and the options after it.
    """
    if (spec is None) == (model is None):
        raise typer.BadParameter(
            "give a spec, or a model as in `fedspan plan --model DIR`", param_hint="SPEC"
        )
    load_plugins(plugin)
    from fedspan.cli import _plan_table
    from fedspan.cli._tables import console
    from fedspan.core import tables
    from fedspan.core.config import Engine, Projection
    from fedspan.core.errors import SpecError
    from fedspan.core.extras import needs
    from fedspan.core.privacy import Privacy
    from fedspan.core.spec import Spec
    from fedspan.costs.plan import plan
    from fedspan.tasks.outline import Outline

    if spec is not None:
        source = load_spec(spec, changes)
    else:
        if rank is not None and trained is not None:
            raise SpecError("--rank and --trained both say how much SSF trains; give one of them")
        method = (
            {"name": "fedit", "rank": lora_rank} if rank is None else {"name": "ssf", "rank": rank}
        )
        steps: dict[str, Any] = {
            "momentum": {"local": {"name": "sgd", "momentum": 0.9}},
            "adamw": {"local": "adamw"},
        }
        source = Spec(
            rounds=rounds,
            batch_size=batch_size,
            clients_per_round=clients_per_round,
            method=tables.build("method", {**method, **steps.get(optimizer, {}), "lr": 1.0}),
            task=Outline(
                model=str(model),
                clients=clients,
                length=length,
                labels=labels,
                precision="bfloat16" if dtype == "bfloat16" else "full",
                gradient_checkpointing=checkpointing,
            ),
            projection=Projection(frozen_modules=tuple(frozen_modules or ())),
            engine=Engine(recompute=recompute),
        )
    settings = source.dp
    if epsilon is not None:
        settings = Privacy(epsilon=epsilon, delta=delta, clip=(settings and settings.clip) or 1.0)
    if settings is not None and settings.epsilon is not None:
        needs("privacy", "dp_accounting")
    with console.status("a round of each method, without numbers"):
        found = plan(source, methods.split(",") if methods else None, trained=trained)
    _plan_table.plan(found, console)
    if settings is not None:
        _plan_table.privacy(found, settings, console)
