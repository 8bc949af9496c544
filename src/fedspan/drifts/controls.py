"""Control variates: each client's own direction is replaced by the common one (SCAFFOLD, arXiv:1910.06378).

     1  u ← P c − P c_i                         added to local gradients
     2  a_i ← P ḡ_i − P c_i                     sent; ḡ_i is the mean gradient of the local steps, without u
     3  c_i ← c_i + Pᵀ a_i                      outside the subspace c_i stays
     4  x moves along P c + mean_S a_i
     5  c ← c + (|S|/N) Pᵀ mean_S a_i           keeps c = mean_i c_i over ALL clients
    5'  c ← c + Pᵀ(mean_S P ḡ_i − P c)          rule = "paper"

Clients compute a_i from the mean of g_i + u and the copy of P c that they were sent, so an error of that copy cancels.
After plain steps that mean follows from their end point; after others z is sent too, and x moves along it.

Line 5' reads the SSF paper's box literally under client sampling. It breaks c = mean c_i and needs P ḡ_i on the uplink
as well. A robust aggregator needs it: whatever the aggregator leaves out of a round, line 5' forgets and line 5 keeps.
With full participation and the mean both are the same. Clients may have weights w_i; then c = Σ w_i c_i.

With correction = "never" local steps leave out u, and with "tested" the server decides it by a test (`_test`). Lines 2
to 5 stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from fedspan import Compressor, Drift, Round, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.errors import one_of
from fedspan.core.linear_map import LinearMap
from fedspan.core.objective import Direction, Plus
from fedspan.core.reply import Ranges
from fedspan.drifts import _test


@register
@dataclass(frozen=True)
class Controls(Drift):
    """Drift correction by control variates."""

    correction: Literal["always", "tested", "never"] = "always"  # whether clients correct
    rule: Literal["exact", "paper"] = "exact"  # how the server renews c: line 5 or line 5'

    in_gradients = True
    controls = ("c",)

    def __post_init__(self) -> None:
        one_of("correction", self.correction, ("always", "tested", "never"))
        one_of("rule", self.rule, ("exact", "paper"))

    @property
    def statistics(self) -> Mapping[str, Ranges]:  # type: ignore[override]
        """n_i and d_i, by which the correction is tested."""
        return {"stat_test": _test.RANGES} if self.correction == "tested" else {}

    @property
    def follows_states(self) -> bool:
        """Line 5 does. Line 5' puts the mean gradient of the round in the place of P c."""
        return self.rule == "exact"

    def without_tests(self) -> Self:
        """All clients correct: two numbers have no noise under privacy, and trials end before the first test."""
        return replace(self, correction="always") if self.correction == "tested" else self

    def init_server(self, x0: Vector) -> Parts:
        test = {"test": _test.no_tests(x0)} if self.correction == "tested" else {}
        return {"c": torch.zeros_like(x0), **test}

    def init_client(self, x0: Vector) -> Parts:
        return {"c": torch.zeros_like(x0)}

    def down(self, server: Bundle, P: LinearMap, code: Compressor | None, rnd: Round) -> Parts:
        Pc: Any = P @ server.c
        if code is not None:
            Pc = code.compress(Pc, code.server_keys(rnd, "control"))
        switch = _test.switch(server.test) if self.correction == "tested" else None
        return {"Pc": Pc, "switch": switch}

    def begin(
        self, client: Bundle, down: Bundle, P: LinearMap, code: Compressor | None, rnd: Round
    ) -> tuple[Vector, Vector | int, Vector]:
        Pc = down.Pc
        if code is not None:
            Pc = code.decompress(Pc, P.rank, code.server_keys(rnd, "control"), rnd.layout.dtype)
        b: Vector | int = int(self.correction == "always")
        if self.correction == "tested":
            b = _test.corrects(down.switch, rnd)
        return Pc - P @ client.c, b, Pc  # 1

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        u, b, _ = work
        if isinstance(b, int):
            return u if b else None
        plus: Vector = b * u
        return plus

    def watch(self, work: Any, direction: Direction) -> Direction:
        u, b, _ = work
        off = self.correction != "tested" or (isinstance(b, int) and not b)
        return direction if off else _test.First.of(direction, u)

    def reply(
        self, work: Any, came: Vector, watched: Direction, client: Bundle, P: LinearMap, steps: int
    ) -> Parts:
        u, b, Pc = work
        a = came - Pc  # 2
        if not isinstance(b, int):
            a = a + (1 - b) * u
        elif not b:
            a = a + u
        test = _test.measured(u, Pc, b, a, watched, steps) if self.correction == "tested" else None
        Pg = a + P @ client.c if self.rule == "paper" else None
        return {"v": a, "Pg": Pg, "stat_test": test}

    def after(self, client: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Parts:
        return {"c": P.T.plus(v, client.c, rnd.overwrite)}  # 3

    def direction(self, server: Bundle, v: Vector, P: LinearMap) -> Vector:
        along: Vector = P @ server.c + v  # 4
        return along

    def server(self, server: Bundle, mean: Vector, up: Bundle, P: LinearMap, rnd: Round) -> Parts:
        if self.rule == "paper":
            change = rnd.mean(up.Pg) - P @ server.c  # 5'
        else:
            change = rnd.share * mean  # 5
        parts = {"c": P.T.plus(change, server.c, rnd.overwrite)}
        if self.correction == "tested" and up.get("stat_test") is not None:
            told = _test.told(server.test, up.stat_test, rnd)
            parts["test"] = _test.judged(server.test, told, P.rank / rnd.layout.size, rnd)
        return parts

    def measures(self, server: Bundle) -> Mapping[str, Any]:
        return _test.measures(server) if self.correction == "tested" else {}
