"""FedProx: federated averaging with a pull back to the server's model (Li et al. 2020, arXiv:1812.06127).

     1  send x to the clients in S
     2  y ← y − η_l (g_i(y) + μ (y − x))     K times, from y = x;  send y_i − x
     3  x ← x + mean_S (y_i − x)

A complete method in one file, with a box of its own. Run it as a script, or pass the file to the command line:

    python examples/new_method.py
    fedspan run examples/ssf.toml --plugin examples/new_method.py --run-dir out/prox \
        --set 'method={name="new_method", lr=0.01, local_steps=5, mu=0.1}'
"""

from __future__ import annotations

from dataclasses import dataclass

import fedspan
from fedspan import Bundle, Layout, Objective, Round, Vector
from fedspan.methods.base import LocalSteps


@fedspan.register
@dataclass(frozen=True, kw_only=True)
class FedProx(LocalSteps):
    mu: float = 0.1  # μ: strength of the pull back to the server's model
    plain_sum = True  # the server needs only the mean of the replies

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0)

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle()

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        return Bundle(x=server.x)  # 1

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        x = down.x
        y = self.descend(x, f.direction(plus=lambda y: self.mu * (y - x)), self.rate(rnd))  # 2
        return client, Bundle(dy=y - x)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return server.replace(x=server.x + rnd.mean(up.dy))  # 3


if __name__ == "__main__":
    base = {
        "rounds": 400,
        "eval_every": 100,
        "clients_per_round": 10,
        "task": {"name": "regression", "het": 0.5},
    }
    for method in ({"name": "fedavg"}, {"name": "new_method", "mu": 0.1}):
        result = fedspan.run(base | {"method": method | {"lr": 1e-2, "local_steps": 5}})
        print(f"{method['name']:12} {result}")
