"""The one network that is fetched: an ego network of Facebook."""

import os
from pathlib import Path

from dpjax import _files
from dpjax.data import cache

__all__: list[str] = []

NAME = "facebook_ego"
SOURCE = "a graph: SNAP ego-Facebook, McAuley and Leskovec 2012, ego 414; 148 agents, 1,692 edges"

_URL = (
    "https://raw.githubusercontent.com/sunfanyunn/vGraph/"
    "f7dd98a3f28b01bd9e656aebdd46ed906383977b/data/facebook/414.edges"
)
_SHA256 = "1f5c9d43608a8cf6d56e27f1902f528cf7cf9ef1114afd3df7bc5888d7250fb1"


def fetch(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the edge list of the ego network, fetched if the cache lacks it.

    What is kept is the largest component, each edge once, in the order of the published file, so
    that agents are numbered as in the papers' code.

    Args:
        folder: The cache; None is `cache.folder`.

    Returns:
        The file ``facebook_ego.edgelist``, for ``topology.graphs.facebook_ego``.

    Raises:
        ValueError: When it cannot be fetched, with the remedy, or is another file.
    """
    root = cache.folder() if folder is None else Path(folder).expanduser()
    path = root / f"{NAME}.edgelist"
    if os.path.exists(path):
        return path
    with cache.locked(path):
        raw = path.with_name("414.edges")
        try:
            cache.fetch(_URL, raw, sha256=_SHA256)
        except ConnectionError as error:
            raise ValueError(
                f"{path} does not exist, and {error}; get {_URL} on a machine with a network and "
                f"put it there as {raw.name}, or put {path.name} from another cache there"
            ) from None
        with _files.writing("path", path):
            _files.replace(path, _largest_component(raw.read_text("ascii")).encode())
        raw.unlink()
    return path


def _largest_component(text: str) -> str:
    import networkx as nx

    edges = [tuple(line.split()[:2]) for line in text.splitlines() if line.strip()]
    kept = max(nx.connected_components(nx.Graph(edges)), key=len)
    once: dict[frozenset[str], tuple[str, ...]] = {}
    for edge in edges:  # The published file has each edge in both directions.
        if edge[0] in kept:
            once.setdefault(frozenset(edge), edge)
    return "".join(f"{one} {other}\n" for one, other in once.values())
