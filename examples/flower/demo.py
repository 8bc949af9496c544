"""One SuperLink, three SuperNodes, SSF on handwritten digits: starts everything here, shows progress, ends everything.

python examples/flower/demo.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from cluster import Cluster


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        print("starting a SuperLink and three SuperNodes on 127.0.0.1 …", flush=True)
        with Cluster(folder, nodes=3) as cluster:
            run = cluster.run(run_dir=str(folder / "out"))
            print(f"run {run} submitted", flush=True)
            seen, history, status = 1, folder / "out" / "history.jsonl", ""
            while not status.startswith("finished"):
                time.sleep(1)
                found = cluster.status(run)
                status = str(found["status"])
                lines = history.read_text("utf-8").splitlines() if history.exists() else []
                for line in lines[seen:]:
                    row = json.loads(line)
                    sizes = (
                        f"{row['up_bytes'] / 1e3:.0f} kB up, {row['down_bytes'] / 1e3:.0f} kB down"
                    )
                    print(
                        f"round {row['round']:2}  accuracy {row['accuracy']:.3f}  {sizes}",
                        flush=True,
                    )
                seen = max(seen, len(lines))
            print(status)
            log = (folder / "out" / "audit.jsonl").read_text("utf-8").splitlines()
            lines = [json.loads(line) for line in log if "up_bytes" in line]
            for way, counter in (("up", "inbound-bytes"), ("down", "outbound-bytes")):
                payload = lines[-1][f"{way}_bytes"]
                records = sum(line.get(f"records_{way}", 0) for line in lines)
                print(f"{way}: {payload:,} bytes of numbers, {records:,} with their records,")
                print(f"    {found['network-traffic'][counter]:,} as the SuperLink counts")
        print("everything is stopped")


if __name__ == "__main__":
    main()
