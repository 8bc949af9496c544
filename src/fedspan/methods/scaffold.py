"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al. 2020, arXiv:1910.06378), Algorithm 1.

     5  send (x, c) to the clients in S
    10  y ← y − η_l (g_i(y) − c_i + c)              K times, from y = x
    12  c_i⁺ ← ∇f_i(x)                              option I
        c_i⁺ ← c_i − c + (x − y) / (K η_l)          option II
    17  x ← x + η_g mean_S Δy;  c ← c + (|S|/N) mean_S Δc

Differences from the paper: by default clients send only Δy (`uplink = "one"`), because with option II the server can
compute Δc = −Δy/(K η_l) − c; `uplink = "classic"` sends both, "control" Δc alone, from which the server computes Δy.
With privacy it is the one to use: c moves by the sum of the Δc, divided by N, whoever takes part. Clients may have
weights w_i; then c = Σ w_i c_i. Local momentum or another optimizer works on the corrected gradient. The mean gradient
then does not follow from the end point: c_i⁺ is the mean itself, and both vectors are sent.

With correction = "never" line 10 leaves out c − c_i, with "tested" the server decides it by a test (`_correction`).
Δc = ḡ_i − c_i does not follow from Δy where the steps are not corrected, so clients send Δc, and the server computes
the mean change of x from it: −K η_l (c + mean_S Δc), which is mean_S Δy where all steps are corrected.
`_server_side` describes momentum and extrapolation on the server (with P = I).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedspan import Layout, Objective, Restorable, Round, SpecError, Vector, register
from fedspan.core.errors import one_of
from fedspan.core.method import Measures
from fedspan.methods._correction import TEST, Correction, completed, corrected
from fedspan.methods._server_side import ServerMomentum
from fedspan.methods.base import Averaged, LocalSteps


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model and the mean of all controls."""

    x: Vector
    c: Vector
    test: Vector  # what the tests of the correction have told; empty by default
    m: Vector  # the server's momentum; empty by default


@dataclass(frozen=True, eq=False)
class ClientState:
    """The client's control."""

    c: Vector


@dataclass(frozen=True, eq=False)
class Down:
    """2d numbers."""

    x: Vector
    c: Vector
    switch: torch.Tensor | None = None  # one byte: whether to correct


@dataclass(frozen=True, eq=False)
class Up:
    """d numbers, or 2d with the classic uplink and with local steps that are not plain."""

    dy: Vector | None
    dc: Vector | None
    test: Vector | None = field(
        default=None, metadata=TEST
    )  # n_i and d_i, by which the correction is tested


@register
@dataclass(frozen=True, kw_only=True)
class Scaffold(
    Correction,
    ServerMomentum,
    LocalSteps[ServerState, ClientState, Down, Up],
    Restorable[ClientState, Down, Up],
):
    """Drift correction by control variates of the size of the model."""

    controls = ("c",)
    uses_mean_only = True
    option: Literal["I", "II"] = (
        "II"  # how line 12 renews the control: a full gradient, or the mean of the local ones
    )
    uplink: Literal["one", "classic", "control"] = (
        "one"  # what is sent: Δy, from which Δc follows, both, or Δc alone
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("option", self.option, ("I", "II"))
        one_of("uplink", self.uplink, ("one", "classic", "control"))
        if self.option == "I" and self.uplink != "classic":
            raise SpecError(
                f"`uplink` {self.uplink!r} needs option 'II'; with option 'I' set `uplink` to 'classic'"
            )
        if self.option == "I" and self.tests:
            raise SpecError(
                "`correction` 'tested' needs option 'II', whose controls are means of local gradients"
            )

    @property
    def follows_states(self) -> bool:
        """Line 17 does: c = mean c_i."""
        return True

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0), self.no_tests(x0), self.no_velocity(x0))

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(torch.zeros_like(x0))

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(server.x, server.c, self.switch(server.test))  # 5

    def client_step(
        self, client: ClientState, down: Down, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        x, c, c_i = down.x, down.c, client.c
        u, b = c - c_i, self.corrects(down.switch, rnd)
        direction = watched = self.watched(f.direction(corrected(b, u)), u, b)
        if not self.solver.plain:
            direction = Averaged(direction)
        dy = self.descend(x, direction, self.rate(rnd)).sub_(x)  # 10
        mean = direction.mean if isinstance(direction, Averaged) else None  # of g_i + b u
        dc = test = None
        if self.option == "I":
            dc = f.full_grad(x) - c_i  # 12
        elif self.correction != "always":
            mean = dy / (-self.local_steps * self.rate(rnd)) if mean is None else mean
            dc = completed(mean - c, b, u)
            test = self.measured(u, c, b, dc, watched, self.local_steps)
        elif mean is not None:
            dc = mean - c
        elif self.uplink != "one":
            dc = self._control_change(dy, c, rnd)
        alone = (
            self.option == "II"
            and self.solver.plain
            and (self.correction != "always" or self.uplink == "control")
        )
        up = Up(None if alone else dy, dc, test)
        del u, direction, watched  # not to be held while the new state is made
        return self.update_client_state(client, down, up, rnd), up

    def update_client_state(
        self, client: ClientState, down: Down, up: Up, rnd: Round
    ) -> ClientState:
        if up.dc is None:
            assert up.dy is not None
            return ClientState(self._control_change(up.dy, down.c, rnd).add_(client.c))  # 12
        return ClientState(client.c + up.dc)  # 12

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        x, c = server.x, server.c
        test = server.test
        if up.test is not None:
            test = self.judged(test, self.told(test, up.test, rnd), 1.0, rnd)
        dc = None if up.dc is None else rnd.mean(up.dc)
        dy = self._changes(None if up.dy is None else rnd.mean(up.dy), dc, c, rnd)
        mean_dc = self._control_change(dy, c, rnd) if dc is None else dc
        delta = self.server_lr * dy
        if self.extrapolate:
            delta = delta * self.stretch(self._changes(up.dy, up.dc, c, rnd), rnd)
        m = server.m
        if self.server_momentum:
            delta, m = self.moved_on(m, delta)
        x = x + delta if self.server_momentum else delta.add_(x)  # m is kept
        return ServerState(x, (rnd.share * mean_dc).add_(c), test, m)  # 17

    def measures(self, server: ServerState) -> Measures:
        return self.test_values(server.test)

    def _changes(self, dy: Vector | None, dc: Vector | None, c: Vector, rnd: Round) -> Vector:
        """Δy, from Δc where it was not sent."""
        if dy is not None:
            return dy
        assert dc is not None
        return -self.local_steps * self.rate(rnd) * (c + dc)

    def _control_change(self, dy: Vector, c: Vector, rnd: Round) -> Vector:
        return (dy / (-self.local_steps * self.rate(rnd))).sub_(c)
