"""Official files on a server of 127.0.0.1, and small data sets in the official formats."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import http.server
import io
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.data import sets
from fedspan.data.sets import DataSet


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, with ranges; `cut` closes the first connections early."""

    files: dict[str, bytes]
    cut: int = 0
    ranges: bool = True
    asked: list[tuple[str, str | None]]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.removeprefix("http://data.example").lstrip("/")
        wanted = self.headers.get("Range") if self.server.ranges else None
        self.server.asked.append((self.path, self.headers.get("Range")))
        if path not in self.server.files:
            self.send_error(404)
            return
        data, start = self.server.files[path], int(wanted[6:-1]) if wanted else 0
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.server.cut:
            self.server.cut -= 1
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # of a client that has enough
            self.wfile.write(data[start:])

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and an empty data directory."""
    monkeypatch.setenv("FEDSPAN_DATA", str(folder))
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    made = Server(("127.0.0.1", 0), Handler)
    made.files, made.asked = {}, []
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def served(server: Server, name: str, files: dict[str, bytes], at: str = "") -> DataSet:
    """The data set with these files, which a server on this machine has."""
    server.files |= files
    base = at or f"http://127.0.0.1:{server.server_port}/"
    known = sets.find(name)
    official = tuple(
        dataclasses.replace(
            one, urls=(base + one.name,), sha256=hashlib.sha256(files[one.name]).hexdigest(), size=0
        )
        for one in known.files
    )
    return dataclasses.replace(known, files=official, digest="")


def idx(values: Any, kind: int = 8) -> bytes:
    array = np.asarray(values).astype(">i4" if kind == 12 else np.uint8)
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return gzip.compress(head + array.tobytes())


def mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for part, file, n, more in (("train", "train", 12, 0), ("test", "t10k", 5, 3)):
        x, y = rng.integers(0, 256, (n, 28, 28)), rng.integers(0, 10, n + more)
        extended = np.zeros((n + more, 8), int)
        extended[:, 0], extended[:, 2] = y, 2100 + np.arange(n + more) // 3
        files[f"mnist/{file}-images-idx3-ubyte.gz"] = idx(x)
        files[f"mnist/{file}-labels-idx1-ubyte.gz"] = idx(y[:n])
        files[f"mnist/qmnist-{part}-labels-idx2-int.gz"] = idx(extended, 12)
    return files


def questions() -> dict[str, bytes]:
    files = {}
    for part, rows in (("train", [("My card, please", "card"), ("Where is\nit?", "Refund"), ("how old", "age")] * 4),
                       ("test", [("no card", "card")])):  # fmt: skip
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("text", "category"), *rows])
        files[f"banking77/{part}.csv"] = text.getvalue().encode()
    return files
