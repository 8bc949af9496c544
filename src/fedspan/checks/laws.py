"""What every method must keep to in one process, one function per law."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fedspan.checks.bench import (
    ROUNDS,
    WireTransport,
    advance,
    cohort_state,
    model,
    replied,
    same,
    small,
    start,
    tensors,
)
from fedspan.checks.law import BrokenError, hold, near, same_bytes
from fedspan.core import tables, wire
from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.engine.simulator import Simulator

LEARNED = 0.95  # what may be left of the way to the minimum: FedAdagrad's steps are small


def value(method: Method) -> None:
    """It is a frozen value, which its table in a spec makes again."""
    table = tables.describe(method)
    hold(
        tables.build("method", table) == method,
        "the method built from its own table is another one",
    )
    try:
        method.lr = 1.0
    except dataclasses.FrozenInstanceError:
        return
    raise BrokenError("its fields can be changed; use @dataclass(frozen=True, kw_only=True)")


def bad_values(method: Method) -> None:
    """Values that make no sense are refused by name."""
    for name, bad in (("lr", 0.0), ("lr", float("nan")), ("local_steps", 0)):
        if not hasattr(method, name):
            continue
        try:
            dataclasses.replace(method, **{name: bad})  # type: ignore[type-var]
        except SpecError as error:
            hold(name in str(error), f"{name} = {bad} is refused without naming {name}: {error}")
        else:
            raise BrokenError(
                f"{name} = {bad} is accepted; call super().__post_init__() in yours, or check it there"
            )


def axes(method: Method) -> None:
    """States and replies have the axes (runs, clients, size)."""
    problem = small(seeds=(5, 6))
    loop = start(method, problem)
    first = ", ".join(vars(method.init_client(problem.x0, problem.layout))) or "none"
    with torch.inference_mode():
        rnd = loop._round()
        down, state = method.broadcast(loop.server, rnd), cohort_state(loop, rnd)
        state, _ = method.client_step(state, down, problem.cohort(rnd), rnd)
    later = ", ".join(vars(state)) or "none"
    words = f"client_step returns a state with {later}, init_client with {first}"
    hold(set(later.split(", ")) == set(first.split(", ")), words)
    advance(loop, 3)  # the loop checks the shape of x
    _, up = replied(loop)
    for where, arrays, axes in (
        ("init_client", wire.pack(method.init_client(problem.x0, problem.layout)), (2, 1)),
        ("client_step's reply", wire.pack(up), (2, 3)),
    ):
        for name, array in arrays.items():
            there = tuple(array.shape[:2])
            hold(
                there == axes,
                f"{name!r} of {where} is {tuple(array.shape)}, and must begin with {axes}",
            )


def first_state(method: Method) -> None:
    """A client's first state depends on the shape of x0 only."""
    problem = small()
    x0 = torch.randn(
        problem.x0.shape, dtype=problem.x0.dtype, generator=torch.Generator().manual_seed(0)
    )
    bare = torch.zeros(1, 1, 1, dtype=x0.dtype).expand(x0.shape)
    first, other = (method.init_client(x, problem.layout) for x in (x0, bare))
    words = "init_client uses the numbers of x0, which a client on its own machine does not have"
    hold(same(tensors(first), tensors(other)), words)
    for name, array in wire.pack(other).items():
        hold(
            array.is_contiguous(),
            f"{name!r} of init_client is a view of x0; make it with x0.new_zeros or clone it",
        )


def inputs_kept(method: Method) -> None:
    """No function changes its arguments."""
    problem = small()
    loop = advance(start(method, problem), 6)
    rnd, server = loop._round(), loop.server
    before = tensors(server)
    with torch.inference_mode():  # in which a change in place is possible
        down = method.broadcast(server, rnd)
        hold(same(before, tensors(server)), "broadcast changes the server's state in place")
        state = cohort_state(loop, rnd)
        held = tensors(state)
        _, up = method.client_step(state, down, problem.cohort(rnd), rnd)
        hold(same(held, tensors(state)), "client_step changes the clients' state in place")
        hold(same(before, tensors(server)), "client_step changes what it was sent in place")
        sent = tensors(up)
        method.server_step(server, up, rnd)
        hold(same(before, tensors(server)), "server_step changes the server's state in place")
        hold(same(sent, tensors(up)), "server_step changes the replies in place")


def seeds_decide(method: Method) -> None:
    """The same seed gives the same bits, and another seed another run."""
    runs = [advance(start(method, small(seeds=(seed,), data_seed=1)), 12) for seed in (5, 5, 6)]
    words = (
        "two runs of one seed differ; draw all random numbers from rnd.seeds by fedspan.core.seeds"
    )
    hold(same(tensors(runs[0].server), tensors(runs[1].server)), words)
    hold(
        not torch.equal(model(runs[0]), model(runs[2])), "two runs of different seeds are the same"
    )


def seeds_apart(method: Method) -> None:
    """Several seeds at once are the runs one by one."""
    together = advance(start(method, small(seeds=(5, 6, 7))), 20)
    for number, seed in enumerate((5, 6, 7)):
        alone = advance(start(method, small(seeds=(seed,))), 20)
        near(
            model(together)[number],
            model(alone)[0],
            1e-11,
            "a seed alone and among others gives another model",
        )
        for name in ("down", "up"):
            counted = (getattr(loop.ledger, name) for loop in (together, alone))
            hold(
                (next(counted)[number] == next(counted)[0]).all(),
                f"a seed among others sends other bytes {name}",
            )


def order_of_replies(method: Method) -> None:
    """The order of replies has no effect."""
    loop = advance(start(method, small()), 6)
    (rnd, up), order = replied(loop), [2, 0, 1]
    turned = wire.gather([wire.pick(up, place) for place in order])
    one = tensors(method.server_step(loop.server, up, rnd))
    two = tensors(method.server_step(loop.server, turned, rnd.subset(np.array(order))))
    for key in one:
        near(
            one[key],
            two[key],
            1e-12,
            f"server_step gives another {key!r} for replies in another order",
        )


def codec(method: Method) -> None:
    """States and messages survive packing."""
    loop = advance(start(method, small()), 6)
    assert isinstance(loop.transport, Simulator)
    _, up = replied(loop)
    for found in (loop.server, loop.transport.clients(), up):
        hold(isinstance(found, Bundle), f"a {type(found).__name__} stands where a Bundle must be")
        again = wire.unpack(wire.pack(found))
        hold(
            same(tensors(again), tensors(found)),
            f"{found!r} is another one after packing and unpacking",
        )


def clients_apart(method: Method) -> None:
    """Clients apart do what the simulator does, and the ledger counts what was packed."""
    for dtype, tolerance, rounds in ((torch.float32, 2e-5, 15), (torch.float64, 1e-12, 40)):
        problem = small(dtype)
        transport = WireTransport(method, problem)
        together, apart = start(method, problem), start(method, problem, transport=transport)
        for _ in range(rounds):
            advance(together, 1)
            advance(apart, 1)
            wrong = "clients that work alone from packed messages give another model than a cohort in one process"
            near(model(apart), model(together), tolerance, wrong)
        same_bytes(apart, together, "the ledger counts other bytes {} for clients apart")
        for name, packed in (("down", transport.down_bytes), ("up", transport.up_bytes)):
            hold(
                sum(map(sum, packed)) == getattr(apart.ledger, name).sum(),
                f"the ledger's bytes {name} are not those that were packed",
            )


def resume(method: Method) -> None:
    """A resumed run gives the same bits."""
    problem = small(torch.float32)
    whole, first = advance(start(method, problem), 23), advance(start(method, problem), 9)
    second = start(method, problem)
    second.load({key: array.clone() for key, array in first.save().items()})
    advance(second, 14)
    hold(
        same(tensors(second.server), tensors(whole.server)),
        "the server's state differs after a resume",
    )
    hold(
        same(second.transport.save(), whole.transport.save()),
        "the clients' states differ after a resume",
    )
    same_bytes(second, whole, "the bytes {} differ after a resume")


def lost_replies(method: Method) -> None:
    """Rounds with lost replies, and without any, are tolerated."""
    problem = small(batch="full")
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    for t in range(30):
        transport.lost = [0, 1, 2] if t % 7 == 6 else [t % 3] if t % 2 else []
        before = model(loop)
        advance(loop, 1)
        hold(
            t % 7 != 6 or torch.equal(model(loop), before),
            "the model changes in a round without replies",
        )
    hold(
        torch.isfinite(model(loop)).all(), "the model is not finite after rounds with lost replies"
    )


def restorable_state(method: Method) -> None:
    """Client states follow from the replies (the sixth function, which a network needs)."""
    problem = small()
    loop = advance(start(method, problem), 6)
    rnd = loop._round()
    down, before = method.broadcast(loop.server, rnd), cohort_state(loop, rnd)
    after, up = method.client_step(before, down, problem.cohort(rnd), rnd)
    told = method.update_client_state(before, down, up, rnd)
    restored = wire.pack(told)
    for name, value in wire.pack(after).items():
        if name not in method.private:
            words = f"update_client_state gives another {name!r} than client_step; call it there"
            hold(torch.equal(restored[name], value), words)


def learns(method: Method) -> None:
    """It learns: on a small regression the loss falls towards its minimum."""
    problem = small(batch="full")
    lowest = problem.lowest()
    assert lowest is not None
    first, least = float(problem.evaluate(problem.x0)["loss"][0]), float(lowest[0])
    last = float(problem.evaluate(model(advance(start(method, problem), ROUNDS)))["loss"][0])
    hold(
        last - least < LEARNED * (first - least),  # not NaN either
        f"after {ROUNDS} rounds with lr = {method.lr} the loss is {last:.4g}, {first:.4g} at the start and {least:.4g} "
        "at its minimum; look for a wrong sign or factor, or give a better step by --set lr=…",
    )


LAWS = (
    value,
    bad_values,
    axes,
    first_state,
    inputs_kept,
    seeds_decide,
    seeds_apart,
    order_of_replies,
    codec,
    clients_apart,
    resume,
    lost_replies,
    restorable_state,
    learns,
)
