"""`fedspan report --live`: a page that follows runs while they are being written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tomli_w
from rich.console import Console

from fedspan.core.errors import SpecError
from fedspan.core.json_log import JsonLog
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.study import conduct, live, results
from fedspan.study.request import requested
from support.browsing import browser_page, drawn
from support.runs import TABLE


@contextmanager
def served(place: Path) -> Iterator[str]:
    """The address of a live page."""
    with live.Server([place], None, "", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def get(address: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    """Status and body of an answer."""
    place = urlsplit(address)
    with closing(HTTPConnection(place.hostname or "", place.port)) as connection:
        connection.request("GET", f"/{path}", headers={"Host": host or place.netloc})
        answer = connection.getresponse()
        return answer.status, answer.read()


def asked(address: str, stamp: str = "") -> dict[str, str]:
    """What the page asks every second or two."""
    found: dict[str, str] = json.loads(get(address, f"live.json?stamp={stamp}")[1])
    return found


def begun(place: Path) -> JsonLog:
    """A run directory of two rounds that goes on."""
    found = JsonLog(place / history.NAME, [{"spec": Spec.from_table(TABLE).table()}])
    for t in (0, 2):
        found.append(row(t))
    return found


def row(t: int) -> dict[str, Any]:
    return {
        "round": t,
        "up_bytes": 10 * t,
        "down_bytes": 10 * t,
        "seconds": 0.1 * t,
        "loss": 9.0 - t,
        "rel_err": 1 / (t + 1),
    }


def test_news_come_only_when_a_history_has_grown(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with served(tmp_path / "run") as address:
        first = asked(address)
        assert "0 of 1 runs finished" in first["status"]
        assert ">2</td>" in first["main"]
        assert "main" not in asked(address, first["stamp"])
        run.append(row(4))
        second = asked(address, first["stamp"])
        assert ">4</td>" in second["main"]
        run.append(row(12))
        assert "1 of 1 runs finished" in asked(address)["status"]


def test_a_run_without_rows_is_waited_for(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        assert asked(address)["status"].startswith("Waiting for")
        begun(tmp_path / "run")
        assert "ssf on the regression problem" in asked(address)["main"]


def test_a_comparison_is_followed_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(tomli_w.dumps(TABLE))
    study = requested([tmp_path / "base.toml"], methods=["ssf as S,fedavg as F"], seeds=2)
    results.announce(study, tmp_path / "out", "fedspan compare …")
    conduct.make_runs(study, tmp_path / "out" / "runs", jobs=1, console=Console(quiet=True))
    with served(tmp_path / "out") as address:
        running = asked(address)
        assert "<h1>fedavg and ssf on the regression problem" in running["main"]
        assert "fedspan compare …" not in running["main"]
        results.save(
            results.collect(study, tmp_path / "out" / "runs", "fedspan compare …"), tmp_path / "out"
        )
        done = asked(address, running["stamp"])
        assert "fedspan compare …" in done["main"]
        assert "4 of 4 runs finished" in done["status"]


def test_only_this_machine_reads_and_only_the_page(tmp_path: Path) -> None:
    begun(tmp_path)
    with served(tmp_path) as address:
        assert get(address, "", "evil.example:80")[0] == 403
        assert get(address, "", "localhost:1")[0] == 200
        assert get(address, "history.jsonl")[0] == 404


def test_a_port_in_use_and_a_missing_directory_are_told_in_one_line(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(
            SpecError, match=rf"port {port} cannot be used \(.*\); choose another one with --port"
        ):
            live.Server([tmp_path], None, "", port)
    with pytest.raises(SpecError, match="'nowhere' does not exist"):
        live.Server([Path("nowhere")], None, "", 0)


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    begun(tmp_path)
    words = [sys.executable, "-m", "fedspan", "report", str(tmp_path), "--live", "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert "main" in asked(address)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


@drawn
def test_the_live_page_gains_a_point_and_keeps_the_view(tmp_path: Path) -> None:
    run = begun(tmp_path)
    points = "document.querySelector('.plot path.mean').getAttribute('d').split('L').length"
    with served(tmp_path) as address, browser_page(f"{address}#x=round&y=loss") as page:
        assert page.evaluate(points) == 2
        page.locator("summary", has_text="Specs").click()
        page.locator(".plot svg").focus()
        run.append(row(4))
        page.wait_for_function(f"{points} === 3", timeout=10_000)
        assert page.locator(".label.y").text_content() == "test loss"
        assert page.locator("details", has_text="Specs").get_attribute("open") is not None
        assert page.evaluate("document.activeElement.tagName") == "svg"
