"""The tables of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from fedspan.cli._tables import size, table

if TYPE_CHECKING:
    from fedspan.core.privacy import Privacy
    from fedspan.costs.plan import Plan


def plan(found: Plan, console: Console) -> None:
    """What a run would cost with each method: bytes, memory of a client, and what is kept."""
    blocks = len(found.layout.blocks)
    console.print(
        f"{found.parameters:,} parameters, {found.layout.size:,} of them trained, in {blocks} "
        f"tensor{'s' if blocks > 1 else ''}; "
        f"{found.rounds:,} rounds of {found.clients_per_round} of {found.clients} clients\n",
        highlight=False, soft_wrap=not console.is_terminal,
    )  # fmt: skip
    sent = ("up_round", "down_round", "up", "down")
    rows = [
        (r.method, _rank(r.rank), f"{r.trained:,}", *(size(getattr(r.cost, n)) for n in sent))
        for r in found.rows
    ]
    console.print(
        table(("method", "rank", "trained", "up", "down", "up, run", "down, run"), rows, left=1)
    )
    _note("trained: numbers; up, down: per client and round; run: all clients and rounds", console)
    parts = ("weights", "gradients", "activations", "optimizer", "controls", "peak")
    held = [
        (r.method, *(size(getattr(r.memory, part)) for part in parts))
        for r in found.rows
        if r.memory is not None
    ]
    if held:
        console.print(table(("client memory", *parts), held, left=1))
        note = "at the peak of a local step with the largest batch; controls: with the method's own copies of the model"
        lora = " and ".join(
            name for name in ("fedit", "ffalora") if name in [row[0] for row in held]
        )
        _note(f"{note}; {lora} as PEFT runs them" if lora else note, console)
    kept = ("client_state", "client_disk", "server_memory", "server_disk")
    rows = [(r.method, *(size(getattr(r.cost, name)) for name in kept)) for r in found.rows]
    console.print(
        table(("kept", "client state", "client disk", "server memory", "server disk"), rows, left=1)
    )
    _note(
        "client: between rounds, on disk two versions with the copy of the model; server: model, controls and log, on "
        "disk the copies of all clients' states", console,
    )  # fmt: skip
    peaks = [
        (r.method, size(r.client_peak), size(r.cost.server_peak))
        for r in found.rows
        if r.client_peak is not None
    ]
    if peaks:
        console.print(table(("across machines", "client process", "server process"), peaks, left=1))
        _note(
            "peaks of the processes, besides what Python, torch and Flower take themselves", console
        )


def privacy(found: Plan, settings: Privacy, console: Console) -> None:
    """The noise of differential privacy, for the methods that can have it and ten times as many clients."""
    from fedspan.core.refusals import SUMMED
    from fedspan.replies.noise import Mechanism

    clients, cohort = found.clients, found.clients_per_round
    one = Mechanism.of(settings, clients, cohort, found.rounds)
    many = Mechanism.of(settings, 10 * clients, 10 * cohort, found.rounds)
    budget = (
        f"noise {settings.noise:g}" if settings.epsilon is None else f"ε = {settings.epsilon:g}"
    )
    console.print(
        f"{budget}, δ = {settings.delta:g}: noise multiplier {one.vector_noise:.4g}; each client takes part with "
        f"probability {one.q:.4g}; each number of the mean has noise of {one.per_number:.3g} times the clip\n",
        highlight=False, soft_wrap=not console.is_terminal,
    )  # fmt: skip
    rows = []
    for row in found.rows:
        if row.method in SUMMED:
            n = round(row.cost.up_round / found.layout.dtype.itemsize)
            ratios = (
                one.signal_to_noise(n),
                one.signal_to_noise(n, found.rounds),
                many.signal_to_noise(n, found.rounds),
            )
            rows.append((row.method, f"{n:,}", *(f"{ratio:.3g}" for ratio in ratios)))
    console.print(table(("privacy", "sent", "per round", "run", "10 × clients"), rows, left=1))
    _note(
        "signal to noise at most, as norms: if all clients sent the same vector, of the clip's norm; run: if it had "
        "the same direction in every round. Fewer numbers have less noise, and move x in fewer directions", console,
    )  # fmt: skip


def _note(text: str, console: Console) -> None:
    console.print(f"[dim]{text}[/]\n", highlight=False, soft_wrap=not console.is_terminal)


def _rank(rank: object) -> str:
    if rank is None:
        return ""
    return f"{rank:.4g}" if isinstance(rank, int | float) else "by layer"
