"""Tasks that train a torch module: the model and the data of its clients, and how a problem is made of them.

A `Material` carries both, from a user's objects, a user's module or a data set to the problem. In one process all data
is read, or, with very many clients, each client's when it first takes part. A client's own machine reads that client's
examples alone, and a server the test set.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedspan.core.config import Settings
from fedspan.core.errors import DataError, SpecError, client_name, one_of, shown
from fedspan.core.plugins import called, load_module
from fedspan.core.seeds import torch_generator
from fedspan.core.task import Holdings, Task
from fedspan.data.table_data import TableData
from fedspan.huggingface.models import (
    Pretrained,
    about,
    is_pretrained,
    own_loss,
    prepare,
    score_of,
    usual_metrics,
)
from fedspan.huggingface.text_data import as_texts, by_length
from fedspan.metrics._collected import Labels, one_number
from fedspan.metrics._own import chosen
from fedspan.nn.batches import Batch, ClientData, Clients, Loss, placed
from fedspan.nn.blueprint import blueprint
from fedspan.nn.client_data import as_client_data, is_frame, split_parts, table_columns
from fedspan.nn.evaluate import AT_ONCE, Evaluator, by_objective, by_outputs
from fedspan.nn.problem import TorchProblem
from fedspan.nn.problem_kind import (
    BY_LOGIT,
    KNOWN,
    USUAL,
    OutputLoss,
    ProblemKind,
    call_of,
    converted,
    doubles,
    function_of,
    on_trial,
    parts_of,
    problem_kind,
    tried,
)
from fedspan.nn.projection_rules import projection_rules

KEPT = 256  # clients of a large population whose data stays in memory
PROBED = 2  # examples that the model is tried on


@dataclass(eq=False)
class Material:
    """A model and the data of its clients: what is minimized on them, and how the model is evaluated.

    A Hugging Face model without a given loss is trained by its own, on tokenized text. Any other model is trained on
    (inputs, targets) by `loss(outputs, targets)`, or by `objective(model, batch)` on whatever a batch is. The first
    data that is read decides the kind of problem and the order of columns.
    """

    read_at_start: ClassVar[int] = (
        10_000  # clients; the data of more is read when a client first takes part
    )
    model: nn.Module
    clients: Sequence[Any] = ()  # each one's data; `Clients` reads it when it is asked for
    test: Any = None  # data, or a function that reads it; None: there is none
    validation: Any = None  # the same
    loss: OutputLoss | None = None
    objective: Loss | None = None  # in place of a loss of outputs and targets
    names: Sequence[str] | None = None  # of the clients; None: they are numbered
    settings: Settings = field(default_factory=Settings)  # of the run
    tables: TableData | None = None  # what the clients' data were made of
    counts: Sequence[int] | None = None  # of training examples of each class, as clients agreed
    kind: ProblemKind | None = field(default=None, init=False)
    columns: list[Any] = field(default_factory=list, init=False)  # of tables, as the first has them
    inputs: list[Any] = field(default_factory=list, init=False)  # columns of tables of inputs
    shapes: list[torch.Size] | None = field(default=None, init=False)  # of an example's inputs
    several: Any = field(default=0, init=False)  # inputs: their number or names

    @staticmethod
    def of(model: nn.Module, clients: Sequence[Any] | Mapping[str, Any], **others: Any) -> Material:
        """Checks what a user gives; clients of a list are numbered."""
        checked_model(model, "`model` must be")
        named = isinstance(clients, Mapping)
        if not named and table_columns(clients) is not None:
            raise DataError(
                "`clients` is one table; give a list with a table per client, such as "
                "[part for _, part in table.groupby('client')]"
            )
        single = (Tensor, np.ndarray, str, bytes, set, DataLoader, Dataset)
        if isinstance(clients, single) or not hasattr(clients, "__len__"):
            raise DataError(
                f"`clients` must be a list or a dictionary of clients' data, got {type(clients).__name__}"
            )
        if named and "train" in clients and set(clients) <= {"train", "test", "validation"}:
            raise DataError(
                "`clients` has the parts of one data set; divide train among clients, and give `test`"
            )
        if not len(clients):
            raise DataError("`clients` is empty; give the data of at least one client")
        names = tuple(map(str, clients)) if named else None
        data: Any = clients.values() if isinstance(clients, Mapping) else clients
        later = len(data) > Material.read_at_start and hasattr(data, "__getitem__")
        if isinstance(data, list | tuple) or not later:
            data = list(data)  # else each client's data is fetched when it takes part
        tables = clients if isinstance(clients, TableData) else None
        return Material(model, data, names=names, tables=tables, **others)

    def who(self, client: int) -> str:
        """A client as error messages name it."""
        return client_name(client, self.names)

    @property
    def at_hand(self) -> Sequence[Any]:
        """The data that can be looked at before the run: all of it, or the first client's of a large population."""
        return self.clients if isinstance(self.clients, list) else [self.clients[0]]

    def sizes(self) -> Sequence[int] | None:
        """Examples of each client where all are pairs of tensors in a list, or a sequence's own `sizes`."""
        if not isinstance(self.clients, list):
            return getattr(self.clients, "sizes", None)
        for one in self.clients:
            if type(one) is not tuple or any(type(part) is not Tensor for part in one):
                return None
        return [len(one[0]) for one in self.clients]

    @functools.cached_property
    def pretrained(self) -> Pretrained | None:
        """What is known of a Hugging Face model that is trained by its own loss; None for any other model."""
        own = self.loss is None and self.objective is None and is_pretrained(self.model)
        return about(prepare(self.model)) if own else None

    def minimized(self) -> Loss:
        """The function of (model, batch) that clients minimize."""
        if self.objective is None:
            return self._by_outputs if self.pretrained is None else own_loss
        if not callable(self.objective):
            raise SpecError(
                f"`objective` must be a function of (model, batch), got {shown(self.objective)}"
            )
        return self.objective

    def _by_outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self.kind is not None
        inputs, *others = batch
        return self.kind.minimized(call_of(model, inputs)(), *others)

    def read(self, data: Any, who: str) -> ClientData:
        """The examples that a user gives; errors name them as `who`."""
        if self.pretrained is not None:
            return as_texts(data, self.pretrained, who)
        if is_frame(data) or self.objective is None:
            data = self._ordered(data, who)
        read = as_client_data(data, who)
        if self.objective is not None:
            self._try_objective(read)
            return read
        few = read.take(torch.arange(min(PROBED, len(read))))
        if self.kind is None:
            weighted = self.tables is not None and self.tables.weight is not None
            kind = problem_kind(self.model, few[:2] if weighted else few, self.loss, who)
            self.kind = replace(kind, weighted=weighted)
            self._check_weights(weighted)
            asked = chosen(self.settings.metrics).items()
            wrong = [name for name, metric in asked if isinstance(metric, Labels)]
            if wrong and self.kind.kind == "numbers":
                raise SpecError(
                    f"`metrics` {wrong[0]!r} is for classes, and `loss` for numbers; use 'r2', 'mae' or 'mse'"
                )
        inputs = self.kind.batch(few, who)[0]
        several = isinstance(inputs, Mapping | tuple) and bool(parts_of(inputs))
        if several:
            self.several = list(inputs) if isinstance(inputs, Mapping) else len(inputs)
        shapes = [one.shape[1:] for one in parts_of(inputs)]
        if shapes and shapes != self.shapes:
            tried(self.model, inputs, who)
            self.shapes = shapes
        return converted(read, self.kind, who)

    def evaluator(self, test: ClientData) -> Evaluator:
        """The evaluation on examples that are read."""
        made = functools.partial(
            Evaluator, test, metrics=self.settings.metrics, device=self.settings.torch_device
        )
        if (known := self.pretrained) is not None:
            usual, parts = usual_metrics(known), by_length(test, known)
            return made(score_of(known), usual=usual, parts=parts)
        if self.objective is not None:
            return made(by_objective(self.objective, bool(self.settings.metrics)))
        assert self.kind is not None
        names = None if self.kind.kind == "other" else USUAL.get(self.kind.kind, ())
        score = by_outputs(self.kind.loss, self.kind.for_metrics)
        return made(score, usual=names, logits=self.kind.logits)

    def usage(self) -> dict[str, Any]:
        """How the trained model is used, as plain values: how it is built, and what it takes and gives."""
        known, tables = self.kind, self.tables
        kind = "other" if known is None else known.kind
        count = known.outputs[-1] if known is not None and known.outputs else 1
        found: dict[str, Any] = {
            "blueprint": blueprint(self.model),
            "kind": kind,
            "logits": known is None or known.logits is not False,
            "classes": list(range({"binary": 2}.get(kind, count))) if kind != "numbers" else [],
            "columns": [str(name) for name in self.inputs],
            "several": self.several,
        }
        if tables is not None:
            own = {who: schema.table() for who, schema in tables.own.items()}
            asked, schema = self.settings.training, tables.schema
            for weights in (asked.class_weights, asked.pos_weight):
                if weights is not None:
                    said = (
                        f"classes are weighted in training ({weights}), which shifts probabilities"
                    )
                    schema = replace(schema, notes=(*schema.notes, said))
            found |= {"schema": schema.table(), "classes": tables.classes, "own": own}
            if known is None:  # of a server, which has no data to look at
                found["kind"] = "classes" if tables.classes else "numbers"
        return found

    def _check_weights(self, weighted: bool) -> None:
        """Refuses weights that the loss does not take."""
        known, asked = self.kind, self.settings.training
        named = {
            "weight": weighted,
            "class_weights": asked.class_weights,
            "pos_weight": asked.pos_weight,
        }
        for name in [name for name, value in named.items() if value]:
            own = getattr(known and known.loss, "weight", None) is not None
            own |= getattr(known and known.loss, "pos_weight", None) is not None
            if known is None or function_of(known.loss) not in KNOWN or own:
                raise SpecError(
                    f"`{name}` goes with cross-entropy and other losses of torch that have no weights of their own; "
                    "weigh in the loss itself"
                )
            logits = function_of(known.loss) in BY_LOGIT
            if name == "pos_weight" and not (
                logits or (known.kind, known.outputs) == ("classes", (2,))
            ):
                raise SpecError("`pos_weight` is for yes or no; use `class_weights`")
            if name == "class_weights" and known.kind not in ("classes", "binary"):
                raise SpecError("`class_weights` is for classes; leave it out")
            if name != "pos_weight" and self.settings.dp and self.settings.dp.level == "example":
                raise SpecError(
                    f"`{name}` has no effect where `privacy` takes the gradients of single examples; leave it out"
                )

    def weigh(self, clients: Iterable[ClientData]) -> None:
        """Sets the weights of classes and of yes, which need the training data of all clients to be balanced."""
        known, asked = self.kind, self.settings.training.class_weights
        if known is None:  # a server has no training data
            if self.objective is not None or self.pretrained is not None:
                self._check_weights(False)
            return
        weights: tuple[float, ...] | None = None
        if asked is not None:
            number = known.outputs[0] if known.kind == "classes" else 2
            names = [*map(str, range(number))]
            if self.tables is not None and self.tables.classes:
                names = [*map(str, self.tables.classes)]
        if isinstance(asked, Mapping):
            for name in asked:
                one_of("class_weights", name, names)
            weights = tuple(asked.get(name, 1.0) for name in names)
        elif asked is not None:
            counts = np.zeros(number) if self.counts is None else np.array(self.counts, float)
            for data in clients if self.counts is None else ():
                for part in torch.arange(len(data)).split(AT_ONCE):
                    goals = data.take(part)[1].long().reshape(-1)
                    counts += goals[goals >= 0].bincount(minlength=number).numpy()
            weights = tuple((counts.sum() / (number * counts.clip(1))).tolist())
        self.kind = replace(
            known, class_weights=weights, pos_weight=self.settings.training.pos_weight
        )

    def _try_objective(self, data: ClientData) -> None:
        """The objective must give a number with a gradient on two examples; the model stays as it was.

        On the first client it is also tried on the same examples twice: a sum over the batch doubles.
        """
        parameter, first = next(self.model.parameters()), self.shapes is None
        self.shapes = []
        if parameter.is_meta:
            return
        index, found = torch.arange(min(PROBED, len(data))), []
        for times in (1, 2) if first else (1,):
            batch = placed(data.take(index.repeat(times)), parameter.device)
            call = functools.partial(self.minimized(), self.model, batch)
            with on_trial(self.model, parameter.device):
                found.append(one_number(call, "`objective`", "(model, batch)", trains=True))
        if first and doubles(*found):
            warnings.warn(
                "`objective` doubles when a batch is doubled, so that it looks like a sum; return the mean over the "
                "batch, or steps grow with the batch and evaluations are wrong",
                stacklevel=3,
            )

    def _ordered(self, data: Any, who: str) -> Any:
        """The data with the columns of its table, or of its table of inputs, in the order of the first client's."""
        if isinstance(data, list | tuple) and len(data) == 2 and is_frame(data[0]):
            found = self._ordered(data[0], who), data[1]
            self.inputs = self.columns
            return found
        if not is_frame(data):
            data = table_columns(data) or data
            if not isinstance(data, Mapping):
                return data
        names = list(data) if isinstance(data, Mapping) else list(data.columns)
        self.columns = self.columns or names
        if len(set(names)) < len(names):
            raise DataError(f"{who} has two columns of one name among {_listed(names)}; rename one")
        if set(names) != set(self.columns):
            raise DataError(
                f"{who} has the columns {_listed(names)}, the first client {_listed(self.columns)}; rename them"
            )
        if isinstance(data, Mapping):
            return {name: data[name] for name in self.columns}
        return data if names == self.columns else data[self.columns]


class ModuleTask(Task):
    """A task with a torch module."""

    several_seeds: ClassVar[bool] = False
    frozen_modules: ClassVar[tuple[str, ...]] = ()  # frozen where a run's projection does not say

    @abstractmethod
    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The model, and the data of its clients."""

    def build(self, seeds: tuple[int, ...], settings: Settings) -> TorchProblem:
        """All clients' examples and the test set in one process."""
        return self._problem(seeds, settings)

    def client_problem(
        self,
        client: int,
        seeds: tuple[int, ...],
        settings: Settings,
        agreed: Mapping[str, Any] | None = None,
    ) -> TorchProblem:
        """One client's examples and no test set."""
        made = None if agreed is None else self.site_material(seeds[0], settings, agreed, client)
        return self._problem(seeds, settings, [client], on_client=True, made=made)

    def server_problem(
        self, seeds: tuple[int, ...], settings: Settings, agreed: Mapping[str, Any] | None = None
    ) -> TorchProblem:
        """The test set, and no client's examples; clients say how many they have."""
        made = None
        if agreed is not None and "schema" in agreed:
            made = self.site_material(seeds[0], settings, agreed)
        return self._problem(seeds, settings, [], made=made)

    def site_material(
        self, seed: int, settings: Settings, agreed: Mapping[str, Any], client: int | None = None
    ) -> Material:
        """The model and the data of one client on its own machine, or of none, by what was agreed on."""
        raise NotImplementedError

    def holdings(self, seed: int) -> Holdings:
        """How many examples every client has."""
        made = self.material(seed, torch.float32)
        sizes = []
        for number, data in enumerate(made.clients):
            who = made.who(number)
            sizes.append(len(made.read(split_parts(data, who)[0], who)))
        names = made.names or [str(number) for number in range(len(sizes))]
        return Holdings(np.array(sizes)[:, None], names)

    def _problem(
        self,
        seeds: tuple[int, ...],
        settings: Settings,
        ids: Sequence[int] | None = None,
        on_client: bool = False,
        made: Material | None = None,
    ) -> TorchProblem:
        """The problem with the data of these clients; None: of all."""
        (seed,), chosen = seeds, settings.projection
        made = replace(made or self.material(seed, settings.torch_dtype), settings=settings)
        given, count = made.clients, len(made.clients)
        ids = range(count) if ids is None else ids
        if on_client and not 0 <= ids[0] < count:
            raise SpecError(
                f"client {ids[0]} is not one of the {count} that the task has, 0 to {count - 1}"
            )
        if chosen.frozen_modules is None:
            chosen = replace(chosen, frozen_modules=self.frozen_modules)
        rules = projection_rules(made.model, **vars(chosen))
        loss = made.minimized()

        def read(i: int, data: Any) -> tuple[ClientData, str, ClientData]:
            train, part, held_out = split_parts(data, made.who(i))
            own = test = made.read(train, made.who(i))
            if held_out is not None:
                test = made.read(held_out, f"{made.who(i)}, {part}")
            return own, part, test

        clients: Sequence[Any]
        each: Callable[[int], tuple[ClientData, str, ClientData]]
        if len(ids) > Material.read_at_start:
            each = functools.lru_cache(maxsize=KEPT)(lambda i: read(i, given[i]))
            each(0)  # the first client decides the kind of problem
            sizes = made.sizes()
            clients = Clients(count, lambda some: [each(i)[0] for i in some], lambda: sizes)
        else:
            data = (
                given.read(ids)
                if ids and isinstance(given, Clients)
                else map(given.__getitem__, ids)
            )
            found = {i: read(i, one) for i, one in zip(ids, data, strict=True)}
            each = found.__getitem__
            clients = [one for one, _, _ in found.values()]
            if len(clients) < count:
                clients = Clients(count, lambda some: [found[i][0] for i in some], here=ids)

        if on_client and settings.training.class_weights == "balanced" and made.counts is None:
            raise SpecError(
                "`class_weights` 'balanced' needs all clients' counts, on which only clients with tables agree; give a "
                "table of class and weight"
            )
        made.weigh(each(i)[0] for i in ids)

        def client_tests(i: int) -> tuple[str, Evaluator]:
            _, part, test = each(i)
            return part, made.evaluator(test)

        tests = {}
        parts = {"test set": made.test, "validation set": made.validation}
        for name, part in parts.items() if not on_client else ():
            data = part() if inspect.isfunction(part) else part
            if data is not None:
                tests[name] = made.evaluator(made.read(data, name))
        return TorchProblem(
            made.model,
            clients,
            loss,
            rules,
            settings,
            seed=seed,
            on_client=on_client,
            names=made.names,
            tests=tests,
            client_tests=client_tests,
            usage=made.usage(),
        )


def model_from(name: str, folder: str | None, seed: int) -> nn.Module:
    """What the function of a name such as `my_model:make` returns; its initial weights are decided by the seed."""
    where, _, function = name.partition(":")
    make: Any = getattr(load_module(where, folder, "task.model"), function, None)
    if not callable(make):
        found = "no function" if make is None else f"a {type(make).__name__}, not a function,"
        raise SpecError(f"`task.model` {name!r}: the module {where!r} has {found} {function!r}")
    with torch_generator(seed):
        model = called(make, f"`task.model` {name!r}: {function}")
    return checked_model(model, f"`task.model` {name!r} must return")


def checked_model(model: Any, what: str) -> nn.Module:
    """Refuses what cannot be trained; `what` begins the error, as in "`model` must be"."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"{what} a torch.nn.Module, got {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError(
            f"{what} a model with weights, and this one is on the device 'meta', which holds none; load them on 'cpu'"
        )
    return model


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names[:8])) + (", …" if len(names) > 8 else "")
