"""A proposal of settings for a budget: the link that it was made for, and every setting that was tried."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.extras import data_frame
from fedspan.core.method import Method
from fedspan.core.spec import Spec
from fedspan.study.budget import UNITS, sized


@dataclass(frozen=True)
class Link:
    """How fast a client is connected.

    Args:
        up: Bytes per second that a client can send.
        down: Bytes per second that it can receive.
        latency: Seconds per round besides the transfer.
        step: Seconds of a local step on the client's device.
    """

    up: float = math.inf  # bytes per second that a client sends
    down: float = math.inf  # bytes per second that it receives
    latency: float = 0.0  # seconds per round besides the transfer
    step: float = 0.0  # seconds of a local step

    @staticmethod
    def parse(given: str | Link | None) -> Link:
        """From a text such as `up=1MB,down=4MB,latency=0.1,step=0.02`, all per second or in seconds."""
        if given is None or isinstance(given, Link):
            return given or Link()
        if not isinstance(given, str):
            raise SpecError(f"`link` must be a text such as 'up=1MB,down=4MB', got {shown(given)}")
        found: dict[str, float] = {}
        for text in given.split(","):
            key, sign, amount = (part.strip() for part in text.partition("="))
            one_of("link", key, [field.name for field in dataclasses.fields(Link)])
            unit = next((u for u in sorted(UNITS, key=len, reverse=True) if amount.endswith(u)), "")
            try:
                found[key] = float(amount.removesuffix(unit)) * UNITS.get(unit, 1.0)
            except ValueError:
                found[key] = -1.0
            if (
                not sign
                or not found[key] >= 0
                or (key in ("up", "down")) != bool(unit and found[key])
            ):
                raise SpecError(
                    f"`link` is written up=1MB,down=4MB,latency=0.1,step=0.02, got {shown(given)}"
                )
        return Link(**found)

    def seconds(self, up: float, down: float, local_steps: int) -> float:
        """Of a round in which a client sends and receives so many bytes."""
        return self.latency + self.step * local_steps + up / self.up + down / self.down


HEADS = {"local_steps": "steps"}  # of settings that have a long name


@dataclass
class Candidate:
    """One setting: what it costs, and what was seen of it."""

    spec: Spec  # with the rounds that the budget allows
    point: dict[str, Any]  # rank, bits, local_steps
    up_round: float  # bytes of one client
    down_round: float
    seconds: float  # of all rounds, over the link
    lr: float = math.nan
    share: float = 0.0  # of the budget that it has spent in the race
    value: float = math.inf  # the measure then
    why: str = ""  # why it is out, or chosen

    def row(self, metric: str) -> dict[str, Any]:
        """Plain values."""
        costs = {
            "up_bytes_round": self.up_round,
            "down_bytes_round": self.down_round,
            "seconds": self.seconds,
        }
        seen = {
            "lr": self.lr,
            "rounds": self.spec.rounds,
            "share": self.share,
            metric: self.value,
            "why": self.why,
        }
        return self.point | seen | costs

    @property
    def name(self) -> str:
        """Such as: rank 0.1, 8 bits, 10 local steps."""
        words = {"rank": "rank {}", "bits": "{} bits", "local_steps": "{} local steps"}
        return ", ".join(
            words.get(key, key + " {}").format(value) for key, value in self.point.items()
        )


@dataclass(frozen=True)
class Proposal:
    """What `fedspan.tune` proposes for a budget.

    Attributes:
        method: The method with the proposed settings and learning rate.
        rounds: The rounds that the budget allows with it.
        metric: What the settings were compared by.
        tried: All settings, the chosen one first.
        spent: Rounds of all searches and races together.
        budget: The budget in words.
    """

    method: Method
    rounds: int
    metric: str
    tried: tuple[Candidate, ...]
    spent: int
    budget: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per setting that was tried, the chosen one first; `why` says what became of it."""
        return [one.row(self.metric) for one in self.tried]

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def summary(self) -> str:
        """The proposal and its reason in two lines."""
        best = self.tried[0]
        time = f", {best.seconds:.3g} s over the link" if best.seconds else ""
        return (
            f"{best.name}, lr {best.lr:.3g}: {self.rounds} rounds within {self.budget}{time}\n"
            f"{best.why} ({len(self.tried)} settings, {self.spent} rounds of trials)"
        )

    def __repr__(self) -> str:
        return f"Proposal({self.method})\n{self.summary()}"


NOTE = "up, down: bytes of one client per round; tried: the share of the budget after which it was compared"


def told(found: Proposal) -> tuple[list[str], list[list[str]]]:
    """Headings and texts of a table of the settings that were tried; seconds are shown where there is a link."""
    keys = list(found.tried[0].point)
    timed = any(one.seconds for one in found.tried)
    heads = [
        *(HEADS.get(key, key) for key in keys),
        "lr",
        "rounds",
        "up",
        "down",
        *["seconds"] * timed,
    ]
    rows = []
    for one in found.tried:
        settings = [str(one.point[key]) for key in keys]
        lr, value = (
            f"{number:.3g}" if math.isfinite(number) else "" for number in (one.lr, one.value)
        )
        costs = [sized(one.up_round), sized(one.down_round), *[f"{one.seconds:.3g}"] * timed]
        end = (
            [f"{one.share:.1%}".replace(".0%", "%"), value] if one.share else ["", "too few rounds"]
        )
        rows.append([*settings, lr, str(one.spec.rounds), *costs, *end])
    return [*heads, "tried", found.metric.replace("_", " ")], rows
