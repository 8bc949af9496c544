"""What a report says in words: its title, how a comparison was made, and how far runs have come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.study.model import Part, Table, in_percent, name_of
from fedspan.study.results import Entry
from fedspan.study.tables import shown

FEW = 5  # methods that a title names
DATA = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}


def titled(part: Part) -> str:
    """What is compared on what; many methods are counted."""
    return f"{listed([variant.label for variant in part.variants])} on {problem(part.base.get('task', {}))}"


def listed(labels: Sequence[str]) -> str:
    """Few methods by name, many by their number."""
    if len(labels) > FEW:
        return f"{len(labels)} methods"
    return f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else labels[0]


def problem(task: Table) -> str:
    """A task in words: its data, or what kind of problem it is, and the number of clients."""
    name = str(task.get("name", ""))
    data = task.get("data") if name != "custom" else None  # of a custom task: a digest
    if isinstance(data, str):
        what = DATA.get(data, Path(data).stem if "/" in data else data)
    else:
        what = {"regression": "the regression problem", "custom": ""}.get(name, name)
    partition = task.get("partition", {})
    clients = partition.get("clients") if isinstance(partition, dict) else None
    details = [f"het {task['het']:g}"] if isinstance(task.get("het"), int | float) else []
    details += [f"{count} clients"] if (count := task.get("clients") or clients) else []
    return ", ".join([what, *details] if what else details) or "your own model and data"


def described(part: Part) -> str:
    """How a comparison was made."""
    tuned = any(len(variant.points()) > 1 for variant in part.variants)
    seeds = f"{part.seeds} seed{'s' if part.seeds > 1 else ''}, the same for all"
    first = f"first {part.tuning_seeds} seeds" if part.tuning_seeds > 1 else "first seed"
    parts = [
        f"Every method runs under {seeds}; ± is the standard deviation over them."
        if part.seeds > 1
        else "One seed."
    ]
    if tuned:
        by = {"": "", TRAIN_LOSS: " by the training loss"}.get(
            part.tune_by, f" by {name_of(part.tune_by)}"
        )
        parts.append(
            f"Each is tuned over its own grid{by} on the {first}; * marks a value at the end of its grid."
        )
    if part.budget is not None:
        parts.append(f"Results are read at the last evaluation within {part.budget.words()}.")
        if tuned:
            parts.append(
                f"Columns at another cost show the best point of the same grid there, on the {first}."
            )
    if part.tail > 1:
        parts.append(f"A result is the mean of the last {part.tail:g} evaluations.")
    return " ".join(parts)


def standing(part: Part, entries: Sequence[Entry]) -> str:
    """The run with the best last value and how far it is; empty if all runs diverged or failed."""
    alive = [entry for entry in entries if entry.final.whole]
    if not alive:
        return ""
    sign = -1 if part.goal == "max" else 1
    best = min(alive, key=lambda entry: sign * entry.final.mean)
    curve = best.series.curve(part.metric)
    value = f"{name_of(part.metric)} {shown(part.metric, best.final)}{' %' if in_percent(part.metric) else ''}"
    far = f"after {curve.rounds[-1]:.0f} rounds and {curve.spent('total')[-1] / 1e6:.3g} MB in both directions"
    return f"{best.series.label}{' has the best last value' if len(entries) > 1 else ''}: {value} {far}."
