"""The cache folder and downloads, against a server in this process that can break off."""

import hashlib
import threading
import time
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dpjax.data import cache, catalog, load

BODY = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """A server of one file; what it does wrong is set by the tests."""

    asked = 0
    breaks = 0  # answers to break off
    status = 200
    body = BODY

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked += 1
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        body = self.server.body
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent = body
        if self.server.breaks:
            self.server.breaks -= 1
            sent = body[:100_000]
        self.wfile.write(sent)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_folder_is_named_one_then_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPJAX_DATA", "~/mine")
    assert cache.folder() == Path("~/mine").expanduser()
    monkeypatch.delenv("DPJAX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache.folder() == Path("/some/cache/dpjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "dpjax"


def test_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert cache.fetch(server.url, path, sha256=SHA256) == path
    assert cache.fetch(server.url, path, sha256=SHA256) == path
    assert path.read_bytes() == BODY and server.asked == 1
    assert list(path.parent.iterdir()) == [path]


def test_another_file_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.body = BODY[::-1]
    with pytest.raises(ValueError, match="gave a file of sha256 .*; fetch again"):
        cache.fetch(server.url, tmp_path / "file", sha256=SHA256)
    assert not list(tmp_path.iterdir())


def test_second_address_serves(server: Server, tmp_path: Path) -> None:
    gone = "http://127.0.0.1:1/file"
    path = tmp_path / "file"
    assert cache.fetch([gone, server.url], path, sha256=SHA256).read_bytes() == BODY


def test_no_network_and_no_file_are_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="127.0.0.1:1/file cannot be reached"):
        cache.fetch("http://127.0.0.1:1/file", tmp_path / "file")
    server.status = 404
    with pytest.raises(ConnectionError, match=r"cannot be reached \(Not Found"):
        cache.fetch(server.url, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    server.status = 200
    server.breaks = 1
    with pytest.raises(ConnectionError, match=r"IncompleteRead\(100000 bytes read"):
        cache.fetch(server.url, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_lock_lets_one_in(tmp_path: Path) -> None:
    order = []
    path = tmp_path / "file"

    def other() -> None:
        with cache.locked(path):
            order.append("other")

    thread = threading.Thread(target=other)
    with cache.locked(path):
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


class Silent(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802
        self.server.asked.wait(20)  # type: ignore[attr-defined]

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *words: object) -> None:
        pass


def test_server_that_does_not_answer_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is fetched is said at once, and nothing is tried again."""
    monkeypatch.setattr(cache, "_ANSWER", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as running:
        running.daemon_threads = True
        running.asked = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/file"
        began = time.monotonic()
        try:
            for fetch in (cache.fetch, cache.reach):
                with pytest.raises(ConnectionError, match=r"reached \(.*timed out"):
                    fetch(url, tmp_path / "file")
                assert f"fetching file from {url}\n" in capsys.readouterr().err
            assert time.monotonic() - began < 5
        finally:
            running.asked.set()  # type: ignore[attr-defined]
            running.shutdown()


def test_unreachable_server_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn and tensorflow-datasets would try for minutes."""

    def no_network(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(cache.urllib.request, "urlopen", no_network)
    for name in ("housing", "mnist", "fashion_mnist", "cifar10", "cifar100"):
        message = rf"{name}.npz does not exist, and {catalog.SETS[name].host} cannot be reached"
        with pytest.raises(ValueError, match=message):
            load.load(name, cache=tmp_path)
