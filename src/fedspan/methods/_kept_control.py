"""Clients that keep a copy of the server's control, so that it is not sent.

With `keep_control` a client holds a copy ĉ of c, and m if the server has momentum, next to its copy of the model. All
of them follow from the change δ of x in each round that the client missed (newcomers are sent x, ĉ and m in full):

     P ĉ ← P ĉ + (|S|/N) (−δ/(η_g η_l K) − P ĉ)

The server keeps ĉ too. Without compression of the download ĉ = c. With it ĉ is as close to c as the change that was
sent of a round is to the one that was computed. A log entry holds two more numbers: |S|/N and the factor of an
extrapolated step. With a preconditioner, v is replayed in the same way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from fedspan import Encoded, Layout, Round, SpecError, Vector
from fedspan.core.method import ClientState, Down, Up
from fedspan.core.sync import Entry
from fedspan.methods._preconditioner import Preconditioned
from fedspan.methods.base import LoggedState


@dataclass(frozen=True, kw_only=True)
class KeptControl(Preconditioned[LoggedState, ClientState, Down, Up]):
    """A method in a subspace whose clients can keep a copy of c."""

    keep_control: bool = (
        False  # whether clients keep a copy of c, d more numbers, so that P c is not sent
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_control and not self.solver.plain:
            raise SpecError(
                "`keep_control` needs plain steps, after which c follows from the changes of x; leave out `momentum` "
                "and `optimizer`"
            )

    @functools.cached_property
    def copied(self) -> int:
        return 1 + self.keep_control * (1 + bool(self.server_momentum))

    def apart(self, copy: Vector, layout: Layout) -> tuple[Vector, Vector, Vector, Vector]:
        """x, ĉ, m and v of a client's copy, which is these in a row."""
        ends = [layout.size, 2 * layout.size, (3 if self.server_momentum else 2) * layout.size]
        return tuple(copy.tensor_split(ends, -1))  # type: ignore[return-value]

    def apply_entry(self, copy: Vector, entry: Entry, rnd: Round) -> Vector:
        if not self.keep_control:
            return super().apply_entry(copy, entry, rnd)
        assert isinstance(entry, Encoded)
        P, (x, c, m, v) = self.subspace(rnd), self.apart(copy, rnd.layout)
        share, factor = entry.take("beside")[0].split(1, -1)
        move = delta = self.opened(entry, P, rnd)
        if self.server_momentum:
            Pm = P @ m
            delta = move - self.server_momentum * Pm
            m = torch.where(share > 0, m + P.T @ (move - Pm), m)
        mean_g = delta / (-self.server_lr * self.step(P, rnd) * self.local_steps * factor)
        if self.scaled:
            mean_g = mean_g / self.scales(v, P)
            v = torch.where(share > 0, self.squares(v, mean_g, P), v)
        c = c + P.T @ (share * (mean_g - P @ c))
        return torch.cat([x + P.T @ move, c, m, v], -1)

    def no_move(self, x: Vector, rnd: Round) -> Entry:
        entry = super().no_move(x, rnd)
        return with_factors(entry, x, 0.0, 1.0) if self.keep_control else entry


def with_factors(
    entry: Entry, x: Vector, share: torch.Tensor | float, factor: torch.Tensor | float
) -> Encoded:
    """A log entry with what is needed to advance ĉ: |S|/N, and the factor of an extrapolated step."""
    one = x[..., :1]
    whole = entry if isinstance(entry, Encoded) else Encoded(values=entry)
    return replace(
        whole, beside=torch.cat([torch.zeros_like(one) + share, torch.zeros_like(one) + factor], -1)
    )
