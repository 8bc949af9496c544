"""Small networks: linear and MLP for any input; a LeNet-like CNN and the CIFAR ResNets (He et al. 2016) for images."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedspan.core.errors import SpecError
from fedspan.core.seeds import torch_generator

Norm = Literal["batch", "group", "none"]


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...] = (128,)) -> nn.Sequential:
    """Fully connected layers with ReLU; a linear model where nothing is hidden."""
    sizes = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Two convolutions with pooling and one hidden layer, after LeNet."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut without parameters (option A: strided, zero-padded)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """F(x) + x."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        before = self.extra // 2
        short = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(short, (0, 0, 0, 0, before, self.extra - before)))


class ResNet(nn.Module):
    """The 6n + 2 layer networks for 32 × 32 images: three stages of n blocks, 16, 32 and 64 channels wide."""

    def __init__(self, depth: int, classes: int, channels: int, kind: Norm) -> None:
        super().__init__()
        self.depth, self.classes, self.channels, self.kind = depth, classes, channels, kind
        if (depth - 2) % 6:
            raise SpecError(f"a CIFAR ResNet has 6n + 2 layers (8, 20, 56, 110), got {depth}")
        norm: Callable[[int], nn.Module] = nn.Identity
        if kind == "batch":
            norm = nn.BatchNorm2d
        elif kind == "group":
            norm = lambda channels: nn.GroupNorm(min(8, channels), channels)  # noqa: E731
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.norm = norm(16)
        self.blocks = nn.Sequential()
        inputs = 16
        for outputs in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                stride = 1 if inputs == outputs else 2
                self.blocks.append(ResidualBlock(inputs, outputs, stride, norm))
                inputs = outputs
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


def build(
    name: str, shape: tuple[int, ...], classes: int, norm: Norm = "group", seed: int = 0
) -> nn.Module:
    """A model by name, such as `mlp`, `cnn` or `resnet20`, with weights decided by the seed."""
    found = re.fullmatch(r"resnet(\d+)", name)
    if len(shape) != 3 and (name == "cnn" or found):
        raise SpecError(
            f"`model` {name!r} needs images, but an example has the shape {shape}; use 'mlp' or 'linear'"
        )
    with torch_generator(seed):
        if found:
            return ResNet(int(found[1]), classes, shape[0], norm)
        if name == "cnn":
            return cnn(shape, classes)
        if name in ("mlp", "linear"):
            return mlp(shape, classes, (128,) if name == "mlp" else ())
    raise SpecError(
        f"unknown model {name!r}; there are linear, mlp, cnn, resnet8, resnet20, resnet56, resnet110, and your own "
        "as module:function"
    )
