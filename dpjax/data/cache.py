"""Where data sets and one network are kept, and how files get there: whole or not at all."""

import contextlib
import fcntl
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpjax import _files

__all__ = ["folder"]

EGO = "facebook_ego"
EGO_SOURCE = (
    "a graph: SNAP ego-Facebook, McAuley and Leskovec 2012, ego 414; 148 agents, 1,692 edges"
)
EGO_URL = (
    "https://raw.githubusercontent.com/sunfanyunn/vGraph/"
    "f7dd98a3f28b01bd9e656aebdd46ed906383977b/data/facebook/414.edges"
)
_EGO_SHA256 = "1f5c9d43608a8cf6d56e27f1902f528cf7cf9ef1114afd3df7bc5888d7250fb1"
_ANSWER = 8.0  # seconds until a server must have answered


def folder() -> Path:
    """Return the cache: ``$DPJAX_DATA``, else ``$XDG_CACHE_HOME/dpjax``, else ``~/.cache/dpjax``.

    The folder need not exist yet.

    Example:
        >>> import pathlib
        >>> from dpjax.data import cache
        >>> isinstance(cache.folder(), pathlib.Path)
        True
    """
    # Read at each call: tests and jobs set it after the import.
    named = os.environ.get("DPJAX_DATA")
    if named:
        return Path(named).expanduser()
    # An empty variable is as one that is not set.
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dpjax"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` while the block runs: one process makes the file, others wait."""
    with _files.writing("path", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "wb")  # noqa: SIM115 - closed below
    with lock:
        # Waits: two processes that fetch one file would write over each other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(url: str | Sequence[str], path: _files.PathLike, *, sha256: str | None = None) -> Path:
    """Download a file of some megabytes; where from is said on standard error.

    Args:
        url: Where from, http or https; or several addresses of the same bytes, tried in turn.
        path: Where to; a file that is there already is returned as it is.
        sha256: Of the bytes, in hexadecimal; None where the caller checks what they decode to.

    Returns:
        The path.

    Raises:
        ValueError: If the bytes have another sha256.
        ConnectionError: If there is no network, or no server sends the file.
    """
    path = Path(path)
    reasons = []
    if os.path.exists(path):
        return path
    # Mirrors are tried in turn; their digests are the same.
    for address in [url] if isinstance(url, str) else url:
        try:
            with _opened(address, path) as reply:
                content = reply.read()
            break
        except (OSError, http.client.HTTPException) as error:
            reasons.append(_unreachable(address, error))
    else:
        raise ConnectionError(", ".join(reasons))
    # A mirror or a proxy may answer with a page of its own.
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        raise ValueError(
            f"url {address} gave a file of sha256 {digest[:12]}, not {str(sha256)[:12]}; fetch "
            "again, or get the file elsewhere"
        )
    with _files.writing("path", path):
        _files.replace(path, content)
    return path


def reach(url: str, path: Path) -> None:
    """Say that a file is fetched, and find out whether its server answers.

    Before a library fetches it, which may try for minutes where there is no network.

    Args:
        url: An address of the server, http or https.
        path: What will be made of it.

    Raises:
        ConnectionError: If nothing answers within 8 s.
    """
    try:
        _opened(url, path, "HEAD").close()
    except urllib.error.HTTPError as error:
        error.close()  # It answers, whatever it thinks of the address.
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(_unreachable(url, error)) from None


def _opened(url: str, path: Path, method: str = "GET") -> Any:
    _files.say(f"fetching {path.name} from {url}")
    # Some servers refuse Python's own agent.
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "dpjax"})
    return urllib.request.urlopen(request, timeout=_ANSWER)


def _unreachable(url: str, error: Exception) -> str:
    return f"{url} cannot be reached ({_files.brief(getattr(error, 'reason', None) or error)})"


def fetch_facebook_ego() -> Path:
    """Return the edge list of the ego network, fetched if the cache lacks it.

    What is kept is the largest component, each edge once, in the order of the published file, so
    that agents are numbered as in the papers' code.

    Returns:
        The file ``facebook_ego.edgelist``, for ``topology.graphs.facebook_ego``.

    Raises:
        ValueError: When it cannot be fetched, with the remedy, or is another file.
    """
    path = folder() / f"{EGO}.edgelist"
    if os.path.exists(path):
        return path
    with locked(path):
        raw = path.with_name("414.edges")
        try:
            fetch(EGO_URL, raw, sha256=_EGO_SHA256)
        except ConnectionError as error:
            raise ValueError(
                f"{path} does not exist, and {error}; get {EGO_URL} on a machine with a network "
                f"and put it into {path.parent} (DPJAX_DATA) as {raw.name}, or {path.name} there"
            ) from None
        with _files.writing("path", path):
            _files.replace(path, _largest_component(raw.read_text("ascii")).encode())
        raw.unlink()
    return path


def _largest_component(text: str) -> str:
    import networkx as nx

    edges = [tuple(line.split()[:2]) for line in text.splitlines() if line.strip()]
    # Gossip needs a connected network; the published one has small parts beside it.
    component = max(nx.connected_components(nx.Graph(edges)), key=len)
    edge_of_pair: dict[frozenset[str], tuple[str, ...]] = {}
    for edge in edges:  # The published file has each edge in both directions.
        if edge[0] in component:
            edge_of_pair.setdefault(frozenset(edge), edge)
    return "".join(f"{first} {second}\n" for first, second in edge_of_pair.values())
