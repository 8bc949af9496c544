"""Images: the model, each client's data, and the test set.

The sample is scikit-learn's digits: 1,797 gray images of 8 × 8. Most of a client's images are of two
digits.
"""

import os
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

CLIENTS = 5
DATA = Path(os.environ.get("MY_PROJECT_DATA", Path(__file__).parents[1] / "data"))
CLASSES = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]  # names of the sub-directories
SIZE = 8  # images are made this many pixels wide and high
Data = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    """Gray images in, scores of the classes out."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, len(CLASSES)),
    )  # fmt: skip


def data(client: int) -> Data:
    """One client's examples: (images, classes)."""
    return _read(DATA / f"client-{client}") if DATA.is_dir() else _sample(client)


def test() -> Data:
    """What the server evaluates on."""
    return _read(DATA / "test") if DATA.is_dir() else _sample(CLIENTS)


def _read(place: Path) -> Data:
    """A directory with a sub-directory of images per class."""
    from PIL import Image

    images, targets = [], []
    for number, name in enumerate(CLASSES):
        for file in sorted((place / name).glob("*.*")):
            with Image.open(file) as image:
                images.append(np.asarray(image.convert("L").resize((SIZE, SIZE)), np.float32) / 255)
            targets.append(number)
    if not images:
        raise FileNotFoundError(
            f"{place} has no images; it needs a directory per class: {', '.join(CLASSES)}"
        )
    return torch.tensor(np.stack(images)).unsqueeze(1), torch.tensor(targets)


def _sample(part: int) -> Data:
    found = load_digits()
    few, all_digits = np.argsort(found.target[:1000] // 2, kind="stable"), np.arange(1000, 1500)
    parts = [
        np.concatenate(pair)
        for pair in zip(*(np.array_split(a, CLIENTS) for a in (few, all_digits)), strict=True)
    ]
    rows = [*parts, np.arange(1500, 1797)][part]
    images = torch.tensor(found.images[rows] / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(found.target[rows])
