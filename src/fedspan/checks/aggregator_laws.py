"""What aggregators must keep to, one function per law."""

from __future__ import annotations

import numpy as np
import torch

from fedspan.checks.law import hold, near
from fedspan.core.aggregator import Aggregator
from fedspan.core.layout import Block, Layout
from fedspan.core.round import Round

CLIENTS, N = 9, 14


def replies(runs: int = 2, clients: int = CLIENTS) -> torch.Tensor:
    """Random replies with a common part, (runs, clients, N)."""
    draw = torch.Generator().manual_seed(0)
    return 3 + torch.randn(runs, clients, N, dtype=torch.float64, generator=draw)


def round_of(v: torch.Tensor, weighted: bool = False) -> Round:
    """A round in which these replies came."""
    runs, clients, n = v.shape
    ids = np.tile(np.arange(clients), (runs, 1))
    shares = torch.arange(1.0, clients + 1, dtype=v.dtype).view(1, -1, 1).expand(runs, -1, -1)
    layout = Layout((Block("w", (n,), None),), v.dtype)
    weights = shares / shares.sum(1, keepdim=True) if weighted else None
    return Round(0, tuple(range(runs)), clients, layout, ids, np.full_like(ids, -1), weights)


def one_vector(aggregator: Aggregator) -> None:
    """It returns one vector per run, for any number of replies, and does not change them."""
    for clients in (1, 2, 3, 4, CLIENTS):
        v = replies(clients=clients)
        before, found = v.clone(), aggregator.combine(v, round_of(v))
        hold(
            found.shape == (2, 1, N),
            f"{clients} replies of {N} numbers become {tuple(found.shape)}, not (2, 1, {N})",
        )
        hold(torch.equal(before, v), "it changes the replies in place")
        hold(
            bool(torch.isfinite(found).all()),
            f"{clients} finite replies become numbers that are not finite",
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
        near(
            aggregator.combine(v, round_of(v, weighted)),
            v[:, :1],
            1e-10,
            "equal replies give another vector",
        )


def translated(aggregator: Aggregator) -> None:
    """What is added to every reply is added to the result, where it says so."""
    if aggregator.translates:
        v, shift = replies(), torch.linspace(-5, 5, N, dtype=torch.float64)
        moved = aggregator.combine(v + shift, round_of(v))
        near(
            moved,
            aggregator.combine(v, round_of(v)) + shift,
            1e-9,
            "it says `translates`, and does not",
        )


def bounded_influence(aggregator: Aggregator) -> None:
    """One reply, however large, moves the result by no more than the others are apart, where it says so."""
    if not aggregator.bounded:
        return
    honest = aggregator.combine(replies(), round_of(replies()))
    spread = float((replies() - replies().mean(1, keepdim=True)).norm(dim=-1).max()) + float(
        honest.norm(dim=-1).max()
    )
    for size in (1e3, 1e12, 1e30, 3e38):
        for sign in (1, -1):
            v = replies()
            v[:, 4] = sign * size
            moved = float((aggregator.combine(v, round_of(v)) - honest).norm(dim=-1).max())
            words = f"a reply of {sign * size:g} moves the result by {moved:.3g}, all others are within {spread:.3g}"
            hold(moved <= spread, words)


def runs_apart(aggregator: Aggregator) -> None:
    """Several runs at once are the runs one by one."""
    v = replies(runs=3)
    for weighted in (False, True):
        together = aggregator.combine(v, round_of(v, weighted))
        for run in range(3):
            alone = v[run : run + 1]
            found = aggregator.combine(alone, round_of(alone, weighted))
            near(
                found[0], together[run], 1e-12, "a run alone and among others gives another result"
            )


LAWS = (one_vector, no_order, unanimous, translated, bounded_influence, runs_apart)
