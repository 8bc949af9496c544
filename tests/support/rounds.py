"""The rounds of a run across machines, one dictionary each, from the run's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedspan.core.json_log import LONG, undamaged
from fedspan.engine.audit import numbers


def rounds_in(run_dir: Path) -> list[dict[str, Any]]:
    """Every round: who was sampled and accepted, and events in words; bytes where a line has one round."""
    found: list[dict[str, Any]] = []
    up = down = 0
    for line in undamaged(run_dir / "audit.jsonl", LONG):
        missing = line.get("not_counted", {})
        for t, text in enumerate(line.get("counted", ()), line.get("rounds", [0])[0]):
            accepted = numbers(text)
            told = [
                f"round {t}: client {one['clients']}: {one['text']}"
                for one in line.get("events", ())
                if one["round"] == t
            ]
            own = {"round": t, "accepted": accepted, "events": told}
            own["sampled"] = sorted([*accepted, *numbers(missing.get(str(t), ""))])
            own |= {name: line[name] for name in ("records_up", "records_down") if name in line}
            own |= {"payload_up": line["up_bytes"] - up, "payload_down": line["down_bytes"] - down}
            found.append(own)
        up, down = line.get("up_bytes", up), line.get("down_bytes", down)
    return found
