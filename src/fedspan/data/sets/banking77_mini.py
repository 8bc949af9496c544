"""Twenty training and five test questions of each of Banking77's first five intents, which come with fedspan."""

from __future__ import annotations

from fedspan.data.sets import DataSet
from fedspan.data.sets.banking77 import SET as BANKING77

SET = DataSet(
    name="banking77_mini",
    about="20 training and 5 test questions of each of the first 5 intents of Banking77",
    clients=BANKING77.clients,
    licence=BANKING77.licence,
    source=BANKING77.source,
    size=4_000,
    made=("text/banking77_mini_train.jsonl.gz", "text/banking77_mini_test.jsonl.gz"),
    install="pip install --no-deps fedspan",
)
