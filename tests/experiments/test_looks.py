"""Looks of the experiments' series: one palette, and no two alike in one figure."""

import itertools

import pandas
import pytest

from _common import looks, tables
from dpjax.results import plots
from dpjax.results import tables as plain_tables
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
CLIPS = itertools.product(("automatic", "Abadi"), ("flat", "per layer"))
FIGURES = {
    "compare": tuple(compare.SYSTEMS),
    "cifar_doppler": ("sgd", "sgd + first v1", *cifar_doppler.CPU_RIVALS),
    "long": (*cifar_doppler.PRESETS["long"].methods,),
    "long_together": (*cifar_doppler.PRESETS["long_together"].methods,),
    "long_cifar": (*cifar_doppler.PRESETS["long_cifar"].methods,),
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
    "clipping": tuple(f"{kind}, {way}" for kind, way in CLIPS),
    "schedules": ("constant", "cosine"),
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
        assert a.color != b.color, f"{item} and {other} have one colour"


@pytest.mark.mutant
def test_method_keeps_its_look_whatever_was_tuned():
    """Where a setting had a look in turn, one noise was blue, orange and green."""
    names = ["banded", "banded: 4 bands", "banded: 8 bands", "momentum: beta 0.9"]
    banded, *others, momentum = looks.titled(names).values()
    design = plots.LOOKS["prefix_sum"]
    assert banded[1:] == design[1:] and [item[1:] for item in others] == [design[1:]] * 2
    assert banded.label == "banded noise (prefix sum)"
    assert others[1].label == "banded noise (prefix sum), 8 bands"
    assert momentum == looks.look("momentum", "momentum, beta 0.9")
    assert not looks.titled(["1 of its own: 3"])


@pytest.mark.parametrize("figure", FIGURES)
def test_every_series_has_look(figure):
    assert all(looks_of(FIGURES[figure]).values())


def test_axes_are_in_words_and_per_cent():
    assert looks.accuracy("mnist", "small_cnn") == "test accuracy, % (MNIST, small CNN)"
    assert looks.accuracy() == "test accuracy, %"
    rows = pandas.DataFrame({"test_accuracy": [0.5, 0.97]})
    assert looks.percent(rows)["points"].tolist() == [50.0, 97.0]
    assert looks.words("replace_agent") == "replace agent"
    assert [looks.counted(number) for number in (1.0, 2.5)] == ["1 epoch", "2.5 epochs"]


def test_filter_decides_look_of_optimizer():
    result = looks.titled(["sgd", "sgd + first v1", "adam", "adam + first v1", "0.1;-0.9"])
    assert [look.label for look in result.values()] == [
        "SGD", "SGD + first v1", "AdamBC", "AdamBC + first v1",
    ]  # fmt: skip
    assert (
        result["sgd + first v1"][1:] == result["adam + first v1"][1:] == looks.look("first v1")[1:]
    )
    assert looks.look("dome", "k = 8", ":", "P") == ("k = 8", "#AA4499", "P", ":")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("whisper_horizon", "Whisper, whole run"),
        ("whisper_horizon(horizon=3)", "Whisper (horizon=3)"),
        ("Whisper, whole run", "Whisper, whole run"),
        ("sgd + first v1", "SGD + first v1"),
        ("banded: 8 bands", "banded noise (prefix sum), 8 bands"),
        ("diff_tv_ab", "Diff-TV-AB"),
        ("non_private", "non-private"),
        ("mine", "mine"),
        (None, None),
    ],
)
def test_tables_have_names_of_figures(name, title):
    assert looks.title(name) == title
    rows = [{"design": name, "seed": 0}, {"design": "independent", "seed": 1}]
    shown = [{"design": title, "seed": 0}, {"design": "independent", "seed": 1}]
    for kind in (list, pandas.DataFrame):
        assert tables.text(kind(rows)) == plain_tables.text(kind(shown))
        assert tables.text(kind(rows), ["seed"]) == plain_tables.text(shown, ["seed"])
    renamed = [{"setting" if key == "design" else key: row[key] for key in row} for row in rows]
    assert tables.text(renamed) == plain_tables.text(renamed)
