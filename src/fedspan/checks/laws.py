"""What every method must keep to in one process, one function per law."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fedspan.checks.bench import (
    ROUNDS,
    WireTransport,
    advance,
    cohort_state,
    hold,
    model,
    near,
    random,
    same,
    same_bytes,
    small,
    start,
    tensors,
    worked,
)
from fedspan.core import tables, wire
from fedspan.core.bundle import Bundle
from fedspan.core.errors import FedspanError, FormError, SpecError
from fedspan.core.method import Method
from fedspan.engine.simulator import Simulator
from fedspan.methods.box import Box

LEARNED = 0.95  # what may be left of the way to the minimum: FedAdagrad's steps are small


def value(method: Method) -> None:
    """It is a frozen value, which its table in a spec makes again."""
    again = tables.build("method", tables.describe(method))
    hold(again == method, "the method built from its own table is another one")
    try:
        method.lr = 1.0
    except dataclasses.FrozenInstanceError:
        return
    raise FedspanError("its fields can be changed; use @dataclass(frozen=True, kw_only=True)")


def bad_values(method: Method) -> None:
    """Values that make no sense are refused by name."""
    for name, bad in (("lr", 0.0), ("lr", float("nan")), ("local_steps", 0)):
        if not hasattr(method, name):
            continue
        said = None
        try:
            dataclasses.replace(method, **{name: bad})  # type: ignore[type-var]
        except SpecError as error:
            said = str(error)
        hold(
            said,
            f"{name} = {bad} is accepted; call super().__post_init__() in yours, or check it there",
        )
        hold(name in str(said), f"{name} = {bad} is refused without naming {name}: {said}")


def axes(method: Method) -> None:
    """States and replies have the axes (runs, clients, size)."""
    problem = small(seeds=(5, 6))
    loop, first = start(method, problem), method.init_client(problem.x0, problem.layout)
    with torch.inference_mode():
        _, _, _, later, _ = worked(loop)
    names = [", ".join(vars(state)) or "none" for state in (later, first)]
    hold(
        vars(later).keys() == vars(first).keys(),
        f"client_step returns a state with {names[0]}, init_client with {names[1]}",
        FormError,
    )
    *_, up = worked(advance(loop, 3))  # the loop checks the shape of x
    for where, bundle, axes in (
        ("init_client", first, (2, 1)),
        ("client_step's reply", up, (2, 3)),
    ):
        for name, array in wire.pack(bundle).items():
            hold(
                array.shape[:2] == axes,
                f"{name!r} of {where} is {tuple(array.shape)}, and must begin with {axes}",
                FormError,
            )


def first_state(method: Method) -> None:
    """A client's first state depends on the shape of x0 only."""
    problem = small()
    bare = torch.zeros(1, 1, 1, dtype=torch.float64).expand(problem.x0.shape)
    x0 = random(*bare.shape)
    first, other = (method.init_client(x, problem.layout) for x in (x0, bare))
    hold(
        same(tensors(first), tensors(other)),
        "init_client uses the values of x0, which a client on its own machine does not have",
    )
    for name, array in wire.pack(other).items():
        hold(
            array.is_contiguous(),
            f"{name!r} of init_client is a view of x0; make it with x0.new_zeros or clone it",
        )


def inputs_kept(method: Method) -> None:
    """No function changes its arguments."""
    loop = advance(start(method, small()), 6)
    rnd, server = loop._round(), loop.server
    kept: dict[str, tuple[Any, wire.Arrays]] = {}

    def check(function: str, name: str, result: Any) -> None:
        for what, (found, before) in kept.items():
            hold(same(before, tensors(found)), f"{function} changes {what} in place")
        kept[name] = result, tensors(result)

    with torch.inference_mode():  # in which a change in place is possible
        check("", "the server's state", server)
        down = method.broadcast(server, rnd)
        state = cohort_state(loop, rnd)
        check("broadcast", "the clients' state", state)
        _, up = method.client_step(state, down, loop.problem.cohort(rnd), rnd)
        check("client_step", "the replies", up)
        check("server_step", "its result", method.server_step(server, up, rnd))


def seeds_decide(method: Method) -> None:
    """The same seed gives the same bits, and another seed another run."""
    one, two, other = (
        advance(start(method, small(seeds=(seed,), data_seed=1)), 12) for seed in (5, 5, 6)
    )
    words = (
        "two runs of one seed differ; draw all random numbers from rnd.seeds by fedspan.core.seeds"
    )
    hold(same(tensors(one.server), tensors(two.server)), words)
    hold(not torch.equal(model(one), model(other)), "two runs of different seeds are the same")


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
        runs = slice(number, number + 1)
        same_bytes(alone, together, "a seed among others sends other bytes {}", runs)


def order_of_replies(method: Method) -> None:
    """The order of replies has no effect."""
    loop, order = advance(start(method, small()), 6), [2, 0, 1]
    rnd, *_, up = worked(loop)
    turned = wire.gather([wire.pick(up, place) for place in order])
    one = wire.pack(method.server_step(loop.server, up, rnd))
    two = wire.pack(method.server_step(loop.server, turned, rnd.subset(np.array(order))))
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
    *_, state, up = worked(loop)
    for found in (loop.server, state, up):
        hold(isinstance(found, Bundle), f"a {type(found).__name__} stands where a Bundle must be")
        again = wire.unpack(wire.pack(found))
        hold(
            same(tensors(again), tensors(found)),
            f"{found!r} is another one after packing and unpacking",
        )


def clients_apart(method: Method) -> None:
    """Clients apart do what the simulator does, and the ledger counts what was packed."""
    wrong = "clients that work alone from packed messages give another model than a cohort in one process"
    cases: tuple[tuple[Any, float, int], ...] = (("float32", 2e-5, 15), ("float64", 1e-12, 40))
    for dtype, tolerance, rounds in cases:
        problem = small(dtype)
        transport = WireTransport(method, problem)
        together, apart = start(method, problem), start(method, problem, transport=transport)
        for _ in range(rounds):
            near(model(advance(apart, 1)), model(advance(together, 1)), tolerance, wrong)
        same_bytes(apart, together, "the ledger counts other bytes {} for clients apart")
        for name in ("down", "up"):
            packed = sum(map(sum, getattr(transport, f"{name}_bytes")))
            hold(
                packed == getattr(apart.ledger, name).sum(),
                f"the ledger's bytes {name} are not those that were packed",
            )


def resume(method: Method) -> None:
    """A resumed run gives the same bits."""
    problem = small("float32")
    whole, first = advance(start(method, problem), 23), advance(start(method, problem), 9)
    second = start(method, problem)
    second.load({key: array.clone() for key, array in first.save().items()})
    advance(second, 14)
    for whose, found, expected in (
        ("server's state differs", tensors(second.server), tensors(whole.server)),
        ("clients' states differ", second.transport.save(), whole.transport.save()),
    ):
        hold(same(found, expected), f"the {whose} after a resume")
    same_bytes(second, whole, "the bytes {} differ after a resume")


def lost_replies(method: Method) -> None:
    """Rounds with lost replies, and without any, are tolerated."""
    problem = small(batch="full")
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    for t in range(30):
        transport.lost = [0, 1, 2] if t % 7 == 6 else [t % 3] if t % 2 else []
        before = model(loop)
        after = model(advance(loop, 1))
        hold(
            len(transport.lost) < 3 or torch.equal(after, before),
            "the model changes in a round without replies",
        )
    hold(
        torch.isfinite(model(loop)).all(), "the model is not finite after rounds with lost replies"
    )


def restorable_state(method: Method) -> None:
    """Client states follow from the replies (the sixth function, which a network needs)."""
    rnd, down, before, after, up = worked(advance(start(method, small()), 6))
    restored = wire.pack(method.update_client_state(before, down, up, rnd))
    for name, array in wire.pack(after).items():
        if name not in method.private:
            hold(
                torch.equal(restored[name], array),
                f"part {name!r} is not renewed in `after`; compute it there or name it in `private`"
                if isinstance(method, Box)
                else f"update_client_state gives another {name!r} than client_step; call it there",
            )


def learns(method: Method) -> None:
    """It learns: on a small regression the loss falls towards its minimum."""
    problem = small(batch="full")
    lowest = problem.lowest()
    assert lowest is not None
    x = model(advance(start(method, problem), ROUNDS))
    first, last = (float(problem.evaluate(at)["loss"][0]) for at in (problem.x0, x))
    least = float(lowest[0])
    steps, remedy = f"lr = {method.lr}", "a better step by --set lr=…"
    if isinstance(method, Box):
        steps = f"method.lr = {method.lr} and server.lr = {method.server.lr}"
        remedy = "better steps by --set method.lr=… and --set server.lr=…"
    hold(
        last - least < LEARNED * (first - least),  # not NaN either
        f"after {ROUNDS} rounds with {steps} the loss is {last:.4g}, {first:.4g} at the start and {least:.4g} "
        f"at its minimum; look for a wrong sign or factor, or give {remedy}",
    )


def server_lr(method: Method) -> None:
    """Half of the server's step size η_g halves the first move."""
    if not isinstance(method, Box):  # FedIT's model is a product of what the server moves
        return
    moves = []
    for lr in (method.server.lr, method.server.lr / 2):
        server = dataclasses.replace(method.server, lr=lr)
        loop = start(dataclasses.replace(method, server=server), small())
        before = model(loop).clone()
        moves.append(model(advance(loop, 1)) - before)
    near(moves[1], moves[0] / 2, 1e-9, "half of `lr` does not halve it; multiply by self.lr")


def weights(method: Method) -> None:
    """A client of weight 0 does not move the model."""
    if not isinstance(method, Box):
        return
    loop = advance(start(method, small()), 6)
    rnd, *_, up = worked(loop)
    shares = torch.tensor([0.3, 0.2, 0.0], dtype=torch.float64).view(1, 3, 1)
    rnd = dataclasses.replace(rnd, weights=shares)
    other = wire.gather([wire.pick(up, place) for place in (0, 1, 0)])
    one, two = (method.server_step(loop.server, reply, rnd).x for reply in (up, other))
    near(
        one, two, 1e-9, "it does; take means by rnd.mean(v), which counts clients by their weights"
    )


def follows(method: Method) -> None:
    """A server that follows the clients' states has their weighted mean when some clients take part."""
    if not (isinstance(method, Box) and method.follows_states):
        return
    problem = small()
    problem.weights = np.arange(1.0, 8.0) / 28
    loop = advance(start(method, problem), 12)
    assert isinstance(loop.transport, Simulator)
    clients, shares = loop.transport.clients(), torch.from_numpy(problem.weights).view(1, -1, 1)
    for name in vars(clients).keys() & vars(loop.server).keys():
        near(
            getattr(loop.server, name),
            (shares * getattr(clients, name)).sum(1, keepdim=True),
            1e-9,
            f"{name!r} of the server is not the mean of the clients'; add rnd.share times the mean of the changes",
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
    server_lr,
    weights,
    follows,
)
