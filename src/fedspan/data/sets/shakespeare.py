"""Shakespeare's plays by role: what each role says, without stage directions.

The plays are the texts of shakespeare.mit.edu. A line without indent names who speaks, indented lines are said, and
"****" begins an act or a scene.
"""

from __future__ import annotations

import re

from fedspan.core.errors import DataError
from fedspan.data.archives import members
from fedspan.data.sets import REINSTALL, DataSet, Files
from fedspan.data.store import Contents, File

SCRAPER = "https://github.com/ravexina/shakespeare-plays-dataset-scraper"
PAGES = f"http://shakespeare.mit.edu and {SCRAPER}"
FILE = "shakespeare/plays.tar.gz"
DIRECTION = re.compile(
    r"\[|(?:Enter|Exit|Exeunt|Re-enter|Within|Aside|Dies|Reads|Flourish|Music|Sings|They fight|Alarums?|Trumpets?|"
    r"Falls|Stabs|Drum|Kneels|Sennet|Thunder|Ghost|Hautboys|Rising|Retreat|Excursions|Dance|Cornets)\b"
)


def convert(files: Files) -> Contents:
    """One row per role of every play, in the order of the plays' names and of the roles' first words."""
    found = members(files[FILE], "shakespeare-db/*")
    plays = {path.stem: data.decode() for path, data in found.items()}
    rows = [
        {"client": f"{play}|{role}", "play": play, "role": role, "text": "\n".join(said)}
        for play, text in sorted(plays.items())
        for role, said in _roles(text).items()
        if said
    ]
    if not rows:
        raise DataError(f"{str(files[FILE])!r} has no plays")
    return {"text/shakespeare_roles.jsonl.gz": rows}


def _roles(text: str) -> dict[str, list[str]]:
    """Role → the lines it says."""
    roles: dict[str, list[str]] = {}
    role = ""
    for line in text.splitlines():
        if line.startswith("****"):
            role = ""
        elif line.startswith("     "):
            if role and not DIRECTION.match(line.strip()):
                roles[role].append(line.strip())
        elif line.strip():
            role = line.strip()
            roles.setdefault(role, [])
    return roles


SETS = (
    DataSet(
        name="shakespeare",
        about="what 1,337 roles of 36 plays say, 4.2 million characters",
        clients="622 roles with at least 1,000 characters",
        licence="public domain; the scraper GPL-3.0",
        source=PAGES,
        size=1_750_000,
        made=("text/shakespeare_roles.jsonl.gz",),
        # GitHub packs it anew at times: the roles are checked, not the archive
        files=(
            File(FILE, (f"{SCRAPER}/archive/38061c392481af43e226b735480454851802c257.tar.gz",)),
        ),
        convert=convert,
        digest="5f88a10b2928efd883eac1430bae7f92f9623984f926d81390f39519ae729509",
    ),
    DataSet(
        name="shakespeare_mini",
        about="the first 2,000 characters or so of 8 roles of Hamlet and Macbeth",
        clients="8 roles",
        licence="public domain",
        source=PAGES,
        size=8_000,
        made=("text/shakespeare_mini_roles.jsonl.gz",),
        install=REINSTALL,
    ),
)
