"""`fedspan report --live`: a page on this machine that follows runs, or a comparison, while they are being written."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedspan.core.errors import ChangedError, CheckpointError, FedspanError, SpecError
from fedspan.core.spec import read_toml
from fedspan.core.system import WINDOWS
from fedspan.engine import history
from fedspan.study import page, results
from fedspan.study.parse import study_of
from fedspan.study.report import Report, check, check_places, of_places
from fedspan.study.titles import titled

HOST = "127.0.0.1"


class Follower:
    """The report of some directories, made again when their files change."""

    def __init__(self, places: Sequence[Path], metric: str | None, command: str) -> None:
        self.places, self.metric, self.command = places, metric, command
        self.lock = threading.Lock()
        self.stamp, self.report, self.status = "", Report("", [], [], ""), ""

    def refresh(self) -> None:
        """Make the report again if a file has changed."""
        with self.lock:
            stamp = self._stamp()
            if stamp != self.stamp:
                self.report, self.status = self._read()
                self.stamp = stamp

    def _stamp(self) -> str:
        """Changes when a history or the data of a study does."""
        names = (history.NAME, results.STUDY, results.CURVES)
        files = [
            path
            for place in self.places
            for path in ([place] if place.is_file() else place.rglob("*.*"))
        ]
        known = sorted(path for path in files if path.name in names)
        states = [
            (str(path), status.st_mtime_ns, status.st_size)
            for path in known
            for status in (path.stat(),)
        ]
        return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]

    def _read(self) -> tuple[Report, str]:
        where = ", ".join(map(str, self.places))
        try:
            report = of_places(self.places, self.metric, self.command)
        except ChangedError:
            raise
        except CheckpointError:
            return Report(
                self._title() or "No evaluation yet", [], [], self.command
            ), f"Waiting for {where}"
        if title := self._title():
            report = dataclasses.replace(report, title=title)
        series = [entry.series for section in report.sections for entry in section.entries]
        runs, going = (
            sum(len(one.seeds) for one in series),
            sum(len(one.unfinished) for one in series),
        )
        finished = (
            f"{runs - going} of {runs} runs finished"
            if going
            else f"{runs} run{'s' * (runs > 1)} finished"
        )
        return report, f"Following {where}: {finished}"

    def _title(self) -> str:
        """The title of a comparison that is not finished."""
        for place in self.places:
            if (place / results.STUDY).is_file() and not results.has_data(place):
                study = study_of(read_toml(place / results.STUDY))
                return study.title or titled(study.parts[0])
        return ""

    def html(self) -> str:
        """The whole page."""
        self.refresh()
        return page.render(self.report, live=self.stamp)

    def news(self, stamp: str) -> dict[str, str]:
        """The state, and the page's content if it has changed since a stamp."""
        self.refresh()
        state = {"stamp": self.stamp, "status": self.status}
        return (
            state
            if stamp == self.stamp
            else state | {"main": page.main_of(page.render(self.report))}
        )


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
        elif address.path == "/":
            self._send("text/html", self.follows.html)
        elif address.path == "/live.json":
            stamp = parse_qs(address.query).get("stamp", [""])[0]
            self._send("application/json", lambda: json.dumps(self.follows.news(stamp)))
        else:
            self.send_response(404)
            self.end_headers()

    def _send(self, kind: str, make: Callable[[], str]) -> None:
        try:
            data = make().encode()
        except (
            FedspanError,
            OSError,
        ) as error:  # such as a file that is being replaced; the page asks again
            self.send_error(503, str(error))
            return
        self.send_response(200)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(data))),
        ):
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name of the base class)
        """Requests are not printed."""
