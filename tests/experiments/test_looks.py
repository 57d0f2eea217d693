"""Looks of the experiments' series: one palette, and no two alike in one figure."""

import itertools

import pytest

from _common import looks
from dpjax.results import plots
from experiments import (
    cifar_doppler,
    compare,
    dome_benchmark,
    mafalda_housing,
    pndp_accounting,
    spacetime_tradeoff,
    tracking_fusion,
)

FILTERS = ("none", "momentum", "first v1", "first v2", "second", *(f"f{k}" for k in range(1, 7)))
FIGURES = {
    "compare": tuple(compare.SYSTEMS),
    "cifar_doppler": ("sgd", "sgd + first v1", *cifar_doppler.CPU_RIVALS),
    "dome_benchmark": tuple(dome_benchmark.TITLES),
    "dome_spectrum": ("non_private", "adam", "dome", "uncentred"),
    "mafalda_housing": tuple(mafalda_housing.LABELS),
    "pndp_accounting": tuple(pndp_accounting.LABELS),
    "spacetime_tradeoff": tuple(spacetime_tradeoff.LABELS),
    "tracking_fusion": tracking_fusion.METHODS,
    "tracking_leakage": ("tracking", "correlated_randomness", "encrypted"),
    "filters": (*FILTERS, "adaptive", "wiener"),
    "spectra": ("gradient", "noise", "none", "momentum", "first v1", "second", "wiener"),
    "glue": ("adam", "adam + first v1", "adam, uncorrected"),
}
"""Series that stand in one figure."""


def looks_of(names):
    reference = plots.LOOKS | looks.LOOKS | looks.titled(names)
    return {name: reference[name] for name in names}


def test_palette_is_package_s():
    from tests.results.test_plots import PALETTE

    assert {look.color for look in looks.LOOKS.values()} <= PALETTE
    assert not set(looks.LOOKS) & set(plots.LOOKS)


@pytest.mark.parametrize("figure", FIGURES)
def test_no_two_series_of_figure_look_alike(figure):
    result = looks_of(FIGURES[figure])
    for (item, a), (other, b) in itertools.combinations(result.items(), 2):
        assert a.marker != b.marker, f"{item} and {other} have one marker"
        assert (a.color, str(a.line)) != (b.color, str(b.line)), f"{item} and {other}"


def test_filter_decides_look_of_optimizer():
    result = looks.titled(["sgd", "sgd + first v1", "adam", "adam + first v1", "0.1;-0.9"])
    assert [look.label for look in result.values()] == [
        "SGD", "SGD + first v1", "AdamBC", "AdamBC + first v1",
    ]  # fmt: skip
    assert (
        result["sgd + first v1"][1:] == result["adam + first v1"][1:] == looks.look("first v1")[1:]
    )
    assert looks.look("dome", "k = 8", ":", "P") == ("k = 8", "#AA4499", "P", ":")
