"""Looks of the series in all figures of the experiments, beside those of the noise designs."""

import contextlib
from collections.abc import Iterable

from dpjax.contrib.central import TITLES
from dpjax.protocols import Look
from dpjax.results import plots

__all__ = ["LOOKS", "look", "titled"]

LOOKS: dict[str, Look] = {
    # Systems at a server, and sketches of what is sent to one.
    "server": Look("server SGD", "#999933", "d", "-."),
    "adam": Look("Adam", "#56B4E9", "v", "--"),
    "momentum": Look("momentum", "#999933", "<", "-."),
    "fedavg": Look("DP-FedAvg", "#882255", "p", ":"),
    "dome": Look("DOME", "#AA4499", "P"),
    "uncentred": Look("DOME, no centre", "#44AA99", "^"),
    "fixed": Look("random sketch", "#44AA99", "X", "--"),
    "count": Look("count sketch", "#CC6677", "d", "-."),
    "oracle": Look("public directions", "#000000", "*", ":"),
    "whole": Look("whole gradients", "#0072B2", "v", "--"),
    # Gradient tracking and its rivals.
    "tracking": Look("tracking", "#117733", "X"),
    "dpop": Look("DPOP", "#56B4E9", "s", "--"),
    "pp_doagt": Look("PP-DOAGT", "#882255", "^", "-."),
    "diff_tv_ab": Look("Diff-TV-AB", "#E69F00", "d", ":"),
    "correlated_randomness": Look("correlated randomness", "#AA4499", "8", "-."),
    "encrypted": Look("encrypted", "#332288", "P", "--"),
    # Filters, and whole systems with one.
    "none": Look("no filter", "#000000", "s", "--"),
    "first v1": Look("first v1", "#0072B2", "D"),
    "first v2": Look("first v2", "#44AA99", "v", "--"),
    "second": Look("second", "#882255", "P", "-."),
    "f1": Look("f1", "#D55E00", "o"),
    "f2": Look("f2", "#117733", ">", "--"),
    "f3": Look("f3", "#CC79A7", "^", "-."),
    "f4": Look("f4", "#332288", "p", ":"),
    "f5": Look("f5", "#CC6677", "h", "--"),
    "f6": Look("f6", "#56B4E9", "X"),
    "adaptive": Look("adaptive", "#AA4499", "d", ":"),
    "wiener": Look("Wiener", "#009E73", "*", ":"),
    "doppler": Look("DOPPLER on LDP", "#44AA99", "<", "-."),
    "doppler_whisper": Look("DOPPLER on Whisper", "#CC79A7", ">", ":"),
    # What filters are measured on.
    "gradient": Look("gradient", "#D55E00", "o"),
    "noise": Look("noise", "#E69F00", "^", ":"),
    # Optimizers beside a filter.
    "nesterov": Look("Nesterov", "#117733", "^", "--"),
    "averaged": Look("averaged", "#D55E00", "o", "-."),
    "larger batch": Look("larger batch", "#CC79A7", "v", ":"),
    "banded": Look("banded", "#E69F00", "p"),
    "DiSK": Look("DiSK", "#882255", "h"),
    "DiSK (Opacus)": Look("DiSK (Opacus)", "#332288", "8", "--"),
    "DiSK, two gradients": Look("DiSK, two gradients", "#CC6677", "H", ":"),
    "DP-PMLF": Look("DP-PMLF", "#56B4E9", "X", "-."),
    "muon": Look("Muon", "#44AA99", "*", "--"),
    "adam, uncorrected": Look("Adam, uncorrected", "#CC6677", "d", ":"),
    # Accounting, and bounds.
    "any": Look("any gradients", "#D55E00", "o"),
    "view": Look("exact, gradients of the view (paper)", "#0072B2", "^"),
    "plain": Look("Muffliato, plain numerator (Cyffers et al. 2022)", "#000000", "s", "--"),
    "squared": Look("Muffliato, squared numerator", "#999933", "D", ":"),
    "unrestricted": Look("lower bound", "#000000", "+", ":"),
}
"""By the names of records, in the colours of `dpjax.results.plots.LOOKS`."""


def look(
    name: str, label: str | None = None, line: str | None = None, marker: str | None = None
) -> Look:
    """Return the look of a series.

    Args:
        name: In records; of "optimizer + filter" the filter decides.
        label: What the legend says in place of its usual title.
        line: Line style, for one of several runs of a kind.
        marker: The same.
    """
    reference = plots.LOOKS | LOOKS
    result = reference[name if name in reference else name.split(" + ")[-1]]
    return Look(label or result.label, result.color, marker or result.marker, line or result.line)


def titled(names: Iterable[str]) -> dict[str, Look]:
    """Return the looks of optimizers with filters, under the names that records have.

    Args:
        names: Such as "sgd" (no filter) and "sgd + first v1"; names without a look are left out.
    """
    bare = {"sgd": look("none", "SGD"), "no filter": look("none")}
    results = {}
    for name in names:
        base, plus, text = name.partition(" + ")
        label = f"{TITLES.get(base, base)}{plus}{text}" if plus else TITLES.get(name)
        with contextlib.suppress(KeyError):
            results[name] = bare.get(name) or look(name, label)
    return results
