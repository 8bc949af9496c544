"""Momentum, extrapolation and compression on the server, for methods whose rounds move x inside a subspace.

δ is what a round would add to x inside the subspace of P. With `server_momentum` β the server keeps m, d numbers:

     P m ← β P m + δ;   x ← x + Pᵀ P m              outside the subspace m and x stay

What is sent of the round is P m: r numbers, as without momentum. With P = I it is the momentum of FedAvgM.

With `extrapolate`, δ is first multiplied by FedExP's step size (Jhunjhunwala et al. 2023, arXiv:2301.09604), which is
large where the clients disagree: max(1, mean_S ‖Δ_i‖² / (2 ‖mean_S Δ_i‖²)), from the changes Δ_i that the clients sent.

With a `down_compressor` C, what is sent of the round is compressed, and the server itself moves x by what was sent, so
that x stays the same at both ends. What C leaves out is kept in e, d numbers, and added to a later move (error
feedback, as in DoubleSqueeze):

     w ← P m + P e;   Q ← C(w), sent;   P e ← w − Q;   P m ← Q;   x ← x + Pᵀ Q
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Compressor, Encoded, Layout, Round, Vector
from fedspan.core.errors import below_one
from fedspan.core.linear_map import LinearMap
from fedspan.core.method import ClientState, Down, Up
from fedspan.core.sync import Entry
from fedspan.methods.base import InSubspace, LoggedState


@dataclass(frozen=True, kw_only=True)
class ServerMomentum:
    """A method whose server can move x with momentum."""

    server_momentum: float = 0.0  # β: momentum of the server
    extrapolate: bool = (
        False  # whether the server's step grows with the disagreement of the clients, as in FedExP
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        below_one("server_momentum", self.server_momentum)

    @property
    def needs_each_reply(self) -> bool:
        """FedExP's step size is made of the norms of single replies."""
        return self.extrapolate

    def no_velocity(self, x0: Vector) -> Vector:
        """m before round 0; empty without momentum."""
        return torch.zeros_like(x0 if self.server_momentum else x0[..., :0])

    def moved_on(
        self, m: Vector, delta: Vector, P: LinearMap | None = None
    ) -> tuple[Vector, Vector]:
        """(P m, m) after δ; without P for P = I."""
        if not self.server_momentum:
            return delta, m
        before = m if P is None else P @ m
        now = self.server_momentum * before + delta
        return now, now if P is None else m + P.T @ (now - before)

    def stretch(self, changes: Vector, rnd: Round) -> torch.Tensor:
        """FedExP's step size for the changes of a cohort, (runs, 1, 1)."""
        apart, together = rnd.mean((changes * changes).sum(-1, keepdim=True)), rnd.mean(changes)
        size = (together * together).sum(-1, keepdim=True)
        return torch.where(size > 0, apart / (2 * size), torch.ones_like(size)).clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class CompressedMoves(ServerMomentum, InSubspace[LoggedState, ClientState, Down, Up]):
    """A method in a subspace whose server can compress what it sends of each round."""

    down_compressor: Compressor | None = (
        None  # how the changes of x are compressed; none: r numbers as they are
    )

    def check(self, layout: Layout) -> None:
        """The compressor must not leave out more of a move than it sends, or x would never catch up."""
        super().check(layout)
        if self.down_compressor is not None:
            self.needs_contractive(
                self.down_compressor, self.projector.size(layout), "down_compressor"
            )

    def nothing_unsent(self, x0: Vector) -> Vector:
        """e before round 0; empty without a compressor."""
        return torch.zeros_like(x0[..., :0] if self.down_compressor is None else x0)

    def move(
        self, m: Vector, e: Vector, delta: Vector, P: LinearMap, rnd: Round
    ) -> tuple[Entry, Vector, Vector, Vector]:
        """(what is sent, the move that it stands for, m, e) after δ."""
        if self.down_compressor is None and not self.server_momentum:
            return delta, delta, m, e
        move, moved = self.moved_on(m, delta, P)
        if self.down_compressor is None:
            return move, move, moved, e
        Pe = P @ e
        w = move + Pe
        Q = self.down_compressor.compress(w, self.down_compressor.server_keys(rnd))
        sent = self.opened(Q, P, rnd)
        if self.server_momentum:
            moved = moved + P.T @ (sent - move)
        return Q, sent, moved, e + P.T @ (w - sent - Pe)

    def opened(self, entry: Entry, P: LinearMap, rnd: Round) -> Vector:
        """The move that a log entry stands for, r numbers."""
        if not isinstance(entry, Encoded):
            return entry
        if self.down_compressor is None:
            return entry.take("values")[0]
        return self.down_compressor.decompress(
            entry, P.rank, self.down_compressor.server_keys(rnd), rnd.layout.dtype
        )

    def expand_entry(self, entry: Entry, rnd: Round) -> Vector:
        P = self.subspace(rnd)
        return P.T @ self.opened(entry, P, rnd)

    def apply_entry(self, copy: Vector, entry: Entry, rnd: Round) -> Vector:
        P = self.subspace(rnd)
        return P.T.plus(self.opened(entry, P, rnd), copy, rnd.overwrite)

    def no_move(self, x: Vector, rnd: Round) -> Entry:
        """The log entry of a round that leaves x as it is."""
        P = self.subspace(rnd)
        zeros = x.new_zeros(*x.shape[:-1], P.rank)
        if self.down_compressor is None:
            return zeros
        return self.down_compressor.compress(zeros, self.down_compressor.server_keys(rnd))
