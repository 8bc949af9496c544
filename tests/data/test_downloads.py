"""Downloads from 127.0.0.1: cut, resumed, wrong, refused, side by side, and fetched by hand."""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedspan
from fedspan.cli import app as cli
from fedspan.core.errors import DataError, FedspanError
from fedspan.data import sets, store
from fedspan.data.sets import DataSet
from support.served import Server, mnist, questions, served, serving

DOWNLOADED = [name for name in sets.names() if sets.find(name).files]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "cache", monkeypatch) as made:
        yield made


def known(monkeypatch: pytest.MonkeyPatch, found: DataSet) -> None:
    """Put a data set in the place of that of its name."""
    find = sets.find
    monkeypatch.setattr(sets, "find", lambda name: found if name == found.name else find(name))


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["fedspan", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_a_cut_connection_is_resumed(server: Server) -> None:
    server.cut = 2
    sets.get(served(server, "banking77", questions()))
    assert [wanted is not None for _, wanted in server.asked] == [False, True, True, False]
    assert len(fedspan.data.banking77()[0].y) == 12


def test_a_later_call_goes_on_where_the_first_one_stopped(server: Server) -> None:
    found = served(server, "banking77", questions())
    part = store.folder() / "banking77/train.csv.part"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    server.cut = 1
    with pytest.raises(KeyboardInterrupt):
        sets.get(found, stop)
    begun = part.stat().st_size
    assert 0 < begun < len(questions()["banking77/train.csv"])
    sets.get(found)
    assert server.asked[1] == ("/banking77/train.csv", f"bytes={begun}-")
    assert not part.exists()
    assert len(fedspan.data.banking77()[0].y) == 12


@pytest.mark.parametrize(
    "begun", [b"something else", questions()["banking77/train.csv"], bytes(10_000)]
)
@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_that_does_not_fit_is_begun_anew(server: Server, begun: bytes, ranges: bool) -> None:
    server.ranges = ranges
    part = store.folder() / "banking77/train.csv.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(begun)
    sets.get(served(server, "banking77", questions()))
    assert len(fedspan.data.banking77()[0].y) == 12
    assert len(server.asked) <= 4


def test_a_wrong_file_is_refused_and_the_message_says_what_to_do(server: Server) -> None:
    found = served(server, "banking77", questions())
    server.files["banking77/test.csv"] += b"changed"
    with pytest.raises(
        DataError, match=r"test\.csv .*SHA-256 is .*by hand, save it as .*banking77/test\.csv'"
    ) as told:
        sets.get(found)
    assert "\n" not in str(told.value)
    assert "run `fedspan data get banking77` again" in str(told.value)
    assert not sets.find("banking77").here()
    assert [path for path, _ in server.asked].count(
        "/banking77/test.csv"
    ) == 1  # again it would be the same


def test_a_server_that_sends_without_end_is_left(server: Server) -> None:
    found = served(server, "banking77", questions())
    first, other = found.files
    known_size = dataclasses.replace(first, size=len(questions()[first.name]))
    server.files[first.name] = bytes(100_000_000)
    with pytest.raises(DataError, match="SHA-256 is"):
        sets.get(dataclasses.replace(found, files=(known_size, other)))
    assert not list(store.folder().rglob("*.part"))


def test_missing_files_are_all_named_and_fetched_by_hand(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known(monkeypatch, served(server, "mnist", mnist()))
    gone, server.files = server.files, {}
    assert command(monkeypatch, "data", "get", "mnist") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "404" in told
    assert f"by hand, put them into '{store.folder() / 'mnist'}' and run it then" in told
    for name, data in gone.items():
        assert name.removeprefix("mnist/") in told
        (store.folder() / name).write_bytes(data)
    assert command(monkeypatch, "data", "get", "mnist") == 0
    assert len(fedspan.data.mnist()[0].y) == 12
    assert all((store.folder() / name).exists() for name in gone)  # the user's own


@pytest.mark.parametrize("name", DOWNLOADED)
def test_without_a_network_one_line_says_what_to_fetch_and_where_to_put_it(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nobody listens
    known(monkeypatch, sets.find(name))
    assert command(monkeypatch, "data", "get", name) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "…" not in told  # nothing is left out
    assert f"run `fedspan data get {name}` again, or fetch " in told
    files = sets.find(name).files
    for file in files:
        address, _, last = file.urls[0].rpartition("/")
        assert address in told
        assert last in told
        assert last == Path(file.name).name or len(files) == 1
    assert (
        f"'{(store.folder() / files[0].name).parent if len(files) > 1 else store.folder() / files[0].name}'"
        in told
    )


@pytest.mark.parametrize(
    "proxy", ["http://127.0.0.1:none", "127.0.0.1:9", "nothing://x", "http://" + "a" * 80 + ".b"]
)
def test_a_proxy_that_cannot_be_used(
    server: Server, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(DataError, match=r"cannot download train\.csv") as told:
        sets.get(served(server, "banking77", questions(), at="http://data.example/"))
    assert "\n" not in str(told.value)


def test_a_proxy_of_the_environment_is_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "")
    sets.get(served(server, "banking77", questions(), at="http://data.example/"))
    assert server.asked[0][0] == "http://data.example/banking77/train.csv"


def test_contents_that_are_not_the_known_ones_are_refused(server: Server) -> None:
    found = dataclasses.replace(served(server, "banking77", questions()), digest="0" * 64)
    with pytest.raises(
        DataError, match=r"has the SHA-256 .*run `fedspan data get banking77` again"
    ):
        sets.get(found)
    assert not sets.find("banking77").here()  # what was downloaded is gone


def test_files_that_cannot_be_converted(server: Server) -> None:
    """Downloaded ones are gone, so that the next call gets them again; the user's own are named."""
    found = served(
        server, "shakespeare", {"shakespeare/plays.tar.gz": b"<html>please sign in</html>"}
    )
    with pytest.raises(
        DataError, match=r"'shakespeare' cannot be converted: .*; run `fedspan data get shakes"
    ) as told:
        sets.get(found)
    assert "\n" not in str(told.value)
    assert not sets.find("shakespeare").here()
    place = store.folder() / "shakespeare/plays.tar.gz"
    place.write_bytes(b"<html>please sign in</html>")
    with pytest.raises(
        DataError, match=f"delete '{place}' and run `fedspan data get shakespeare` again"
    ):
        sets.require(["shakespeare"])
    assert place.exists()


def test_a_directory_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FedspanError, match="cannot write") as told:
        sets.get(served(server, "banking77", questions()))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("most", [0, 100, 250])
def test_a_full_disk(server: Server, most: int) -> None:
    resource = pytest.importorskip("resource")
    found = served(server, "banking77", questions())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(
            FedspanError, match=r"cannot write '.*train\.csv\.part': File too large"
        ) as told:
            sets.get(found)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(told.value)
    sets.get(found)
    assert len(fedspan.data.banking77()[0].y) == 12


def test_two_processes_get_the_same_data_set_once(server: Server) -> None:
    found = served(server, "banking77", questions())
    failed: list[BaseException] = []

    def get() -> None:
        try:
            sets.get(found)
        except BaseException as error:
            failed.append(error)

    with store.alone(lambda: None):  # a process that is at it
        both = [threading.Thread(target=get) for _ in range(2)]
        for one in both:
            one.start()
        both[0].join(0.3)
        assert not server.asked
    for one in both:
        one.join()
    assert not failed
    assert sorted(path for path, _ in server.asked) == [
        "/banking77/test.csv",
        "/banking77/train.csv",
    ]


def test_the_data_directory_may_begin_with_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDSPAN_DATA", "~/data")
    assert store.folder() == tmp_path / "data"
    monkeypatch.delenv("FEDSPAN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    if sys.platform == "linux":
        assert store.folder() == tmp_path / "cache/fedspan"


def test_an_example_without_its_data_ends_in_one_line(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune_minilm.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(Path(__file__).parents[2] / "examples/finetune_minilm.py"))
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "fedspan data get banking77" in told or "pip install 'fedspan[nlp]'" in told
