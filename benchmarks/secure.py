"""What a secure sum costs: bytes and CPU seconds per client and for the server, apart from training and the download.

    python benchmarks/secure.py                    # the table of docs/secure-aggregation.md
    python benchmarks/secure.py --clients 10 --numbers 10000 --bits 64
    python benchmarks/secure.py --clients 10 --numbers 10000 --signed

Clients and server run one after the other in this process. A tenth of the clients drops out after sending shares, so
that the server also removes pairwise masks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import bench
import numpy as np

from fedspan.core.privacy import Privacy
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.secure.server import SecureSum

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.secure import LocalClients, signed, whole


def measure(clients: int, numbers: int, privacy: Privacy) -> dict[str, float]:
    """One session."""
    fixed, spent = FixedPoint.of(privacy), 0.0
    values = np.random.default_rng(0).normal(size=numbers)
    gone = set(range(0, clients, 10))
    local = LocalClients(
        privacy,
        lambda there: {client: whole(values, fixed) for client in there},
        lambda phase: gone if phase == "train" else (),
    )

    def ask(phase: str, messages: Any, expected: Any) -> Any:
        nonlocal spent
        began = time.process_time()
        answers = local.ask(phase, messages, expected)
        spent += time.process_time() - began
        return answers

    began = time.process_time()
    one = SecureSum(list(range(clients)), numbers, privacy, ask)
    survivors, total = one.run()
    server = time.process_time() - began - spent
    assert (signed(total) == len(survivors) * signed(whole(values, fixed))).all()
    last = survivors[-1]
    return {
        "up": local.received[last],
        "down": local.sent[last],
        "client": spent / clients,
        "server": server,
    }


def main() -> None:
    """Prints the table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--numbers", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--bits", type=int, nargs="+", default=[32])
    parser.add_argument("--signed", action="store_true", help="clients sign their keys")
    given = parser.parse_args()
    if given.short:
        given.clients, given.numbers = [10], [10_000]
    measure(5, 10, Privacy(secure=True))  # loads the libraries
    print(
        "| clients | numbers | bits | bytes up | more than float32 | bytes down | s per client | s server |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for bits in given.bits:
        for clients in given.clients:
            for numbers in given.numbers:
                found = measure(
                    clients,
                    numbers,
                    Privacy(secure=True, secure_bits=bits, secure_signed=given.signed),
                )
                more = found["up"] - numbers * 4
                print(
                    f"| {clients} | {numbers:,} | {bits} | {found['up']:,.0f} | {more:,.0f} | {found['down']:,.0f} | "
                    f"{found['client']:.4f} | {found['server']:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    bench.start(main)
