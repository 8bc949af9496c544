"""A greedy pairwise generator: rows of settings in which every two levels of two factors meet."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

Row = dict[str, str]  # factor → level; a factor that is left out has its default
Factors = Mapping[str, Sequence[str]]
Fits = Callable[
    [str, str], bool
]  # (factor, level of the main one): whether there is such a setting
Refuses = Callable[[Row], str | None]  # why a row is refused
REMEDIES = 24  # that are tried with a level of the main factor


def covering(
    factors: Factors, main: str, fits: Fits, refuses: Refuses, known: Sequence[Row] = ()
) -> Iterator[tuple[Row, str | None]]:
    """Yield (row, None) until all pairs of levels have met, and (pair, why) where nothing makes a pair run.

    The words of a refusal lead on: what they name is added to a pair that is refused, and left out of a row. Rows
    that are known come first, without levels that are gone.
    """
    usable, used = (
        {name: list(levels) for name, levels in factors.items()},
        Counter[tuple[str, str]](),
    )
    met = set[tuple[tuple[str, str], ...]]()
    for old in known:
        row = {name: old[name] for name in factors if old.get(name) in factors[name]}
        if main in row and refuses(row) is None:
            used.update(row.items())
            met.update(itertools.combinations(row.items(), 2))
            yield row, None
    for one in [(name, level) for name, levels in factors.items() for level in levels]:
        if one in used:
            continue
        seed, why = seeded(dict([one]), factors, main, fits, refuses, used)
        if why is not None:
            usable[one[0]].remove(one[1])
            yield seed, why
    left = dict.fromkeys(pair for pair in pairs(usable, main, fits) if pair not in met)
    while left:
        pair = min(left, key=lambda pair: used[pair[0]] + used[pair[1]])
        row, why = seeded(dict(pair), usable, main, fits, refuses, used)
        del left[pair]
        if why is None:
            row = _accepted(_filled(row, usable, main, fits, left), row, refuses)
            used.update(row.items())
            for met in itertools.combinations(row.items(), 2):
                left.pop(met, None)
        yield row, why


def pairs(
    factors: Factors, main: str, fits: Fits
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield every two levels of two factors, the first of which may be the main one, that can be in one row."""
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if any(fits(a, one) and fits(b, one) for one in ([x] if a == main else factors[main])):
                yield (a, x), (b, y)


def seeded(
    wanted: Row,
    factors: Factors,
    main: str,
    fits: Fits,
    refuses: Refuses,
    used: Counter[tuple[str, str]],
) -> tuple[Row, str | None]:
    """The settings with what they need to run, with a level of the main factor that was seldom used; or why not."""
    able = [level for level in factors[main] if all(fits(name, level) for name in wanted)]
    able.sort(key=lambda level: -sum(fits(name, level) for name in factors))
    seldom = min(able, key=lambda level: used[main, level])
    for level in dict.fromkeys([seldom, *able]) if main not in wanted else [wanted[main]]:
        seed, why = _remedied(
            {main: level} | wanted, factors, lambda name, level=level: fits(name, level), refuses
        )
        if why is None:
            break
    return seed, why


def _remedied(
    seed: Row, factors: Factors, fits: Callable[[str], bool], refuses: Refuses
) -> tuple[Row, str | None]:
    """The seed with levels of what refusals name."""
    queue, reasons = [seed], list[str]()
    for row in itertools.islice(queue, REMEDIES):  # which grows meanwhile
        if (why := refuses(row)) is None:
            return {name: row[name] for name in factors if name in row}, None
        reasons.append(why)
        named = _named(why, [name for name in factors if name not in row and fits(name)])
        queue += [row | {name: level} for name in named for level in factors[name]]
    return {name: seed[name] for name in factors if name in seed}, reasons[0]


def _filled(seed: Row, factors: Factors, main: str, fits: Fits, left: Mapping[object, None]) -> Row:
    """The seed, and of each other factor the level that meets most of the row's for the first time."""
    row = dict(seed)
    for name in (name for name in factors if name not in row and fits(name, seed[main])):
        ways = [[((name, x), other) for other in row.items()] for x in factors[name]]
        gains = [sum(one in left or one[::-1] in left for one in way) for way in ways]
        if gains and max(gains):
            row[name] = factors[name][gains.index(max(gains))]
    return {name: row[name] for name in factors if name in row}


def _accepted(row: Row, seed: Row, refuses: Refuses) -> Row:
    """The row without the settings that it is refused for; if the words name none, without the last."""
    while (why := refuses(row)) is not None:
        others = [name for name in row if name not in seed]
        culprit = next(iter(_named(why, others, row)), others[-1])
        row = {name: level for name, level in row.items() if name != culprit}
    return row


def _named(why: str, names: Sequence[str], row: Row | None = None) -> list[str]:
    """Those settings whose names, or levels in a row, are among the words, in the order of these."""
    words, levels = dict.fromkeys(re.findall(r"\w[\w.]*\w", why)), row or {}
    return list(
        dict.fromkeys(
            name for word in words for name in names if _is(word, name, levels.get(name, ""))
        )
    )


def _is(word: str, name: str, level: str) -> bool:
    return (
        name == word
        or name.endswith(f".{word}")
        or name.startswith(f"{word}.")
        or f'"{word}"' in level
    )
