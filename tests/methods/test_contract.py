"""What every registered method must keep to. A new file in methods/ is covered once it has an entry in conftest."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from conftest import METHODS, WireTransport, advance, build, every_method, model, small, start
from fedspan.core import registry, wire
from fedspan.core.errors import SpecError
from fedspan.core.method import restorable
from fedspan.engine.simulator import Simulator

pytestmark = pytest.mark.parametrize(("name", "settings"), every_method())


def tensors(value: Any) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in wire.pack(value).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_is_a_frozen_value_with_a_docstring(name: str, settings: dict[str, Any]) -> None:
    method = build(name, **settings)
    assert method == build(name, **settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.lr = 1.0  # type: ignore[misc]
    assert len(registry.summary(type(method))) > 20
    assert registry.build("method", registry.describe(method)) == method


def test_a_clients_first_state_needs_no_numbers_of_x0(name: str, settings: dict[str, Any]) -> None:
    """A client on its own machine is sent x; its x0 is a shape."""
    problem, method = small(), build(name, **settings)
    x0 = torch.randn(problem.x0.shape, dtype=problem.x0.dtype, generator=torch.Generator().manual_seed(0))
    bare = torch.zeros(1, 1, 1, dtype=x0.dtype).expand(x0.shape)
    first, other = (method.init_client(x, problem.layout) for x in (x0, bare))
    assert same(tensors(first), tensors(other))
    assert all(array.is_contiguous() for array in wire.pack(other).values())


def test_inputs_are_not_changed(name: str, settings: dict[str, Any]) -> None:
    problem = small()
    method = build(name, **settings)
    loop = advance(start(method, problem), 6)
    rnd, server = loop._round(), loop.server
    before = tensors(server)
    down = method.broadcast(server, rnd)
    sim = loop.transport
    state = type(sim.clients())(
        **{f.name: getattr(sim.clients(), f.name)[:, rnd.ids[0]].clone() for f in dataclasses.fields(sim.clients())}
    )
    held = tensors(state)
    _, up = method.client_step(state, down, problem.cohort(rnd), rnd)
    sent = tensors(up)
    method.server_step(server, up, rnd)
    assert same(before, tensors(server))
    assert same(held, tensors(state))
    assert same(sent, tensors(up))


def test_same_seed_same_bits_and_another_seed_another_run(name: str, settings: dict[str, Any]) -> None:
    runs = [advance(start(build(name, **settings), small(seeds=(seed,), data_seed=1)), 12) for seed in (5, 5, 6)]
    assert same(tensors(runs[0].server), tensors(runs[1].server))
    assert not torch.equal(model(runs[0]), model(runs[2]))


def test_several_seeds_at_once_are_the_runs_one_by_one(name: str, settings: dict[str, Any]) -> None:
    together = advance(start(build(name, **settings), small(seeds=(5, 6, 7))), 20)
    for number, seed in enumerate((5, 6, 7)):
        alone = advance(start(build(name, **settings), small(seeds=(seed,))), 20)
        torch.testing.assert_close(model(together)[number], model(alone)[0], rtol=1e-11, atol=1e-13)
        assert (together.ledger.down[number] == alone.ledger.down[0]).all()
        assert (together.ledger.up[number] == alone.ledger.up[0]).all()


def test_the_order_of_replies_does_not_matter(name: str, settings: dict[str, Any]) -> None:
    problem = small()
    method = build(name, **settings)
    loop = advance(start(method, problem), 6)
    rnd = loop._round()
    up = loop.transport.exchange(rnd, method.broadcast(loop.server, rnd), None).up
    order = [2, 0, 1]
    turned = wire.gather([wire.pick(up, place) for place in order])
    one = tensors(method.server_step(loop.server, up, rnd))
    two = tensors(method.server_step(loop.server, turned, rnd.subset(np.array(order))))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-12, atol=1e-14)


def test_states_and_messages_survive_the_codec(name: str, settings: dict[str, Any]) -> None:
    problem = small()
    method = build(name, **settings)
    loop = advance(start(method, problem), 6)
    kinds = method.types()
    rnd = loop._round()
    up = loop.transport.exchange(rnd, method.broadcast(loop.server, rnd), None).up
    for kind, value in zip((kinds[0], kinds[3]), (loop.server, up), strict=True):
        assert type(value) is kind
        assert same(tensors(wire.unpack(kind, wire.pack(value))), tensors(value))
    state = loop.transport.clients()
    assert same(tensors(wire.unpack(kinds[1], wire.pack(state))), tensors(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_apart_do_what_the_simulator_does(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Real messages, a copy of x at each client, catch-up by missed changes: same model, and the ledger is right."""
    problem = small(dtype)
    method = build(name, **settings)
    together, apart = start(method, problem), start(method, problem, transport=WireTransport(method, problem))
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    for _ in range(40):
        advance(together, 1)
        ids = together._round().ids
        advance(apart, 1)
        torch.testing.assert_close(model(apart), model(together), rtol=tolerance, atol=tolerance * 1e-2)
    assert (apart.ledger.down == together.ledger.down).all()
    assert (apart.ledger.up == together.ledger.up).all()
    assert sum(map(sum, apart.transport.down_bytes)) == apart.ledger.down.sum()
    assert sum(map(sum, apart.transport.up_bytes)) == apart.ledger.up.sum()
    assert ids.shape == (1, 3)


def test_resuming_gives_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    problem = small(torch.float32)
    method = build(name, **settings)
    whole = advance(start(method, problem), 23)
    first = advance(start(method, problem), 9)
    second = start(method, problem)
    second.load({key: array.clone() for key, array in first.save().items()})
    advance(second, 14)
    assert same(tensors(second.server), tensors(whole.server))
    assert same(second.transport.save(), whole.transport.save())
    assert (second.ledger.up == whole.ledger.up).all()
    assert (second.ledger.down == whole.ledger.down).all()


def test_lost_replies_are_tolerated(name: str, settings: dict[str, Any]) -> None:
    """A client whose reply is lost has not taken part: nobody's state changes, and the sums stay right."""
    problem = small(batch="full")
    method = build(name, **settings)
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    for t in range(30):
        transport.lost = [t % 3] if t % 2 else []
        advance(loop, 1)
    assert torch.isfinite(model(loop)).all()
    if hasattr(loop.server, "c") and settings.get("control") != "paper":
        mean = torch.cat([replica.state.c for replica in transport.replicas], 1).mean(1, keepdim=True)
        torch.testing.assert_close(mean, loop.server.c, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "bad", [{"lr": 0.0}, {"lr": -1.0}, {"lr": float("nan")}, {"local_steps": 0}, {"server_lr": 0.0}]
)
def test_bad_values_are_named(name: str, settings: dict[str, Any], bad: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(bad))):
        build(name, **(settings | bad))


def test_every_method_has_settings_here(name: str, settings: dict[str, Any]) -> None:
    assert set(METHODS) == set(registry.choices("method"))
    assert isinstance(Simulator(build(name, **settings), small()).clients(), build(name, **settings).types()[1])


def test_a_client_state_is_what_its_replies_make_it(name: str, settings: dict[str, Any]) -> None:
    """What is not private follows from the replies; a method that does not say how is refused on a network."""
    problem, method = small(), build(name, **settings)
    memory = restorable(method)
    loop = advance(start(method, problem), 6)
    rnd = loop._round()
    down, before = method.broadcast(loop.server, rnd), loop.transport._take(rnd)
    after, up = method.client_step(before, down, problem.cohort(rnd), rnd)
    if memory is None:
        assert not dataclasses.fields(method.types()[1])
        return
    told = memory.update_client_state(before, down, up, rnd)
    for field in dataclasses.fields(after):
        if field.name not in memory.private:
            assert torch.equal(getattr(told, field.name), getattr(after, field.name))
