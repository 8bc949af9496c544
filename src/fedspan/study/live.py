"""`fedspan report --live`: a page on this machine that follows runs, or a comparison, while they are being written."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedspan.core.digest import digest
from fedspan.core.errors import ChangedError, CheckpointError, FedspanError, SpecError
from fedspan.core.system import WINDOWS
from fedspan.engine import history
from fedspan.study import page, results
from fedspan.study.report import Report, check, of_places

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """A server of the report of some directories, made again when their files change.

    Args:
        places: The directories.
        metric: The metric to show first; None: the main one.
        command: The command that asked for it.
        port: Where to listen; 0: any free port.

    Raises:
        SpecError: A directory does not exist, or the port is taken.
    """

    allow_reuse_address = not WINDOWS  # there it lets two servers have one port

    def __init__(self, places: Sequence[Path], metric: str | None, command: str, port: int) -> None:
        check(["html"])
        self.places, self.metric, self.command = places, metric, command
        self.lock, self.stamp = threading.Lock(), ""
        self.refresh()  # a mistake is told now, not to the browser
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise SpecError(
                f"port {port} cannot be used ({error.strerror}); choose another one with --port"
            ) from None

    def refresh(self) -> None:
        """Make the report again if a history or the data of a study has changed."""
        names = (history.NAME, results.STUDY, results.CURVES)
        with self.lock:
            states = []
            for place in self.places:
                files = [place] if place.is_file() else sorted(place.rglob("*.*"))
                for path in (path for path in files if path.name in names):
                    status = path.stat()
                    states.append((str(path), status.st_mtime_ns, status.st_size))
            stamp = digest(json.dumps(states))
            if stamp == self.stamp:
                return
            where = ", ".join(map(str, self.places))
            try:
                self.report = of_places(self.places, self.metric, self.command)
            except ChangedError:
                raise
            except CheckpointError:
                self.report = Report("No evaluation yet", "", [], self.command)
                self.status = f"Waiting for {where}"
            else:
                series = [entry.series for one in self.report.sections for entry in one.entries]
                runs = sum(len(one.seeds) for one in series)
                ended = runs - sum(len(one.unfinished) for one in series)
                self.status = f"Following {where}: {ended} of {runs} runs finished"
            self.stamp = stamp


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer with the page, or with the state and the page's content if it has changed since a stamp."""
        address, server = urlsplit(self.path), self.server
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)  # a page elsewhere whose name leads here may not read the runs
            return
        try:
            server.refresh()
            if address.path == "/":
                text, kind = page.render(server.report, live=server.stamp), "text/html"
            elif address.path == "/live.json":
                news = {"stamp": server.stamp, "status": server.status}
                if server.stamp not in parse_qs(address.query).get("stamp", ()):
                    whole = page.render(server.report)
                    news["main"] = whole.partition("<main>")[2].rpartition("</main>")[0]
                text, kind = json.dumps(news), "application/json"
            else:
                self.send_error(404)
                return
        except (FedspanError, OSError) as error:
            self.send_error(503, str(error))  # a file that is being replaced; the page asks again
            return
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Print no requests."""
