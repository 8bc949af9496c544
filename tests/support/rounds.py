"""The rounds of a run across machines, one dictionary each, from the run's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedspan.core.json_log import read_lines
from fedspan.engine.audit import COUNTED, MISSED, numbers


def rounds_in(run_dir: Path) -> list[dict[str, Any]]:
    """Every round: who was sampled and accepted, and events in words; bytes where a line has one round."""
    found: list[dict[str, Any]] = []
    up = down = 0
    for line in read_lines(run_dir / "audit.jsonl")[0]:
        events = line.get("events", ())
        for t, kind, text, _ in events:
            if kind != COUNTED:
                continue
            there = [numbers(who) for at, what, who, _ in events if (at, what) == (t, MISSED)]
            own: dict[str, Any] = {"round": t, "accepted": numbers(text)}
            own["sampled"] = sorted(sum(there, numbers(text)))
            own["events"] = [
                f"round {t}: client {who}: {told}"
                for at, _, who, told in events
                if at == t and told
            ]
            own |= {"payload_up": line["up_bytes"] - up, "payload_down": line["down_bytes"] - down}
            found.append(own)
        up, down = line.get("up_bytes", up), line.get("down_bytes", down)
    return found
