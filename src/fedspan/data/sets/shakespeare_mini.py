"""The beginnings of eight roles of Shakespeare, which come with fedspan."""

from __future__ import annotations

from fedspan.data.sets import DataSet
from fedspan.data.sets.shakespeare import SET as SHAKESPEARE

SET = DataSet(
    name="shakespeare_mini",
    about="the first 2,000 characters or so of 8 roles of Hamlet and Macbeth",
    clients="8 roles",
    licence="public domain",
    source=SHAKESPEARE.source,
    size=8_000,
    made=("text/shakespeare_mini_roles.jsonl.gz",),
    install="pip install --no-deps fedspan",
)
