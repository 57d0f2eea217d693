"""python killed.py POINT K: `dpjax site run site.toml`, which kills itself at a point.

K is how often it comes there. With a third argument, the name of a signal, it sends itself that
one, and goes on if it may. POINTS are at the
arrows of a round: compute, store, send, receive, absorb. Nothing else of the package is changed.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Applies = Callable[..., bool]


def first(start: str) -> Applies:
    """A call whose first argument begins so."""
    return lambda *arguments: str(arguments[1]).startswith(start)


def frame(kind: int) -> Applies:
    """A call of `GrpcChannel.send` with a frame of `dpjax.sites.wire` of a number."""
    return lambda *arguments: arguments[2].startswith(bytes([0x92, kind]))


def target(part: str) -> Applies:
    """A call of os.link or os.replace whose new name has a part."""
    return lambda *arguments: part in str(arguments[1])


def always(*arguments: object) -> bool:
    return True


def is_receipt(*arguments: object) -> bool:
    """A call that takes a frame which is a receipt."""
    return type(arguments[2]).__name__ == "Receipt"


MESSAGE, RECEIPT, HEADERS = 2, 3, 4
# Place, function, which of its calls count, and whether the kill is before or after.
POINTS: dict[str, tuple[str, str, Applies, str]] = {
    "compute: before": ("SiteRounds", "outgoing", always, "before"),
    "compute: in memory": ("SiteRounds", "outgoing", always, "after"),
    "compute: not signed": ("Conversation", "store", always, "before"),
    "store: before": ("Folder", "create", first("sent/"), "before"),
    "store: by another name": ("os", "link", target("/sent/"), "before"),
    "store: the folder not synchronised": ("os", "link", target("/sent/"), "after"),
    "store: whole": ("Folder", "create", first("sent/"), "after"),
    "send: before": ("GrpcChannel", "send", frame(MESSAGE), "before"),
    "send: to one": ("GrpcChannel", "send", frame(MESSAGE), "after"),
    "send: all sent": ("Conversation", "send", always, "after"),
    "send: acknowledged": ("Conversation", "_take", is_receipt, "after"),
    "receive: before": ("Conversation", "_take_message", always, "before"),
    "receive: in memory": ("Conversation", "_take_message", always, "after"),
    "receive: the header on disk": ("Log", "keep", lambda *a: bool(a[1]), "after"),
    "receive: handed on": ("GrpcChannel", "send", frame(HEADERS), "after"),
    "absorb: before": ("Site", "_absorb", always, "before"),
    "absorb: headers": ("Folder", "append", first("headers"), "after"),
    "absorb: by another name": ("os", "replace", target("/state"), "before"),
    "absorb: state": ("Folder", "replace", first("state"), "after"),
    "absorb: sent gone": ("Folder", "delete", first("sent/"), "after"),
    "absorb: not acknowledged": ("Conversation", "_acknowledge", always, "before"),
    "absorb: acknowledged": ("GrpcChannel", "send", frame(RECEIPT), "after"),
}


def arm(point: str, number: int, sent: signal.Signals) -> None:
    """Put the kill in its place."""
    from dpjax.sites import carrier, compute, conversation, site, store

    places: dict[str, Any] = {
        "SiteRounds": compute.SiteRounds,
        "Site": site.Site,
        "Conversation": conversation.Conversation,
        "Log": store.Log,
        "Folder": store.Folder,
        "GrpcChannel": carrier.GrpcChannel,
        "os": os,
    }
    place, name, applies, when = POINTS[point]
    function = getattr(places[place], name)
    calls = 0

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        is_one = applies(*arguments)
        calls += is_one
        if is_one and calls == number and when == "before":
            os.kill(os.getpid(), sent)
        result = function(*arguments, **keywords)
        if is_one and calls == number and when == "after":
            os.kill(os.getpid(), sent)
        return result

    setattr(places[place], name, wrapped)


if __name__ == "__main__":
    from dpjax.cli import main

    sent = signal.Signals[sys.argv[3]] if len(sys.argv) > 3 else signal.SIGKILL
    arm(sys.argv[1], int(sys.argv[2]), sent)
    sys.argv = ["dpjax", "site", "run", "site.toml"]
    sys.exit(main())
