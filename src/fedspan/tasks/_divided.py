"""Tasks whose examples are divided among clients by a partition: data sets by name, or your own files."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedspan.core.config import Settings
from fedspan.core.errors import SpecError, at_least
from fedspan.core.partition import Partition
from fedspan.core.task import Holdings
from fedspan.data import columns
from fedspan.data.datasets import Split, Splits, first_examples
from fedspan.data.partitions.natural import Natural
from fedspan.data.schema import Schema, blanked, describe, sums, tally, texts
from fedspan.data.table_data import TableData, is_pattern, places_of
from fedspan.data.user_tables import Division, Kind, OwnData
from fedspan.nn.batches import Clients
from fedspan.nn.client_data import narrowed
from fedspan.nn.models import Norm, build
from fedspan.tasks._module import Material, ModuleTask, model_from


@dataclass(frozen=True, kw_only=True)
class DividedTask(ModuleTask):
    """Clients with examples of a data set, evaluated on one test set."""

    data: Any
    model: str
    partition: Partition = field(default_factory=Natural)  # who has which examples
    data_seed: int | None = None  # of the partition and the test share; None: the run's seed
    kind: ClassVar[Kind]  # of the targets, or texts

    def __post_init__(self) -> None:
        for name in ("classes", "per_class", "test_per_class"):
            if getattr(self, name, None) is not None:
                at_least(name, getattr(self, name), 1)
                if isinstance(self.data, OwnData):
                    raise SpecError(f"`{name}` is for data sets by name; leave it out")

    def splits(self) -> Splits:
        """The training and the test examples of a data set by name."""
        raise NotImplementedError

    def division(self, seed: int) -> Division:
        """The examples that are used, and who has which."""
        seed = self._seed(seed)
        if isinstance(self.data, OwnData):
            return self.data.divide(self.kind, self.partition, seed)
        settings: Any = self
        amounts = (settings.per_class, settings.test_per_class)
        train, test = (
            _first(split, settings.classes, amount)
            for split, amount in zip(self.splits(), amounts, strict=True)
        )
        parts = self.partition.split(train.y, seed, train.owner)
        names, classes = ([*map(str, range(n))] for n in (len(parts), int(train.y.max()) + 1))
        return Division(train, test, parts, names, classes)

    @property
    def tabular(self) -> bool:
        """Whether the clients have tables, whose columns have a schema."""
        return self.kind != "texts" and isinstance(self.data, OwnData) and self.data.tabular

    def tables(self, seed: int, dtype: torch.dtype) -> TableData:
        """The clients' tables as features."""
        found: TableData = self.data.tables(self.kind, self.partition, self._seed(seed), dtype)
        return found

    @property
    def of_sites(self) -> OwnData | None:
        """How columns become features, if `path` names a file for each client."""
        return self.data if self.tabular and is_pattern(self.data.path) else None

    def describe(self, client: int, seeds: tuple[int, ...], settings: Settings) -> dict[str, Any]:
        """What a client says of its own data: by how many examples it counts, what its columns are, its classes."""
        if self.of_sites is None:
            return super().describe(client, seeds, settings)
        data, (seed,) = self.data, seeds
        train, test = data.own_rows(client, self._seed(seed), self.kind)
        goal = data.others[0]
        classes: list[str] = []
        if self.kind == "classes":
            classes = sorted({*texts(train[goal]).tolist(), *texts(test[goal]).tolist()})
        counts = settings.participation.weights == "examples" or settings.training.per_client
        facts = describe(train, data, data.others, f"client {client}")
        for fact in facts.values():  # no cell leaves, and with secure sums no number
            fact |= {"cell": ""} | ({"range": [], "values": []} if settings.secure else {})
        return {
            "examples": len(train[goal]) if counts else 1,
            "facts": facts,
            "classes": classes,
            "others": data.others,
        }

    def sums(self, client: int, seed: int, asked: Mapping[str, Any]) -> list[float]:
        """A client's counts of the cells of columns and of classes, or its sums of the numbers of a schema."""
        data, who = self.data, f"client {client}"
        train, _ = data.own_rows(client, self._seed(seed), self.kind)
        found: list[float]
        if "schema" in asked:
            found = sums(Schema.of(asked["schema"]), train, who, bool(asked["about"])).tolist()
            return found
        places = places_of(texts(train[data.others[0]]), asked["classes"])
        found = tally(train, asked["columns"], data, who).tolist()
        return found + [float((places == place).sum()) for place in range(len(asked["classes"]))]

    def _seed(self, seed: int) -> int:
        return seed if self.data_seed is None else self.data_seed

    def holdings(self, seed: int) -> Holdings:
        """How many examples of each class every client has."""
        if not self.tabular:
            return self.division(seed).holdings()
        found = self.tables(seed, torch.float32)
        goals, kinds = [part["train"][1] for part in found.values()], len(found.classes)
        counts = [
            goal.bincount(minlength=kinds).tolist() if kinds else [len(goal)] for goal in goals
        ]
        return Holdings(np.array(counts), list(found), [str(one) for one in found.classes])

    def fingerprint(self) -> dict[str, Any]:
        """A hash of the files in place of their paths."""
        own = {"data": self.data.decisions()} if isinstance(self.data, OwnData) else {}
        return {"module_dir": None} | own


@functools.lru_cache(maxsize=4)
def _first(split: Split, classes: int | None, per_class: int | None) -> Split:
    """The first examples of the first classes, in the order of the file."""
    if classes is None and per_class is None:
        return split
    places = first_examples(split.y, classes, per_class)
    owner = None if split.owner is None else split.owner[places]
    return Split(split.x[places], split.y[places], owner)


@dataclass(frozen=True, kw_only=True)
class NetworkTask(DividedTask):
    """A network on numbers or images."""

    module_dir: str | None = None  # where your own model is looked for; None: beside the spec file

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The data, divided among clients, and the network."""
        if self.tabular:
            data = self.tables(seed, dtype)
            return self._of_tables(data, seed, list(data.values()), data.test, names=tuple(data))
        found = self.division(seed)
        x, *x_test = self._scaled(found, dtype)
        every = [torch.from_numpy(one.y) for one in (found.train, found.test) if one is not None]
        if every[0].is_floating_point():
            every = [narrowed(one, dtype, "`task.data.target`") for one in every]
        y, *y_test = every
        model = self._network(tuple(x.shape[1:]), len(found.classes) or y.shape[1], seed)
        parts = found.parts
        clients = Clients(
            len(parts),
            lambda ids: ((x[parts[i]], y[parts[i]]) for i in ids),
            lambda: [len(part) for part in parts],
        )
        test = (x_test[0], y_test[0]) if y_test else None
        return Material(model.to(dtype), clients, test, loss=None if found.classes else F.mse_loss)

    def site_material(
        self, seed: int, settings: Settings, agreed: Mapping[str, Any], client: int | None = None
    ) -> Material:
        """The network and the table of one client on its own machine; of none on a server."""
        own: OwnData = self.data
        count, dtype = len(agreed["examples"]), settings.torch_dtype
        train, test, pooled = dict[str, Any](), dict[str, Any](), None
        if client is not None:
            name = f"client {client}"
            train[name], test[name] = own.own_rows(client, self._seed(seed), self.kind)
        elif own.test_path is not None:
            pooled = blanked(columns.read(Path(own.test_path)), own.gaps, own.others[1:])
        data = TableData(
            train,
            test,
            own.others[0],
            own,
            pooled=pooled,
            classes=agreed["classes"],
            weight=own.weight,
            schema=Schema.of(agreed["schema"]),
            counts=agreed.get("counts") or [],
            dtype=dtype,
        )
        here = [] if client is None else [client]
        clients = Clients(count, lambda _: [*data.values()], here=here)
        tests = data.test if client is None else None
        return self._of_tables(data, seed, clients, tests, counts=agreed.get("counts"))

    def _of_tables(
        self, data: TableData, seed: int, clients: Sequence[Any], test: Any, **more: Any
    ) -> Material:
        """A network for the features of tables, and clients with parts of them."""
        model = self._network((data.width,), data.outputs, seed).to(data.dtype)
        loss = None if data.classes else F.mse_loss
        return Material(model, clients, test, loss=loss, tables=data, **more)

    def _network(self, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        if ":" in self.model:
            return model_from(self.model, self.module_dir, seed)
        norm: Norm = getattr(self, "norm", "group")
        return build(self.model, shape, outputs, norm, seed)

    def _scaled(self, found: Division, dtype: torch.dtype) -> list[Tensor]:
        """Inputs as tensors, each column or channel with mean 0 and deviation 1 over the training examples."""
        own = isinstance(self.data, OwnData)
        both = [one.x for one in (found.train, found.test) if one is not None]
        if both[0].dtype == np.uint8 and both[0].ndim > 2:
            # images become (n, channels, height, width), from 0 to 1
            shrink, (height, width) = getattr(self, "shrink", 1), both[0].shape[1:3]
            if min(height, width) < shrink:
                raise SpecError(
                    f"`task.shrink` {shrink} is larger than the images, {height} × {width}"
                )
            made = []
            for one in both:
                images = torch.from_numpy(one.copy()).to(dtype).div_(255)
                gray = images.dim() == 3
                images = images.unsqueeze(1) if gray else images.permute(0, 3, 1, 2).contiguous()
                made.append(F.avg_pool2d(images, shrink) if shrink > 1 else images)
        else:
            made = [
                narrowed(torch.from_numpy(one.astype(np.float64)), dtype, "`task.data`")
                for one in both
            ]
        if own and self.data.standardize != "pooled":
            return made
        axes = [axis for axis in range(made[0].dim()) if axis != 1]
        mean = made[0].mean(axes, keepdim=True)
        deviation = made[0].std(axes, correction=int(not own), keepdim=True)
        # a constant column stays
        return [(one - mean) / deviation.where(deviation > 0, 1) for one in made]
