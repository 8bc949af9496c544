"""What aggregators must keep to, one function per law."""

from __future__ import annotations

import numpy as np
import torch

from fedspan.checks.bench import hold, near, random
from fedspan.core.aggregator import Aggregator
from fedspan.core.layout import Block, Layout
from fedspan.core.round import Round

CLIENTS, N = 9, 14


def replies(runs: int = 2, clients: int = CLIENTS) -> torch.Tensor:
    """Return random replies with a common part, (runs, clients, N)."""
    return 3 + random(runs, clients, N)


def round_of(v: torch.Tensor, weighted: bool = False) -> Round:
    """Return a round in which these replies came."""
    runs, clients, n = v.shape
    ids = np.tile(np.arange(clients), (runs, 1))
    shares = torch.arange(1.0, clients + 1, dtype=v.dtype).view(1, -1, 1).expand(runs, -1, -1)
    layout = Layout((Block("w", (n,), None),), v.dtype)
    weights = shares / shares.sum(1, keepdim=True) if weighted else None
    return Round(0, tuple(range(runs)), clients, layout, ids, np.full_like(ids, -1), weights)


def combined(aggregator: Aggregator, v: torch.Tensor, weighted: bool = False) -> torch.Tensor:
    """Return what an aggregator makes of replies."""
    return aggregator.combine(v, round_of(v, weighted))


def one_vector(aggregator: Aggregator) -> None:
    """It returns one vector per run, for any number of replies, and does not change them."""
    for clients in (1, 2, 3, 4, CLIENTS):
        v = replies(clients=clients)
        found, form = combined(aggregator, v), (2, 1, N)
        hold(
            found.shape == form,
            f"{clients} replies of {N} values become {tuple(found.shape)}, not {form}",
        )
        hold(torch.equal(replies(clients=clients), v), "it changes the replies in place")
        hold(
            torch.isfinite(found).all(),
            f"{clients} finite replies become values that are not finite",
        )


def no_order(aggregator: Aggregator) -> None:
    """The order of the replies has no effect, with weights and without."""
    v, order = replies(), np.random.default_rng(0).permutation(CLIENTS)
    for weighted in (False, True):
        rnd = round_of(v, weighted)
        turned = aggregator.combine(v[:, order], rnd.subset(order))
        near(
            turned,
            aggregator.combine(v, rnd),
            1e-10,
            "replies in another order give another result",
        )


def unanimous(aggregator: Aggregator) -> None:
    """Where all clients send the same, the result is that."""
    if getattr(aggregator, "bound", None) is not None:
        return  # a fixed bound shortens it
    v = replies()[:, :1].expand(-1, CLIENTS, -1)
    for weighted in (False, True):
        found = combined(aggregator, v, weighted)
        near(found, v[:, :1], 1e-10, "equal replies give another vector")


def translated(aggregator: Aggregator) -> None:
    """What is added to every reply is added to the result, where it says so."""
    if aggregator.translates:
        v, shift = replies(), torch.linspace(-5, 5, N, dtype=torch.float64)
        near(
            combined(aggregator, v + shift),
            combined(aggregator, v) + shift,
            1e-9,
            "it says `translates`, and does not",
        )


def bounded_influence(aggregator: Aggregator) -> None:
    """One reply, however large, moves the result by no more than the others are apart, where it says so."""
    if not aggregator.bounded:
        return
    honest = combined(aggregator, replies())
    apart = (replies() - replies().mean(1, keepdim=True)).norm(dim=-1).max()
    spread = float(apart) + float(honest.norm(dim=-1).max())
    for size in (1e3, -1e3, 1e12, -1e12, 1e30, -1e30, 3e38, -3e38):
        v = replies()
        v[:, 4] = size
        moved = float((combined(aggregator, v) - honest).norm(dim=-1).max())
        hold(
            moved <= spread,
            f"a reply of {size:g} moves the result by {moved:.3g}, all others are within {spread:.3g}",
        )


def runs_apart(aggregator: Aggregator) -> None:
    """Several runs at once are the runs one by one."""
    v, words = replies(runs=3), "a run alone and among others gives another result"
    for weighted in (False, True):
        together = combined(aggregator, v, weighted)
        for run in range(3):
            alone = combined(aggregator, v[run : run + 1], weighted)
            near(alone[0], together[run], 1e-12, words)


LAWS = (one_vector, no_order, unanimous, translated, bounded_influence, runs_apart)
