"""Data sets and models by name: one file each, which says what it is, where it comes from and how it is converted."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.core.errors import DataError, one_line, one_of
from fedspan.core.files import remove
from fedspan.data import store
from fedspan.data.columns import UNREADABLE
from fedspan.data.download import File, Seen, by_hand, check, download
from fedspan.data.store import Contents

SHIPPED = Path(__file__).parents[1] / "shipped"  # files that come with fedspan
SYSTEM = Path("/usr/share/datasets")  # of Debian's packages, such as dataset-fashion-mnist
Files = Mapping[str, Path]  # an official file's name → where it is
Splits = Mapping[str, Mapping[str, Any]]  # "train" and "test" of a hub → column → values
DAMAGED = (
    *UNREADABLE,
    tarfile.TarError,
    IndexError,
)  # what conversions raise on files that are not the official ones


class HubError(DataError):
    """The hub does not give a data set, or gives another one."""


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
    check: Callable[[Files], None] | None = None  # raises one of DAMAGED if files are damaged
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
    if _made(found) is not None or (
        found.files and all(_place(file) is not None for file in found.files)
    ):
        return True
    return found.part_of is not None and here(found.part_of)


def made(name: str) -> bool:
    """Whether the files that are read are here."""
    return _made(find(name)) is not None


def require(wanted: Iterable[str]) -> None:
    """Refuse to go on without data sets and models, in one line with the one command that gets them all.

    Those of which only the official files are here are converted.
    """
    all_wanted = [find(name) for name in dict.fromkeys(wanted)]
    missing = [found for found in all_wanted if not here(found.name)]
    if missing:
        gets = [one.command.removeprefix("fedspan data get ") for one in missing if not one.install]
        line = [f"fedspan data get {' '.join(dict.fromkeys(gets))}"] if gets else []
        line += [one.install for one in missing if one.install]
        listed = " and ".join(repr(one.name) for one in missing)
        place = (
            "installed" if not gets else "here" if len(line) > 1 else f"in {str(store.folder())!r}"
        )
        raise DataError(
            f"{listed} {'is' if len(missing) == 1 else 'are'} not {place}; run `{' && '.join(line)}` first"
        )
    for found in all_wanted:
        if found.package is None and _made(found) is None:
            get(find(found.part_of or found.name))


def paths(name: str) -> dict[str, Path]:
    """The files of a data set or a model, made of the official ones if only those are here.

    Raises:
        DataError: It is not here, or damaged.
    """
    require([name])
    found = find(name)
    files = {file: place / file for file, place in (_made(found) or {}).items()}
    if found.check is not None:
        try:
            found.check(files)
        except (DataError, *DAMAGED) as error:
            raise damaged(name, one_line(error)) from None
    return files


def damaged(name: str, why: str) -> DataError:
    """The error of a data set or a model that cannot be read, with the command that gets it again."""
    found = find(name)
    files = [repr(str(place / file)) for file, place in (_made(found) or {}).items()]
    remedy = f"delete {', '.join(files)} and run `{found.command}`"
    if found.install:
        remedy = f"run `{found.install.replace('install', 'install --force-reinstall')}`"
    return DataError(f"{name!r} is damaged: {why}; {remedy}")


def get(
    found: DataSet,
    seen: Seen = lambda *_: None,
    load: Callable[[Hub, Files], Contents] | None = None,
) -> None:
    """Bring a data set into the data directory: official files are downloaded, checked and converted.

    Args:
        found: The data set.
        seen: Called with the name of a file, its bytes so far and its bytes in all.
        load: Loads the data set from its hub in place of official files.

    Raises:
        HubError: The hub does not give it.
        DataError: It cannot be had, or is not what it should be; nothing is left but parts of downloads.
    """
    if found.convert is None:
        raise DataError(
            f"{found.name!r} comes with the package {found.package or 'fedspan'}; run `{found.install}`"
        )

    def wait() -> None:
        seen("waiting for another process", 0, 0)
        time.sleep(0.2)

    with store.alone(wait):
        if _made(found) is not None:
            return
        hub = found.hub if load is not None else None
        files = found.files if hub is None else hub.files
        had = {file.name: path for file in files if (path := _place(file)) is not None}
        new = _download(found, [file for file in files if file.name not in had], seen)
        try:
            if not found.digest:  # repacked files are fine if what is made of them is
                for file in files:
                    check(file, (had | new)[file.name])
            made = found.convert(had | new) if hub is None or load is None else load(hub, had | new)
            if found.digest and (digest := store.digest(made)) != found.digest:
                why = (
                    f"what is made of them has the SHA-256 {digest[:16]}…, not {found.digest[:16]}…"
                )
                raise DataError(why) if hub is None else HubError(f"{hub.path!r} of the hub: {why}")
        except HubError:
            raise
        except (DataError, *DAMAGED) as error:
            for path in new.values():
                remove(path)
            delete = (
                f"delete {', '.join(repr(str(path)) for path in had.values())} and " if had else ""
            )
            why = f"the files of {found.name!r} cannot be converted: {one_line(error, 600)}"
            raise DataError(f"{why}; {delete}run `{found.command}` again") from None
        for name, values in made.items():
            store.write(store.folder() / name, values)
        for path in new.values():
            remove(path)


def _download(found: DataSet, files: Sequence[File], seen: Seen) -> dict[str, Path]:
    folder = store.folder()
    for number, file in enumerate(files):
        try:
            download(file, folder, seen)
        except DataError as error:
            hint = by_hand(files[number:], folder)
            raise DataError(
                f"{error}; run `{found.command}` again, or {hint} and run it then"
            ) from None
    return {file.name: folder / file.name for file in files}


def _made(found: DataSet) -> dict[str, Path] | None:
    """Where the files are that are read: in the data directory, or in fedspan; None if one is missing."""
    for place in (store.folder(), SHIPPED):
        if found.made and all((place / file).is_file() for file in found.made):
            return dict.fromkeys(found.made, place)
    return None


def _place(file: File) -> Path | None:
    """Where an official file is: in the data directory, or of a package of the system."""
    places = [
        place / name
        for name in (file.name, file.also)
        if name
        for place in (store.folder(), SYSTEM)
    ]
    return next((path for path in places if path.is_file()), None)
