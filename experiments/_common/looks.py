"""Looks of the series in all figures of the experiments, beside those of the noise designs.

A method has one look in all of them, whatever setting of it was tuned.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dpjax.contrib.central import TITLES
from dpjax.plans import noise
from dpjax.protocols import Look
from dpjax.results import plots

if TYPE_CHECKING:
    import pandas

__all__ = ["LOOKS", "accuracy", "counted", "look", "percent", "title", "titled", "words"]

LOOKS: dict[str, Look] = {
    # Systems at a server, and sketches of what is sent to one.
    "server": Look("server SGD", "#999933", "d", "-."),
    "fedavg": Look("DP-FedAvg", "#882255", "p", ":"),
    "dome": Look("DOME", "#AA4499", "P"),
    "uncentred": Look("DOME, no centre", "#44AA99", "^"),
    "fixed": Look("random sketch", "#44AA99", "X", "--"),
    "count": Look("count sketch", "#CC6677", "d", "-."),
    "oracle": Look("public directions", "#000000", "*", ":"),
    "whole": Look("whole gradients", "#0072B2", "v", "--"),
    # Gradient tracking and its rivals.
    "tracking": Look("gradient tracking", "#117733", "X"),
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
    "doppler": Look("independent, filtered", "#44AA99", "<", "-."),
    "doppler_whisper": Look("Whisper, whole run, filtered", "#CC79A7", ">", ":"),
    # What filters are measured on.
    "gradient": Look("gradient", "#D55E00", "o"),
    "noise": Look("noise", "#CC79A7", "^", ":"),
    # Optimizers, and methods beside a filter; the noise is that of `noise.PrefixSum(bands=b)`.
    "adam": Look("AdamBC", "#56B4E9", "v", "--"),
    "adam, uncorrected": Look("Adam, uncorrected", "#CC6677", "d", ":"),
    "galore": Look("GaLore", "#AA4499", "H", "-."),
    "momentum": Look("momentum", "#E69F00", "<", "-."),
    "nesterov": Look("Nesterov", "#117733", "^", "--"),
    "averaged": Look("averaged", "#D55E00", "o", "-."),
    "larger batch": Look("larger batch", "#CC79A7", "v", ":"),
    "banded": plots.LOOKS["prefix_sum"]._replace(label="banded noise (prefix sum)"),
    "banded, filtered": Look("banded noise, then momentum", "#CC6677", "d", "-."),
    "banded, together": Look("banded noise and filter, chosen together", "#009E73", "*", ":"),
    "DiSK": Look("DiSK", "#882255", "h"),
    "DiSK (Opacus)": Look("DiSK (Opacus)", "#332288", "8", "--"),
    "DiSK, two gradients": Look("DiSK, two gradients", "#CC6677", "H", ":"),
    "DP-PMLF": Look("DP-PMLF", "#56B4E9", ">", "-."),
    "muon": Look("Muon", "#44AA99", "P", "--"),
    # Clips and schedules.
    "automatic, flat": Look("automatic, flat", "#0072B2", "D"),
    "automatic, per layer": Look("automatic, per layer", "#56B4E9", "v", "--"),
    "Abadi, flat": Look("Abadi, flat", "#D55E00", "o", "-."),
    "Abadi, per layer": Look("Abadi, per layer", "#E69F00", "^", ":"),
    "constant": Look("constant", "#0072B2", "D"),
    "cosine": Look("cosine with warm-up", "#CC6677", "h", "--"),
    # Accounting, and bounds.
    "any": Look("any gradients", "#D55E00", "o"),
    "view": Look("exact, gradients of the view (paper)", "#0072B2", "^"),
    "plain": Look("Muffliato, plain numerator (Cyffers et al. 2022)", "#000000", "s", "--"),
    "squared": Look("Muffliato, squared numerator", "#999933", "D", ":"),
    "unrestricted": Look("lower bound", "#000000", "+", ":"),
}
"""By the names of records, in the colours of `dpjax.results.plots.LOOKS`."""

WORDS = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar10_small": "5,000 of CIFAR-10",
    "cifar100": "CIFAR-100",
    "sst2": "SST-2",
    "breast_cancer": "breast cancer",
    "linear": "linear model",
    "mlp": "MLP",
    "small_cnn": "small CNN",
    "cnn5": "five-layer CNN",
    "vit_tiny": "tiny ViT",
    "vit_small": "small ViT",
    "wrn16_4": "WRN-16-4",
    "wrn40_4": "WRN-40-4",
    "resnet50": "ResNet-50",
    "efficientnet": "EfficientNet",
    "facebook_ego": "Facebook ego",
    "florentine": "Florentine",
}
"""Data sets, models and graphs as figures name them, where their names say less."""


def words(name: str) -> str:
    """Return a data set, model or graph as figures name it.

    Args:
        name: In records and options.
    """
    return WORDS.get(name, name.replace("_", " "))


def counted(epochs: float) -> str:
    """Return a number of epochs in words.

    Args:
        epochs: The number.
    """
    return "1 epoch" if epochs == 1 else f"{epochs:g} epochs"


def accuracy(*names: str, of: str = "test accuracy") -> str:
    """Return the title of an axis of accuracies in per cent.

    Args:
        names: Of the data set and, where it matters, of the model.
        of: What is measured.
    """
    inside = ", ".join(map(words, names))
    return f"{of}, %" + (f" ({inside})" if names else "")


def percent(rows: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return rows with their test accuracy in per cent, as ``points``.

    Args:
        rows: Tidy rows.
    """
    return rows.assign(points=100 * rows["test_accuracy"])


def look(
    name: str, label: str | None = None, line: str | None = None, marker: str | None = None
) -> Look:
    """Return the look of a series.

    Args:
        name: In records; of "optimizer + filter" the filter decides, of "method: setting" the
            method.
        label: What the legend says in place of its usual title.
        line: Line style, for one of several runs of a kind.
        marker: The same.
    """
    reference = plots.LOOKS | LOOKS
    if name not in reference:
        name = name.split(" + ")[-1].partition(": ")[0]
    result = reference[name]
    return Look(label or result.label, result.color, marker or result.marker, line or result.line)


def titled(names: Iterable[str]) -> dict[str, Look]:
    """Return the looks of optimizers with filters and of their rivals, under the records' names.

    Args:
        names: Such as "sgd" (no filter), "sgd + first v1" and "banded: 8 bands"; names without a
            look are left out.
    """
    bare = {"sgd": look("none", "SGD"), "no filter": look("none")}
    results = {}
    for name in names:
        base, plus, text = name.partition(" + ")
        method, _, setting = name.partition(": ")
        label = f"{TITLES.get(base, base)}{plus}{text}" if plus else None
        with contextlib.suppress(KeyError):
            if setting:
                label = f"{look(method).label}, {setting}"
            results[name] = bare.get(name) or look(name, label)
    return results


def title(name: Any) -> Any:
    """Return a design or a method as figures name it.

    Args:
        name: In records; a name that has no look, and what is no text, stay as they are.
    """
    if not isinstance(name, str):
        return name
    known = titled([name])
    return known[name].label if known else noise.display_name(name)
