"""What `dpjax plot` draws: every committed record by its columns, and what it must not mix."""

from pathlib import Path

import pytest

from dpjax import cli
from dpjax.protocols import Look
from dpjax.results import plots, records

pandas = pytest.importorskip("pandas")

ROOT = Path(__file__).resolve().parents[2]

STORED = Path(__file__).parents[2] / "docs" / "records"
FINAL = "phase=final"
DRAWN = {
    "cifar_doppler": ("epsilon", "test_loss", "design",
                      [FINAL, "dataset=cifar10_small", "setting=SGD"]),
    "cifar_doppler_long": ("round", "test_loss", "design", [FINAL, "budget_epsilon=1"]),
    "cifar_doppler_long_cifar": ("round", "test_loss", "design", [FINAL]),
    "cifar_doppler_long_cifar100": ("round", "test_loss", "design", [FINAL]),
    "cifar_doppler_long_paper": ("round", "test_loss", "design", [FINAL]),
    "cifar_doppler_long_together": ("round", "test_loss", "design",
                                    [FINAL, "budget_epsilon=8"]),
    "compare": ("bytes_sent", "test_loss", "system", [FINAL, "dataset=a9a", "budget_epsilon=3"]),
    "dome_benchmark": ("k", "test_loss", "design", [FINAL, "dataset=a9a", "budget_epsilon=3"]),
    "dome_gossip": ("hops", "test_loss", "system",
                    [FINAL, "epsilon=3", "graph=complete", "rule=sgd"]),
    "dome_spectrum": ("directions", "share", "k",
                      ["dataset=a9a", "budget_epsilon=10", "trained=dome"]),
    "dome_tcp": ("round", "test_accuracy", "way", [FINAL, "sketch=16"]),
    "doppler_ablations": ("round", "value", "series", []),
    "doppler_decentralised": ("round", "test_loss", "filter", [FINAL, "design=independent"]),
    "doppler_spectra": ("frequency", "gain", "series", ["kind=gain"]),
    "glue_doppler": ("round", "test_loss", "design", [FINAL, "budget_epsilon=8"]),
    "mafalda_housing": ("epsilon", "test_loss", "design", ["graph=florentine"]),
    "pndp_accounting": ("pairs", "mean", "algorithm", ["mixing=uniform"]),
    "sites_accuracy": ("budget_epsilon", "test_accuracy", "design",
                       [FINAL, "agents=9", "way=sites"]),
    "spacetime_tradeoff": ("rounds", "test_loss", "design", [FINAL, "graph=ring"]),
    "tracking_fusion": ("gamma", "rounds", "algorithm",
                        ["setting=1", "norm=an agent", "steps=tuned"]),
    "tracking_leakage": ("round", "value", "algorithm", []),
    "tracking_leakage_few": ("round", "value", "algorithm", []),
    "tracking_mnist": ("beta", "test_loss", "design",
                       ["part=border", "gamma=0.1", "step_size=0.1"]),
    "tracking_mnist_long": ("round", "train_loss", "design", ["part=methods"]),
    "tracking_mnist_printed": ("round", "test_loss", "mode", []),
    "whisper_departure": ("round", "test_loss", "policy", ["design=whisper"]),
    "whisper_logistic": ("budget_epsilon", "test_loss", "design",
                         [FINAL, "probability=0.5", "budget_name=gdp", "unit=agent"]),
    "whisper_quadratic": ("budget_epsilon", "optimality_gap", "design",
                          ["start=origin", "probability=0.5", "step_size=0.01"]),
    "whisper_variance": ("epsilon", "energy", "design", ["accountant=gdp", "probability=0.5"]),
}  # fmt: skip
"""Columns across, up and of series, and what rows must keep."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.name.partition(".")[0] for path in STORED.glob("*.gz"))
)
def test_every_committed_record_is_drawn(name: str, tmp_path: Path) -> None:
    x, y, series, conditions = DRAWN[name]
    words = [word for condition in conditions for word in ("--where", condition)]
    command = ["plot", str(STORED / f"{name}.jsonl.gz"), "--x", x, "--y", y, "--series", series]
    assert cli.main([*command, *words, "--out", str(tmp_path / "it.svg")]) == 0
    assert any(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_conditions_keep_rows_or_say_what_there_is() -> None:
    frame = pandas.DataFrame({"a": [0.1, 0.5, 1.0], "b": ["x", "y", "y"], "c": [True, False, True]})
    assert list(plots._chosen(plots._chosen(frame, "b=y"), "a=0.50")["a"]) == [0.5]
    assert list(plots._chosen(frame, "c=true")["a"]) == [0.1, 1.0]
    with pytest.raises(ValueError, match="where is 'b=z', of which .* row; choose one of x, y"):
        plots._chosen(frame, "b=z")
    with pytest.raises(ValueError, match="where is 'd'; choose one of a, b, c"):
        plots._chosen(frame, "d=1")
    with pytest.raises(ValueError, match="write column=value"):
        plots._chosen(frame, "b")


def test_metadata_say_what_is_drawn_unless_asked(tmp_path: Path) -> None:
    rows = [{"kind": k, "distance": d, "mu": 1.0 + d} for k in "ab" for d in (1, 1, 2)]
    reported = {"plot": {"x": "distance", "y": "mu", "series": "kind"}}
    path = records.write(tmp_path / "r.jsonl", rows, reported)
    figure = plots.from_records(path)
    assert figure.name == "r_mu_distance.svg" and "means over 1 to 2 rows" in figure.read_text()
    with pytest.raises(ValueError, match="series is 'size'; choose one of kind, distance, mu"):
        plots.from_records(path, series="size")


def test_metadata_may_choose_rows_too(tmp_path: Path) -> None:
    rows = [
        {"kind": k, "phase": p, "data": d, "seed": s, "x": x, "loss": x + s}
        for k in "ab" for p in ("final", "tuning") for d in ("one", "two") for s in (0, 1)
        for x in (1.0, 10.0)
    ]  # fmt: skip
    stored = {"x": "x", "y": "loss", "series": "kind", "where": ["phase=final", "data=one"]}
    path = records.write(tmp_path / "r" / "a.jsonl", rows, {"plot": stored | {"log_x": True}})
    assert "<!-- 10 -->" in plots.from_records(path).read_text()
    assert plots.from_records(tmp_path / "r").name == "r_loss_x.svg"
    # Another value of a column takes the place of the stored one, other conditions stay.
    plots.from_records(path, where=["data=two"])
    with pytest.raises(ValueError, match="where is 'data=three', of which there is no row"):
        plots.from_records(path, where=["data=three"])


@pytest.mark.slow
def test_all_systems_are_drawn_over_budgets(tmp_path: Path) -> None:
    text = plots.from_records(STORED / "compare.jsonl.gz", out=tmp_path / "a.svg").read_text()
    # Metadata choose one of two data sets, which the caption says.
    assert "Rows of dataset = a9a, phase = final." in text
    for name in ("server SGD", "DOME", "gradient tracking", *plots._FORMER.values()):
        assert f"<!-- {name} -->" in text
    # Its records have names of before.
    assert not any(f"<!-- {name} -->" in text for name in plots._FORMER)
    assert all(f"<!-- {epsilon} -->" in text for epsilon in (3, 10, 30))
    figure = plots.from_records(STORED / "compare.jsonl.gz", file="digits_epochs_*",
                              out=tmp_path / "b.svg")  # fmt: skip
    assert "k = 10, b = 10" in " ".join(figure.read_text().split())
    pair = {"where": ["dataset=digits"], "out": tmp_path / "c.svg"}
    with pytest.raises(
        ValueError, match=r"choose some of the files first, or one value of .* \(where \w+="
    ):
        plots.from_records(STORED / "compare.jsonl.gz", **pair)


def test_noise_of_whole_run_is_drawn_first(tmp_path: Path) -> None:
    figure = plots.from_records(STORED / "whisper_variance.jsonl.gz", out=tmp_path / "a.svg")
    assert "<!-- trajectory energy -->" in figure.read_text()


def test_axes_are_logarithmic_where_asked(tmp_path: Path) -> None:
    rows = [{"design": "a", "epsilon": e, "seed": 0, "loss": 10 / e} for e in (0.1, 1, 20.0)]
    path = records.write(tmp_path / "r.jsonl", rows, {})
    plain = plots.from_records(path, x="epsilon", y="loss").read_bytes()
    assert plots.from_records(path, x="epsilon", y="loss", log_y=True).read_bytes() != plain


def test_lines_told_apart_by_number_say_which(tmp_path: Path) -> None:
    rows = [{"clip_norm": c, "epsilon": e, "seed": 0, "loss": 1.0} for e in (1.0, 2.0)
            for c in (1.0, 0.3)]  # fmt: skip
    path = records.write(tmp_path / "r.jsonl", rows, {})
    text = plots.from_records(path, x="epsilon", y="loss", series="clip_norm").read_text()
    assert text.index("<!-- clip norm 0.3 -->") < text.index("<!-- clip norm 1 -->")


@pytest.mark.slow
def test_several_files_and_pdf(tmp_path: Path) -> None:
    for name in ("whisper", "pairwise"):
        rows = [{"design": name, "round": r, "seed": 0, "test_loss": 1 / r} for r in (1, 2)]
        records.write(tmp_path / f"{name}.jsonl", rows, {})
    pair = [tmp_path / "whisper.jsonl", tmp_path / "pairwise.jsonl"]
    text = plots.from_records(pair).read_text()
    assert "pairwise" in text and "Whisper" in text
    first = plots.from_records(pair, out=tmp_path / "a.pdf").read_bytes()
    assert first.startswith(b"%PDF") and b"CreationDate" not in first and b"One seed." in first
    assert plots.from_records(pair, out=tmp_path / "b.pdf").read_bytes() == first


def rows(**extra: object) -> list[dict[str, object]]:
    """Two algorithms and phases, a round's accuracy and loss."""
    return [
        {"design": a, "phase": p, "seed": s, "accuracy": 0.1 * r + s + len(p), "loss": 1.0 / r}
        | {"round": r, **extra}
        for a in "ab" for p in ("final", "tuning") for s in (0, 1) for r in (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plot", "options", "reported"),
    [
        ("abc", {}, "of whose metadata plot is 'abc'; give texts 'x'"),
        (["x"], {}, "of whose metadata plot is"),
        ({"x": 3}, {}, "of whose metadata plot is"),
        ({"where": "phase=final"}, {}, "of whose metadata plot is"),
        ({"where": [3]}, {}, "of whose metadata plot is {'where': .3.}; give .* a list of texts"),
        ({"log_x": "false"}, {}, "of whose metadata plot is .* true or false 'log_x', 'log_y'"),
        ({}, {"y": ""}, "y is ''; choose one of"),
        ({}, {"x": ""}, "x is ''; choose one of"),
        ({}, {"series": ""}, "series is ''; choose one of"),
        ({}, {"file": "b*"}, "file is 'b.', of which there is none; there are a$"),
        ({}, {"where": ["phase=final", "phase=tuning"]},
         "where is phase=final, phase=tuning; give one condition on each column"),
        ({}, {"where": ["phase=final"], "y": "debt", "log_y": True},
         "log_y is True, and no debt is above 0; leave it out"),
        ({}, {"where": ["phase=final", "round=2"], "x": "debt", "log_x": True},
         "log_x is True, and no debt is above 0; leave it out"),
        ({}, {"y": "loss"}, r"seed = 0; choose one value of phase first \(where phase=final"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_by_its_name(
    plot: object, options: dict[str, object], reported: str, tmp_path: Path
) -> None:
    path = records.write(tmp_path / "a.jsonl", rows(debt=-1.0), {"plot": plot})
    with pytest.raises(ValueError, match=reported):
        plots.from_records(path, **options)
    assert [item.name for item in tmp_path.iterdir()] == ["a.jsonl"]


def test_records_without_rows_are_named_plainly(tmp_path: Path) -> None:
    path = records.write(tmp_path / "a.jsonl", [], {})
    with pytest.raises(ValueError, match="^path is '[^']*/a.jsonl', whose records have no rows"):
        plots.from_records((path,))


def test_stored_scale_is_that_of_its_column(tmp_path: Path) -> None:
    stored = {"y": "loss", "where": ["phase=final"], "log_y": True}
    path = records.write(tmp_path / "a.jsonl", rows(debt=-1.0), {"plot": stored})
    assert plots.from_records(path, y="debt").name == "a_debt_round.svg"


def test_files_are_chosen_where_they_are_no_archive_too(tmp_path: Path) -> None:
    paths = [
        records.write(tmp_path / f"{name}.jsonl", [r for r in rows() if r["design"] == name],
                      {"plot": {"y": "loss", "where": ["phase=final"]}} if name == "b" else {})
        for name in "ab"
    ]  # fmt: skip
    assert set(records.read(tmp_path, "b")["design"]) == {"b"}
    assert plots.from_records(paths, file="b").name == "a_loss_round.svg"


def test_rows_without_seed_are_no_seeds(tmp_path: Path) -> None:
    arguments = [r | {"seed": None} for r in rows() if r["seed"] == 0]
    path = records.write(tmp_path / "a.jsonl", arguments, {})
    for where in (["phase=final"], ["phase=final", "seed=None"]):
        assert "seed." not in plots.from_records(path, where=where, y="loss").read_text()
    with pytest.raises(ValueError, match="choose one value of phase first"):
        plots.from_records(path, y="loss")


def test_designs_are_called_as_in_tables(tmp_path: Path) -> None:
    named = [r | {"design": "whisper_horizon" if r["design"] == "a" else "DECOR"} for r in rows()]
    path = records.write(tmp_path / "a.jsonl", named, {"plot": {"where": ["phase=final"]}})
    text = plots.from_records(path, y="loss").read_text()
    assert "<!-- Whisper, whole run -->" in text and "<!-- pairwise -->" in text
    text = plots.from_records(path, y="loss", where=["design=whisper_horizon"]).read_text()
    assert "Rows of design = Whisper, whole run, phase = final." in text
    # Whoever draws rows decides what they are called.
    frame = records.read(path)
    frame = frame[frame["phase"] == "final"]
    figure = plots.lines(frame, "round", "loss", looks={"DECOR": Look("D", "#000000", "o")})
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels == ["Whisper, whole run", "D"]


def test_missing_cells_may_be_chosen(tmp_path: Path) -> None:
    arguments = [{k: v for k, v in r.items() if k != "phase" or v == "final"} for r in rows()]
    path = records.write(tmp_path / "a.jsonl", arguments, {})
    text = plots.from_records(path, where=["phase=nan"], y="loss").read_text()
    assert "Rows of phase = nan." in text


def test_names_with_dollar_signs_are_shown_as_they_are(tmp_path: Path) -> None:
    arguments = [r | {"design": f"${r['design']}^{{_$", "$^{$": 1.0} for r in rows()]
    path = records.write(tmp_path / "a.jsonl", arguments, {})
    text = plots.from_records(path, where=["phase=final"], y="$^{$", x="round").read_text()
    assert "<!-- $^{$ -->" in text and "<!-- $a^{_$ -->" in text


@pytest.mark.slow
def test_committed_comparison_is_drawn(tmp_path):
    archive = ROOT / "docs/records/compare.jsonl.gz"
    out = tmp_path / "figure.png"
    assert plots.from_records(archive, out=out) == out
    # One budget leaves every system; one system's setting would leave few.
    with pytest.raises(ValueError, match="choose one value of budget_epsilon, .*setting.* first"):
        plots.from_records(archive, x="round", out=out)
    selection = {"where": ["budget_epsilon=10"], "x": "round", "y": "test_loss", "out": out}
    assert plots.from_records(archive, **selection) == out
    # Of two sets of rounds on one data set a file's name chooses, which the list tells.
    with pytest.raises(ValueError, match=r"choose some of the files first"):
        plots.from_records(archive, where=["dataset=digits"], out=out)
    with pytest.raises(ValueError, match="there are a9a_adam_10, .*digits_epochs_.*"):
        plots.from_records(archive, file="which", out=out)
    digits = {"where": ["dataset=digits"], "file": "digits_epochs_*", "out": out}
    assert plots.from_records(archive, **digits) == out
