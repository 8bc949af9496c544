"""One algorithm over six axes. SSF, SCAFFOLD, FedAvg and most published methods are recipes of it.

     1  P ← space(seed, t)                                   server and clients
     2  send what i lacks of x, and what `drift` needs       downlink
     3  K steps of `local` inside x + range(Pᵀ), along P ∇f_i corrected by `drift`
     4  send `uplink`(what the steps came to)
     5  the client's own states: drift, uplink, local
     6  move ← `server`(mean_S of what came)
     7  x ← x − Pᵀ `downlink`(move)
     8  the server's own states: drift, server, downlink, local

A choice on an axis is a value from one file: `space` from `fedspan.projectors`, `local` from `fedspan.optimizers`, the
others from `fedspan.drifts`, `uplinks`, `servers` and `downlinks` (their interface is in `core.axes`). A recipe is a
class that sets their defaults. What cannot work together is refused in `core.refusals`; everything else runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from fedspan import (
    Bundle,
    Downlink,
    Drift,
    Encoded,
    Layout,
    Method,
    Objective,
    Projector,
    Round,
    Server,
    SpecError,
    Uplink,
    Vector,
)
from fedspan.core.answers import checked
from fedspan.core.bundle import Ranges
from fedspan.core.objective import Direction
from fedspan.core.projector import LinearMap, Rank, draw
from fedspan.core.refusals import check_axes
from fedspan.downlinks.changes import Changes
from fedspan.downlinks.full import FullModel
from fedspan.drifts.none import NoDrift
from fedspan.methods.base import LocalSteps
from fedspan.projectors.coordinate import Coordinate
from fedspan.projectors.identity import Identity
from fedspan.servers.mean import Mean
from fedspan.uplinks.plain import Plain


@dataclass(frozen=True, kw_only=True)
class Box(LocalSteps):
    """Federated training by six independent choices.

    Args:
        space: Where x moves in a round: a projector such as `Gaussian(rank=20, refresh=5)`; `Identity()` is all of it.
        drift: What keeps local steps from drifting, such as `Controls()` or `Proximal(mu=0.1)`.
        uplink: How a client's vector is sent: a compressor, or one with a memory such as `Feedback(TopK(k=0.1))`.
        server: What the server makes of the mean, such as `Momentum(0.5)`.
        downlink: How x is sent: `FullModel()`, `Changes()`, or a compressor for compressed changes.
        normalize: Where clients take different numbers of steps K_i, divides what the steps of client i came to by
            K_i; x moves by the mean of that times the mean of K_i (FedNova, arXiv:2007.07481). If false, x moves by the
            mean as it is, and a client counts by w_i K_i.
    """

    space: Projector = Identity()  # where x moves in a round
    drift: Drift = NoDrift()  # what keeps local steps from drifting
    uplink: Uplink = Plain()  # how a client's vector is sent
    server: Server = Mean()  # what the server makes of the mean
    downlink: Downlink = FullModel()  # how x is sent
    normalize: bool = True  # whether x moves by the mean direction of a step
    keeps_local = True
    own_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axes(self.drift, self.uplink, self.server, self.normalize)

    # what others must know of the choices

    def check(self, layout: Layout) -> None:
        """Raise SpecError if rank or compressors do not fit this model, or two choices use one name."""
        r = self.space.size(layout)
        self.uplink.check(r, self.drift)
        self.downlink.check(r)
        x0 = torch.zeros(1, 1, layout.size, dtype=layout.dtype, device="meta")
        self.init_server(x0, layout)
        self.init_client(x0, layout)

    @property
    def plain_sum(self) -> bool:  # type: ignore[override]
        """Whether the server needs of the replies nothing but the mean of each vector."""
        return self.uplink.plain_sum and not self.server.needs_each_reply

    @property
    def follows_states(self) -> bool:  # type: ignore[override]
        """Whether the server adds up replies to follow a sum over the clients' states."""
        return self.drift.follows_states or self.uplink.follows_states

    @property
    def controls(self) -> tuple[str, ...]:  # type: ignore[override]
        """Parts that server and clients have in common."""
        return self.drift.controls

    @property
    def statistics(self) -> Mapping[str, Ranges]:  # type: ignore[override]
        """Parts of a reply beside the payload."""
        return self.drift.statistics

    @property
    def private(self) -> tuple[str, ...]:  # type: ignore[override]
        """Client parts that no server can know."""
        return (*self.uplink.private, *(("moments",) if self.local.moments != "reset" else ()))

    @property
    def logs_changes(self) -> bool:  # type: ignore[override]
        """Whether clients are sent changes of x."""
        return self.downlink.logs

    def without_tests(self) -> Self:
        return replace(self, drift=self.drift.without_tests())

    def measures(self, server: Bundle) -> Mapping[str, Any]:
        return self.drift.measures(server)

    # the states before round 0

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        on = checked(self)
        return self._joined(
            {"x": x0},
            on.drift.init_server(x0),
            on.uplink.init_server(x0),
            on.server.init(x0),
            on.downlink.init(x0),
            self.local.init_server(x0, layout),
        )

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        moments = {}
        if self.local.moments != "reset":
            size = self.local.size(self.space.size(layout))
            moments = {"moments": x0.new_zeros(*x0.shape[:-1], size)}
        on = checked(self)
        return self._joined(on.drift.init_client(x0), on.uplink.init_client(x0), moments)

    def _joined(self, *axes: dict[str, Any]) -> Bundle:
        """Return the parts of all choices as one state."""
        parts: dict[str, Any] = {}
        for own in axes:
            if twice := own.keys() & parts.keys():
                raise SpecError(
                    f"two choices of {type(self).__name__} keep a part {min(twice)!r}; rename it in one of their files"
                )
            parts |= own
        return Bundle(**parts)

    # the round

    def subspace(self, rnd: Round) -> LinearMap:
        """P_t, which several lines of a round need; `rnd` remembers it."""
        drawn: tuple[Projector, LinearMap] | None = vars(rnd).get("drawn")
        if drawn is None or drawn[0] is not self.space:
            epoch = 0 if isinstance(self.space, Identity) else rnd.t // self.space.refresh
            drawn = self.space, draw(self.space, rnd.layout, rnd.seeds, epoch)
            vars(rnd)["drawn"] = drawn
        return drawn[1]

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        on: Any = checked(self) if rnd.t < 2 else self
        P = self.subspace(rnd)  # 1
        x, needed = on.downlink.down(server, rnd), on.drift.down(server, P, rnd)  # 2
        if (code := self.downlink.control) is not None:
            keys = code.server_keys(rnd, "control")
            vectors = {name: v for name, v in needed.items() if v.is_floating_point()}
            needed |= {name: code.compress(v, keys) for name, v in vectors.items()}
        return Bundle(**x, probe=P.probe, **needed, **self.local.down(server))

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        up, held = self._steps(client, down, f, rnd)  # its other vectors are gone before line 5
        return self.update_client_state(held, down, up, rnd), up

    def _steps(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        """Lines 3 and 4: the reply, and the client's state before line 5."""
        on: Any = checked(self) if rnd.t < 2 else self
        drift, uplink = on.drift, on.uplink
        P, x, lr = self.subspace(rnd), self.downlink.model(down), self.rate(rnd)  # 1
        P.agree(down.get("probe"))
        if (code := self.downlink.control) is not None:
            codes = {n: part for n, part in vars(down).items() if isinstance(part, Encoded)}
            how = P.rank, code.server_keys(rnd, "control"), rnd.layout.dtype
            down = down.replace(**{n: code.decompress(part, *how) for n, part in codes.items()})

        # along what: P ∇f_i corrected by `drift`, times the scales of `local`
        work = drift.begin(client, down, P, rnd)
        plus = drift.plus(work, x, P)
        if P.whole:
            direction = f.direction(plus)
        elif callable(plus):
            direction = _sum(f.restrict(x, P), plus)
        else:
            direction = f.restrict(x, P, plus=plus)
        watched = direction = drift.watch(work, direction)
        if (D := self.local.scales(down, P)) is not None:
            direction = _scaled(direction, D)

        # from where: moments of another P are projected again
        start = x if P.whole else x.new_zeros(()).expand(*rnd.ids.shape, P.rank)
        origin = P @ x if self.local.decay and not P.whole else None
        if (held := client.get("moments")) is not None:
            held = self._carried(held, P, rnd)

        in_gradients = drift.in_gradients or uplink.in_gradients
        average = drift.in_gradients and not self.local.plain
        steps, own = self.local_steps, rnd.steps
        if own is not None:  # K_i
            steps = int(own.max())
        several = own if own is not None and own.numel() > 1 else None
        z, memory, mean = self.local.descend(
            start, direction, lr, steps, origin, held, average=average, own=several
        )  # 3
        if P.whole:
            z = z.sub_(x) if in_gradients or average else torch.sub(x, z, out=z)
        if own is not None and self.normalize:  # as if all took K steps
            z.mul_(self.local_steps / own)
        if average:
            came = mean
        elif in_gradients:
            came = z.div_(-lr * self.local_steps)
            came = came if D is None else came / D
        else:
            came = z if P.whole else z.neg_()
        made = steps if several is None else several
        parts = drift.reply(work, came, watched, client, P, made)
        v, kept = uplink.send(parts["v"], client, P)  # 4
        code = uplink.compressor
        parts["v"] = v if code is None else code.compress(v, code.keys(rnd))
        if average:
            parts["z"] = z
        if held is not None:
            kept["moments"] = memory
        return Bundle(**parts), client.replace(**kept)

    def _carried(self, held: Vector, P: LinearMap, rnd: Round) -> Vector:
        """Return a cohort's moments inside P."""
        now = rnd.t // self.space.refresh
        then = np.where(rnd.last_round < 0, now, rnd.last_round // self.space.refresh)
        for epoch in [] if P.whole else np.unique(then[then != now]).tolist():
            old = draw(self.space, rnd.layout, rnd.seeds, epoch)
            here = torch.from_numpy(then == epoch).unsqueeze(-1)
            held = torch.where(here, self.local.carry(held, old, P), held)
        return held

    def arrived(self, up: Bundle, P: LinearMap, rnd: Round) -> Any:
        """Return what arrives of the clients' vectors, the same bits at both ends."""
        if (code := self.uplink.compressor) is None:
            return up.v
        return code.decompress(up.v, P.rank, code.keys(rnd), rnd.layout.dtype)

    def update_client_state(self, client: Bundle, down: Bundle, up: Bundle, rnd: Round) -> Bundle:
        on: Any = checked(self) if rnd.t < 2 else self
        P = self.subspace(rnd)
        v = self.arrived(up, P, rnd)
        own = on.uplink.after(client, v, P)
        return client.replace(**on.drift.after(client, v, P, rnd), **own)  # 5

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        on: Any = checked(self) if rnd.t < 2 else self
        P, drift = self.subspace(rnd), on.drift
        v = self.arrived(up, P, rnd)
        mean, own = on.uplink.mean(server, v, P, rnd)
        w = drift.direction(server, mean, P, rnd)
        D, pace = self.local.scales(server, P), rnd.pace  # K̄ / K
        length: Any = self.rate(rnd) * self.local_steps
        length = length if self.normalize else length * pace
        if (z := up.get("z")) is not None:
            direction = -rnd.mean(z)
        elif drift.in_gradients or on.uplink.in_gradients:
            direction = length * (w if D is None else D * w)
        else:
            direction, w = w, w if D is None else w / (length * D)
        if rnd.steps is not None and self.normalize:
            direction = pace * direction
        each = direction
        if on.server.needs_each_reply:
            each = drift.direction(server, v, P, rnd) if z is None else -z
            each = D * each if D is not None and drift.in_gradients else each
            each = pace * each if rnd.steps is not None and self.normalize else each

        move, moved = on.server.step(server, direction, P, rnd, each)  # 6
        sent, log = on.downlink.send(server, move, P, rnd)
        if sent is not move:
            moved = on.server.sent(moved, move, sent, P)
        x = P.T.plus(sent, server.x, sign=-1)  # 7
        scale = {} if D is None else self.local.server(server, w, P)
        kept = drift.server(server, mean, up, P, rnd)
        return server.replace(x=x, **kept, **own, **moved, **log, **scale)  # 8

    # the log of changes, and rounds without replies

    def apply_entry(self, copy: Vector, entry: Any, rnd: Round) -> Vector:
        P = self.subspace(rnd)
        return P.T.plus(self.downlink.opened(entry, P, rnd), copy, rnd.overwrite, sign=-1)

    def empty_round(self, server: Bundle, rnd: Round) -> Bundle:
        return server.replace(**self.downlink.rest(server, self.subspace(rnd), rnd))


@dataclass(frozen=True, kw_only=True)
class InSubspace(Box):
    """A recipe whose x moves inside a random subspace in each round; clients are sent the changes they missed.

    Args:
        rank: Replaces the rank of `space`: a number of directions, a share of them, or a table by name pattern.
    """

    rank: Rank | None = None  # replaces the rank of `space`: 20, a share, or a table by pattern
    space: Projector = Coordinate(rank=0.1)  # where x moves in a round
    downlink: Downlink = Changes()  # how x is sent

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            object.__setattr__(self, "space", replace(self.space, rank=self.rank))
            object.__setattr__(self, "rank", None)


def _sum(direction: Direction, plus: Direction) -> Direction:
    return lambda z: direction(z) + plus(z)


def _scaled(direction: Direction, D: Vector) -> Direction:
    return lambda z: D * direction(z)


def projected_values(method: Method, layout: Layout) -> tuple[int, int, int] | None:
    """Return parameters of the tensors that are projected, values inside the subspace, and all parameters.

    None for a method that trains in the whole space.
    """
    space = getattr(method, "space", None)
    if space is None or isinstance(space, Identity):
        return None
    inside = [b for b in layout.blocks if b.axis is not None and space.rank_of(b) < b.inputs]
    return sum(b.size for b in inside), space.size(layout), layout.size
