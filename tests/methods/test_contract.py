"""What every registered method must keep to: the laws of fedspan.checks. A new file in methods/ needs an entry in
support/methods.py, and each law is shown to fail where it should."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fedspan.checks import laws, network_laws
from fedspan.checks.bench import Law
from fedspan.core import registry
from fedspan.core.errors import SpecError
from support.loops import WireTransport, advance, small, start
from support.methods import METHODS, build, every_method

LAWS = laws.LAWS + network_laws.LAWS


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(("name", "settings"), every_method())
def test_a_law_holds(name: str, settings: dict[str, Any], law: Law) -> None:
    law(build(name, **settings))


def test_every_method_has_settings_here() -> None:
    assert set(METHODS) == set(registry.choices("method"))
    assert len(LAWS) == 21


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_has_a_docstring_and_names_bad_values(name: str, settings: dict[str, Any]) -> None:
    assert len(registry.summary(type(build(name, **settings)))) > 20
    for key, bad in (
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("local_steps", 0),
        ("server_lr", 0.0),  # `server.lr` on its axis
    ):
        with pytest.raises(SpecError, match=key.replace("server_", "server.")):
            build(name, **(settings | {key: bad}))


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_controls_stay_the_mean_of_the_clients_when_replies_are_lost(
    name: str, settings: dict[str, Any]
) -> None:
    """A client whose reply is lost has not taken part: nobody's state changes, and the sums stay right."""
    problem, method = small(batch="full"), build(name, **settings)
    transport = WireTransport(method, problem)
    loop = start(method, problem, transport=transport)
    if not hasattr(loop.server, "c") or settings.get("control") == "paper":
        return
    for t in range(30):
        transport.lost = [t % 3] if t % 2 else []
        advance(loop, 1)
    mean = torch.cat([replica.state.c for replica in transport.replicas], 1).mean(1, keepdim=True)
    torch.testing.assert_close(mean, loop.server.c, rtol=1e-10, atol=1e-12)


SCAFFOLD = registry.choices("method")["scaffold"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt(SCAFFOLD):  # type: ignore[misc, valid-type]
    """SCAFFOLD with one mistake."""

    mistake: str = ""

    def init_client(self, x0: Any, layout: Any) -> Any:
        first = super().init_client(x0, layout)
        return first.replace(c=first.c + x0) if self.mistake == "first_state" else first

    def client_step(self, client: Any, down: Any, f: Any, rnd: Any) -> Any:
        if self.mistake == "restorable_state":
            new, up = super().client_step(client, down, f, rnd)
            return new.replace(c=2 * new.c), up
        if self.mistake == "inputs_kept":
            client.c.add_(1.0)
        new, up = super().client_step(client, down, f, rnd)
        if self.mistake == "seeds_decide":
            return new, up.replace(v=up.v + torch.rand(()))
        if self.mistake == "axes":
            return new, up.replace(v=up.v[:, :1])
        if self.mistake == "clients_apart":
            return new, up.replace(v=up.v + rnd.ids.shape[1])
        return new, up

    def server_step(self, server: Any, up: Any, rnd: Any) -> Any:
        if self.mistake == "weights":
            rnd = dataclasses.replace(rnd, weights=None)
        if self.mistake == "follows":
            after = super().server_step(server, up, rnd)
            return after.replace(c=server.c + rnd.mean(up.v))  # without the share of the clients
        if self.mistake == "order_of_replies":
            up = up.replace(v=up.v[:, -1:].expand_as(up.v))
        if self.mistake == "server_lr":
            after = super().server_step(server, up, rnd)
            return after.replace(x=after.x + 0.1)
        if self.mistake == "resume":
            object.__setattr__(self, "hidden", getattr(self, "hidden", 0) + 1)
            after = super().server_step(server, up, rnd)
            return after.replace(x=server.x + self.hidden)  # type: ignore[attr-defined]
        return super().server_step(server, up, rnd)


MISTAKES = [
    "first_state", "inputs_kept", "seeds_decide", "axes", "clients_apart", "order_of_replies", "resume",
    "restorable_state", "server_lr", "weights", "follows",
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_law_is_broken_by_its_mistake(mistake: str) -> None:
    (law,) = (one for one in LAWS if one.__name__ == mistake)
    law(Spoilt(lr=0.02, local_steps=3))
    with pytest.raises(Exception, match=r".") as error:
        law(Spoilt(lr=0.02, local_steps=3, mistake=mistake))
    assert not isinstance(error.value, AttributeError)
