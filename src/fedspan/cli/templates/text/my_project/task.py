"""Texts: the model, each client's data, and the test set.

The sample is made up: short messages to a shop, a hospital and a bank. Each client hears mostly of one of them.
"""

import json
import os
import random
import zlib
from pathlib import Path

import torch
from torch import nn

CLIENTS = 5
DATA = Path(os.environ.get("MY_PROJECT_DATA", Path(__file__).parents[1] / "data"))
CLASSES = ["bank", "hospital", "shop"]
WORDS, LENGTH = 2048, 32  # words are numbered by a hash; longer texts are cut
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    """Numbers of words in, scores of the classes out. A text is the mean of its words' vectors; 0 is no word."""
    return nn.Sequential(nn.EmbeddingBag(WORDS, 32, padding_idx=0), nn.Linear(32, len(CLASSES)))


def data(client: int) -> Data:
    """One client's examples: (texts as numbers of words, classes)."""
    return _read(DATA / f"client-{client}.jsonl") if DATA.is_dir() else _sample(client)


def test() -> Data:
    """What the server evaluates on."""
    return _read(DATA / "test.jsonl") if DATA.is_dir() else _sample(CLIENTS)


def tokens(text: str) -> list[int]:
    """A text as LENGTH numbers of words."""
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()][:LENGTH]
    return words + [0] * (LENGTH - len(words))


def _encoded(rows: list[tuple[str, str]]) -> Data:
    texts = torch.tensor([tokens(text) for text, _ in rows])
    return texts, torch.tensor([CLASSES.index(name) for _, name in rows])


def _read(file: Path) -> Data:
    """A file with one JSON object per line: text, label."""
    try:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
        return _encoded([(str(line["text"]), str(line["label"])) for line in lines])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} must have a text and a label of CLASSES in each line: {error!r}"
        ) from None


def _sample(part: int) -> Data:
    about = {
        "bank": ["card", "transfer", "account", "loan"],
        "hospital": ["doctor", "pain", "nurse", "results"],
        "shop": ["shoes", "refund", "parcel", "size"],
    }
    openings = ["please help with my", "question about the", "when is my", "problem with a"]
    draw, rows = random.Random(part), []  # noqa: S311
    for _ in range(120):
        name = CLASSES[part % 3] if part < CLIENTS and draw.random() < 0.8 else draw.choice(CLASSES)
        words = draw.choice(openings), draw.choice(about[name]), draw.choice(about[name])
        rows.append((" ".join(words), name))
    return _encoded(rows)
