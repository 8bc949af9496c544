"""Tables of three hospitals, with gaps, texts, codes, dates and ids."""

from __future__ import annotations

import numpy as np
import pandas as pd


def hospital(number: int, rows: int) -> pd.DataFrame:
    """The patients of a hospital, with gaps, texts, codes, dates and ids."""
    rng = np.random.default_rng(number)
    hours = pd.to_timedelta(rng.integers(0, 9000, rows), unit="h")
    return pd.DataFrame(
        {
            "id": np.arange(rows) + 1000 * number,
            "age": rng.normal(1e6, 9, rows),  # a mean far above the deviation
            "sex": rng.choice(["M", "F"], rows),
            "smoker": rng.choice(["yes", "no", ""], rows),
            "pressure": [str(x) if x > 110 else "?" for x in rng.integers(100, 150, rows)],
            "ward": rng.integers(1, 5, rows),
            "seen": pd.to_datetime("2013-01-01") + hours,
            "hospital": f"h{number}",
            "note": [f"note {x}" for x in rng.integers(0, 10**9, rows)],
            "one": 1,
        }
    )


TABLES = {f"h{number}": hospital(number, 40 + 7 * number) for number in range(3)}
