"""FedProx: federated averaging with a pull back to the server's model (Li et al. 2020, arXiv:1812.06127).

     1  send x to the clients in S
     2  y ← y − η_l (g_i(y) + μ (y − x))     K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

A whole method in one file. Run it by itself, or name the file to the command line:

    python examples/new_method.py
    fedspan run examples/ssf.toml --plugin examples/new_method.py --out out/prox \
        --set 'method={name="new_method", lr=0.01, local_steps=5, mu=0.1}'
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import fedspan
from fedspan import Layout, Objective, Round, Vector
from fedspan.methods.base import LocalSteps


@dataclass(frozen=True, eq=False)
class ServerState:
    x: Vector


@dataclass(frozen=True, eq=False)
class ClientState:
    pass


@dataclass(frozen=True, eq=False)
class Down:
    x: Vector


@dataclass(frozen=True, eq=False)
class Up:
    dy: Vector


@fedspan.register
@dataclass(frozen=True, kw_only=True)
class FedProx(LocalSteps[ServerState, ClientState, Down, Up]):
    mu: float = 0.1  # μ

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState()

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(server.x)  # 1

    def client_step(self, client: ClientState, down: Down, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        x = down.x
        y = self.descend(x, lambda y: f.grad(y) + self.mu * (y - x), self.rate(rnd.t))  # 2
        return client, Up(y - x)

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        return ServerState(server.x + self.server_lr * rnd.mean(up.dy))  # 3


if __name__ == "__main__":
    base = {
        "rounds": 400,
        "task": {"name": "regression", "het": 0.5},
        "participation": {"clients_per_round": 10},
    }
    for method in ({"name": "fedavg"}, {"name": "new_method", "mu": 0.1}):
        spec = fedspan.Spec.from_table(base | {"method": method | {"lr": 1e-2, "local_steps": 5}})
        with tempfile.TemporaryDirectory() as folder:
            last = fedspan.run(spec, Path(folder)).rows[0][-1]
        print(f"{method['name']:12} rel_err {last['rel_err']:.2e} after {last['up_bytes'] / 1e6:.1f} MB up")
