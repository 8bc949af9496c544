"""`fedspan plan`: what a run will cost, before it runs."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli._options import Changes, CountOrNone, Plugin, load_plugins, load_spec

if TYPE_CHECKING:
    from fedspan.core.privacy import Privacy
    from fedspan.costs.plan import Plan


def command(
    spec: Annotated[Path | None, typer.Argument(metavar="[SPEC]")] = None,
    changes: Changes = None,
    methods: str | None = None,
    plugin: Plugin = None,
    model: Path | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    trained: CountOrNone = None,
) -> None:
    """Show what each method costs in bytes, memory and disk.

    Give a spec, or --model: then 10 clients train it in 100 rounds with LoRA of rank 8, on batches of 16 texts of 64
    tokens, and --set changes this, as in --set task.length=512 or --set 'method={name="ssf", rank=0.1}'.

    Args:
        spec: The spec, a TOML file; or give --model.
        methods: Names such as ssf,fedavg. Default: all for a spec, five for a model.
        model: A Hugging Face model's directory or its config.json.
        epsilon: Also show the noise of differential privacy at this epsilon.
        delta: Delta of --epsilon.
        trained: Parameters that methods of a subspace and LoRA train. Default: as many as LoRA of rank 8.
    """
    if (spec is None) == (model is None):
        raise typer.BadParameter(
            "give a spec, or a model as in `fedspan plan --model DIR`", param_hint="SPEC"
        )
    load_plugins(plugin)
    from fedspan.cli._tables import console
    from fedspan.core.extras import needs
    from fedspan.core.privacy import Privacy
    from fedspan.core.spec import Spec, with_changes
    from fedspan.costs.plan import plan

    if spec is not None:
        source = load_spec(spec, changes)
    else:
        task = {"name": "outline", "model": str(model), "clients": 10, "length": 64}
        method = {"name": "fedit", "rank": 8, "lr": 1.0}
        own = {"rounds": 100, "batch_size": 16, "method": method, "task": task}
        source = Spec.from_table(with_changes(own, tuple(changes or ())))
    settings = source.dp
    if epsilon is not None:
        settings = Privacy(epsilon=epsilon, delta=delta, clip=(settings and settings.clip) or 1.0)
    if settings is not None and settings.epsilon is not None:
        needs("privacy", "dp_accounting")
    with console.status("a round of each method, without values"):
        found = plan(source, methods.split(",") if methods else None, trained=trained)
    _show(found)
    if settings is not None:
        _show_privacy(found, settings)


def _show(found: Plan) -> None:
    """Print what a run would cost with each method: bytes, memory of a client, and what is kept."""
    from fedspan.cli._tables import say, show, size

    def costs(*names: str) -> list[list[str]]:
        # a row for each method of which they are known
        return [
            [row.method, *(size(attrgetter(name)(row)) for name in names)]
            for row in found.rows
            if getattr(row, names[0].partition(".")[0]) is not None
        ]

    blocks = len(found.layout.blocks)
    say(
        f"{found.parameters:,} parameters, {found.layout.size:,} of them trained, in {blocks} "
        f"tensor{'s' if blocks > 1 else ''}; "
        f"{found.rounds:,} rounds of {found.clients_per_round} of {found.clients} clients\n"
    )
    rows = costs("cost.up_round", "cost.down_round", "cost.up", "cost.down")
    for row, one in zip(rows, found.rows, strict=True):
        ratio = f"{one.rank:.4g}" if isinstance(one.rank, int | float) else "by layer"
        row[1:1] = ["" if one.rank is None else ratio, f"{one.trained:,}"]
    show(
        ("method", "rank", "trained", "up", "down", "up, run", "down, run"),
        rows,
        left=1,
        note="trained: parameters; up, down: per client and round; run: all clients and rounds",
    )
    timed = [one for one in found.rows if one.cost.hours is not None]
    show(
        ("hours", "a round", "run"),
        [(one.method, f"{one.cost.hours_round:.3g}", f"{one.cost.hours:.3g}") for one in timed],
        left=1,
        note="by the virtual clock of `federation`, without evaluations",
    )
    parts = ("weights", "gradients", "activations", "optimizer", "controls", "peak")
    held = costs(*(f"memory.{part}" for part in parts))
    adapted = [row[0] for row in held if row[0] in ("fedit", "ffalora")]
    show(
        ("client memory", *parts),
        held,
        left=1,
        note="at the peak of a local step with the largest batch; controls: with the method's own copies of the model"
        + (f"; {' and '.join(adapted)} as PEFT runs them" if adapted else ""),
    )
    show(
        ("kept", "client state", "client disk", "server memory", "server disk"),
        costs("cost.client_state", "cost.client_disk", "cost.server_memory", "cost.server_disk"),
        left=1,
        note="client: between rounds, on disk two versions with the copy of the model; server: model, controls and "
        "log, on disk the copies of all clients' states",
    )
    show(
        ("across machines", "client process", "server process"),
        costs("client_peak", "cost.server_peak"),
        left=1,
        note="peaks of the processes, besides what Python, torch and Flower take themselves",
    )


def _show_privacy(found: Plan, settings: Privacy) -> None:
    """Print the noise of differential privacy, for the methods that can have it and ten times as many clients."""
    from fedspan.cli._tables import say, show
    from fedspan.core.refusals import SUMMED
    from fedspan.replies.noise import Mechanism

    one, many = (
        Mechanism(settings, k * found.clients, k * found.clients_per_round, found.rounds)
        for k in (1, 10)
    )
    budget = (
        f"noise {settings.noise:g}" if settings.epsilon is None else f"ε = {settings.epsilon:g}"
    )
    say(
        f"{budget}, δ = {settings.delta:g}: noise multiplier {one.vector_noise:.4g}; each client takes part with "
        f"probability {one.q:.4g}; each parameter of the mean has noise of {one.per_number:.3g} times the clip\n"
    )
    rows = []
    for row in found.rows:
        if row.method in SUMMED:
            n = round(row.cost.up_round / found.layout.dtype.itemsize)
            ratios = [one.signal_to_noise(n)]
            ratios += [each.signal_to_noise(n, found.rounds) for each in (one, many)]
            rows.append((row.method, f"{n:,}", *(f"{ratio:.3g}" for ratio in ratios)))
    show(
        ("privacy", "sent", "per round", "run", "10 × clients"),
        rows,
        left=1,
        note="signal to noise at most, as norms: if all clients sent the same vector, of the clip's norm; run: if it "
        "had the same direction in every round. Fewer parameters have less noise, and move x in fewer directions",
    )
