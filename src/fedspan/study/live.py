"""`fedspan report --live`: a page on this machine that follows runs, or a comparison, while they are being written."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedspan.core.errors import ChangedError, CheckpointError, FedspanError, SpecError
from fedspan.core.spec import read_toml
from fedspan.core.system import WINDOWS
from fedspan.engine import history
from fedspan.study import page, results
from fedspan.study.model import study_of
from fedspan.study.report import Report, check, check_places, of_places, titled

HOST = "127.0.0.1"


class Follower:
    """The report of some directories, made again when their files change."""

    def __init__(self, places: Sequence[Path], metric: str | None, command: str) -> None:
        self.places, self.metric, self.command = places, metric, command
        self.lock = threading.Lock()
        self.stamp, self.report, self.status = "", Report("", "", [], ""), ""

    def refresh(self) -> None:
        """Make the report again if a history or the data of a study has changed."""
        names = (history.NAME, results.STUDY, results.CURVES)
        with self.lock:
            states = []
            for place in self.places:
                files = [place] if place.is_file() else place.rglob("*.*")
                for path in sorted(path for path in files if path.name in names):
                    status = path.stat()
                    states.append((str(path), status.st_mtime_ns, status.st_size))
            stamp = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]
            if stamp != self.stamp:
                self._read()
                self.stamp = stamp

    def _read(self) -> None:
        where, title = ", ".join(map(str, self.places)), ""
        for place in self.places:  # a comparison that is not finished
            if (place / results.STUDY).is_file() and not results.has_data(place) and not title:
                study = study_of(read_toml(place / results.STUDY))
                title = study.title or titled(study.parts[0])
        try:
            report = of_places(self.places, self.metric, self.command)
        except ChangedError:
            raise
        except CheckpointError:
            self.report = Report(title or "No evaluation yet", "", [], self.command)
            self.status = f"Waiting for {where}"
            return
        self.report = dataclasses.replace(report, title=title or report.title)
        series = [entry.series for section in report.sections for entry in section.entries]
        runs = sum(len(one.seeds) for one in series)
        going = sum(len(one.unfinished) for one in series)
        finished = f"{runs - going} of {runs} runs" if going else f"{runs} run{'s' * (runs > 1)}"
        self.status = f"Following {where}: {finished} finished"

    def html(self) -> str:
        """The whole page."""
        self.refresh()
        return page.render(self.report, live=self.stamp)

    def news(self, stamp: str) -> dict[str, str]:
        """The state, and the page's content if it has changed since a stamp."""
        self.refresh()
        state = {"stamp": self.stamp, "status": self.status}
        if stamp != self.stamp:
            whole = page.render(self.report)
            state["main"] = whole.partition("<main>")[2].rpartition("</main>")[0]
        return state


def serve(
    places: Sequence[Path], metric: str | None, command: str, port: int
) -> ThreadingHTTPServer:
    """A server of the live page, which `serve_forever` starts.

    Raises:
        SpecError: if a directory does not exist, or the port is taken.
    """
    check(["html"])
    check_places(places)
    follower = Follower(places, metric, command)
    follower.refresh()  # a mistake is told now, not to the browser

    class Handler(_Handler):
        follows = follower

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        reason = "is in use" if error.errno == errno.EADDRINUSE else "is not allowed"
        raise SpecError(f"port {port} {reason}; choose another one with --port") from None


class _Server(ThreadingHTTPServer):
    allow_reuse_address = not WINDOWS  # there it lets two servers have one port


class _Handler(BaseHTTPRequestHandler):
    follows: Follower

    def do_GET(self) -> None:
        """Answer with the page, or with what is new."""
        address = urlsplit(self.path)
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)  # a page elsewhere whose name leads here may not read the runs
            return
        if address.path not in ("/", "/live.json"):
            self.send_response(404)
            self.end_headers()
            return
        try:
            if address.path == "/":
                kind, text = "text/html", self.follows.html()
            else:
                stamp = parse_qs(address.query).get("stamp", [""])[0]
                kind, text = "application/json", json.dumps(self.follows.news(stamp))
        except (
            FedspanError,
            OSError,
        ) as error:  # a file that is being replaced; the page asks again
            self.send_error(503, str(error))
            return
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name of the base class)
        """Requests are not printed."""
