"""Figures: same rows, same bytes; fixed colours; the guarantee in every caption."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.accounting.guarantee import Guarantee
from dpjax.protocols import Look
from dpjax.results import plots, records

pandas = pytest.importorskip("pandas")

SCRIPT = """
import sys, hashlib, pandas
from dpjax.results import plots
rows = [
    {"design": a, "seed": s, "round": r, "test_loss": k / r + 0.01 * s}
    for k, a in enumerate(plots.TITLES) for s in range(3) for r in (1, 2, 3)
]
made = plots.lines(pandas.DataFrame(rows), "round", "test_loss", path=sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules, "a display may be missing"
print(hashlib.sha256(made.read_bytes()).hexdigest())
"""


def guarantee(epsilon):
    return Guarantee.of(
        epsilon=epsilon, delta=1e-5, mu=float(gdp.mu(epsilon, 1e-5)), relation="replace_agent",
        attacker="outsider", rounds=300, clip_norm=0.1, accountant="gdp", release=False,
    )  # fmt: skip


def make_rows(algorithms=tuple(plots.TITLES), seeds=3, epsilons=(3.0, 10.0)):
    held = {e: guarantee(e).to_dict() for e in epsilons}
    nothing = Guarantee.none(300).to_dict()
    return [
        {
            "experiment": "demo", "design": a, "phase": "final",
            "epsilon": math.inf if a == "non_private" else e, "budget_epsilon": e, "seed": s,
            "round": r, "test_loss": 0.3 + k / e + 30 / r + 0.02 * s, "accuracy": 0.9,
            "guarantee": nothing if a == "non_private" else held[e],
        }
        for k, a in enumerate(algorithms)
        for e in epsilons
        for s in range(seeds)
        for r in (100, 200, 300)
    ]  # fmt: skip


@pytest.fixture
def frame():
    return pandas.DataFrame(make_rows())


@pytest.fixture
def ten(frame):
    return frame[frame["budget_epsilon"] == 10]


def texts(figure):
    return [text.get_text() for text in figure.texts]


def boxes(figure):
    renderer = figure.canvas.get_renderer()
    written = [*figure.texts, *figure.legends]
    panels = [ax.get_tightbbox(renderer) for ax in figure.axes]
    return [artist.get_window_extent(renderer) for artist in written], panels


def assert_tidy(figure):
    """Nothing leaves the sheet, and legend and caption lie clear of the panels."""
    written, panels = boxes(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for box in [*written, *panels]:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    for box in written:
        assert not any(box.overlaps(panel) for panel in panels)


@pytest.mark.slow
def test_same_rows_give_same_bytes(tmp_path):
    def drawn(name, seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "MPLBACKEND": "svg"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / name)],
            capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert drawn("a.svg", "1") == drawn("b.svg", "2")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_another_drawing_in_process_gives_same_bytes(tmp_path, ten, ending):
    paths = [
        plots.lines(ten, "round", "test_loss", path=tmp_path / f"{name}.{ending}") for name in "ab"
    ]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    changed = ten.assign(test_loss=ten["test_loss"] * 1.5)
    other = plots.lines(changed, "round", "test_loss", path=tmp_path / f"c.{ending}")
    assert other.read_bytes() != first
    for word in (b"<dc:date>", b"matplotlib.org", b"Software"):
        assert word not in first


def test_users_settings_do_not_change_figure(tmp_path, ten):
    import matplotlib

    first = plots.lines(ten, "round", "test_loss", path=tmp_path / "a.svg").read_bytes()
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": "other"}):
        second = plots.lines(ten, "round", "test_loss", path=tmp_path / "b.svg").read_bytes()
        assert matplotlib.rcParams["font.size"] == 20
    assert first == second


def test_caption_holds_guarantee(tmp_path, ten):
    caption = guarantee(10.0).caption()
    figure = plots.lines(ten, "round", "test_loss")
    assert caption in plots.finish(figure)
    display = " ".join(texts(figure)).replace("\n", " ")
    assert caption in display
    assert "means over 3 seeds, bands one standard error" in display
    # The text is drawn as outlines; it is in the file for search and screen readers too.
    for ending in ("svg", "png"):
        assert caption.encode() in plots.save(figure, tmp_path / f"a.{ending}").read_bytes()


@pytest.mark.parametrize(
    "value", ["(epsilon = 5)-DP, a test's", guarantee(5.0), guarantee(5.0).to_dict()]
)
def test_guarantee_may_be_given(ten, value):
    figure = plots.lines(ten, "round", "test_loss", guarantee=value)
    caption = plots.finish(figure)
    assert "epsilon = 5" in caption and "epsilon = 10" not in caption


def test_rows_without_guarantee_claim_none(ten):
    figure = plots.lines(ten.drop(columns="guarantee"), "round", "test_loss")
    assert "Guarantee" not in plots.finish(figure)


PALETTE = {
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
    *("#332288", "#117733", "#44AA99", "#999933", "#CC6677", "#882255", "#AA4499"),
}
"""Okabe and Ito's colours but yellow, and Tol's muted ones but the two light ones."""


def appearance(line):
    return line.get_color(), line.get_marker(), line.get_linestyle(), line.get_markerfacecolor()


def test_algorithms_keep_their_look_in_any_company(ten):
    looks = plots.LOOKS.values()
    assert len({look.marker for look in looks}) == len({look.label for look in looks}) == len(looks)
    assert len({(look.color, str(look.line)) for look in looks}) == len(looks)
    assert {look.color for look in looks} | set(plots._COLORS) <= PALETTE
    for names in (["whisper"], ["central", "whisper", "non_private"]):
        figure = plots.lines(ten[ten["design"].isin(names)], "round", "test_loss")
        drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
        for name in names:
            label, *look = plots.LOOKS[name]
            assert list(appearance(drawn[label])[:3]) == look


def test_looks_may_be_given(ten):
    own = {
        "whisper": Look("W", "#123456", "8", "-."),
        "mine": Look("M", "#654321", "d"),
    }
    first = ten[ten["design"] == "whisper"]
    pair = pandas.concat([first, first.assign(design="mine")])
    lines = plots.lines(pair, "round", "test_loss", looks=own).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["W", "M"]
    assert [line.get_color() for line in lines] == ["#123456", "#654321"]


def test_series_looks_same_in_all_panels(ten):
    single = ten[ten["design"] == "whisper"]
    figure, panels = plots.figure(1, 3)
    for ax, names in zip(panels, (["a", "b", "c"], ["c", "d"], ["b"]), strict=True):
        rows = pandas.concat([single.assign(design=name) for name in names])
        plots.lines(rows, "round", "test_loss", ax=ax)
    observed = {}
    for line in (line for ax in panels for line in ax.get_lines()):
        assert observed.setdefault(line.get_label(), appearance(line)) == appearance(line)
    assert len(set(observed.values())) == len(observed) == 4


def test_title_is_drawn_as_its_algorithm(ten):
    single = ten[ten["design"] == "whisper"].assign(design="Whisper")
    (line,) = plots.lines(single, "round", "test_loss").axes[0].get_lines()
    assert line.get_color() == plots.LOOKS["whisper"].color


def test_levels_have_line_styles_of_their_own(ten):
    figure, panels = plots.figure(1, 2)
    single = ten[ten["design"] == "whisper"]
    for ax, levels in zip(panels, ({"a": 0.1, "b": 0.2, "c": 0.3}, {"c": 0.3}), strict=True):
        plots.lines(single, "round", "test_loss", ax=ax, hlines=levels)
    styles = [[str(line._dash_pattern) for line in ax.get_lines()[1:]] for ax in panels]
    assert len(set(styles[0])) == 3 and styles[1] == styles[0][2:]


def test_ticks_of_near_values_do_not_overlap(ten):
    single = ten[(ten["design"] == "whisper") & (ten["round"] == 300)]
    sizes = (0.192, 0.768, 2.98, 3.18, 4.96, 26010.0)
    rows = pandas.concat([single.assign(design=f"{x:g}", size=x) for x in sizes])
    figure = plots.lines(rows, "size", "test_loss", log_x=True)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[0] == "0.192" and labels[-1] == "26010" and "3.18" not in labels


def test_short_logarithmic_axes_have_several_ticks(ten):
    for minimum, maximum in ((1.0, 1.9), (0.02, 0.9), (2.2, 40.0), (0.5, 1e6)):
        rows = ten[ten["design"] == "whisper"].copy()
        rows["test_loss"] = np.where(rows["round"] == 100, maximum, minimum)
        figure = plots.lines(rows, "round", "test_loss", log_y=True)
        figure.canvas.draw()
        low, high = figure.axes[0].get_ylim()
        assert sum(low <= tick <= high for tick in figure.axes[0].get_yticks()) >= 2


def test_rows_without_repeats_do_not_count_as_means(ten):
    figure, panels = plots.figure(1, 2)
    first = ten[ten["design"] == "whisper"]
    plots.lines(first, "round", "test_loss", ax=panels[0])
    single = first[first["seed"] == 0].drop(columns="seed")
    plots.lines(single, "round", "test_loss", ax=panels[1])
    assert "means over 3 seeds" in plots.finish(figure)


def test_no_two_of_many_series_look_alike(ten):
    first = ten[ten["design"] == "whisper"]
    many = pandas.concat([first.assign(design=f"method {k}") for k in range(20)])
    lines = plots.lines(many, "round", "test_loss").axes[0].get_lines()
    looks = {appearance(line) for line in lines}
    assert len(lines) == len(looks) == 20
    reference = {(look.color, look.marker) for look in plots.LOOKS.values()}
    assert not reference & {look[:2] for look in looks} and {look[3] for look in looks} == {"white"}


def test_lines_are_means_and_bands_standard_errors(ten):
    from scipy import stats

    single = ten[ten["design"] == "whisper"]
    (ax,) = plots.lines(single.sample(frac=1.0, random_state=0), "round", "test_loss").axes
    groups = [group["test_loss"] for _, group in single.groupby("round")]
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [100, 200, 300])
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), [g.mean() for g in groups])
    edges = ax.collections[0].get_paths()[0].vertices
    first = edges[np.isclose(edges[:, 0], 100), 1]
    half = (first.max() - first.min()) / 2
    assert half == pytest.approx(stats.sem(groups[0]))
    (bare,) = plots.lines(single.drop(columns="seed"), "round", "test_loss").axes
    assert not bare.collections


def test_one_seed_has_no_band(ten):
    figure = plots.lines(ten[ten["seed"] == 0], "round", "test_loss")
    assert not figure.axes[0].collections
    assert "One seed." in plots.finish(figure)


def test_without_epsilon_run_is_level(frame):
    last = frame[frame["round"] == 300]
    (ax,) = plots.lines(last, "epsilon", "test_loss").axes
    level = next(line for line in ax.get_lines() if line.get_label() == "non-private")
    assert len(set(level.get_ydata())) == 1


def test_different_settings_are_not_averaged(frame):
    with pytest.raises(ValueError, match="choose one value of budget_epsilon first"):
        plots.lines(frame[frame["design"] == "non_private"], "round", "test_loss")
    with pytest.raises(ValueError, match="one value of round"):
        plots.lines(frame, "budget_epsilon", "test_loss")
    with pytest.raises(ValueError, match="no rows"):
        plots.lines(frame.iloc[:0], "round", "test_loss")
    with pytest.raises(ValueError, match="column 'loss' is not in the rows"):
        plots.lines(frame, "round", "loss")


def test_one_panel_is_tidy(ten, frame):
    long = {f"a level with quite a long name {i}": 0.1 * i for i in range(4)}
    for figure in (
        plots.lines(ten, "round", "test_loss", title="a9a", note="A remark. " * 20),
        plots.lines(ten, "round", "test_loss", log_y=True, hlines=long),
        plots.lines(frame[frame["round"] == 300], "epsilon", "test_loss", log_x=True),
        plots.lines(ten[ten["design"] == "whisper"], "round", "test_loss"),
    ):
        plots.finish(figure)
        assert_tidy(figure)


def test_untidy_figure_is_noticed(ten):
    figure = plots.lines(ten, "round", "test_loss")
    plots.finish(figure)
    text = figure.texts[0]
    text.set_text(text.get_text().replace("\n", " "))  # as if it were not wrapped
    with pytest.raises(AssertionError):
        assert_tidy(figure)
    plots.finish(overlapping := plots.lines(ten, "round", "test_loss"))
    overlapping.legends[0].set_bbox_to_anchor((0.5, 0.8), overlapping.transFigure)
    with pytest.raises(AssertionError):
        assert_tidy(overlapping)


@pytest.mark.slow
def test_panels_share_one_legend_and_one_caption(tmp_path, frame):
    figure, panels = plots.figure(1, 2, sharey=True)
    for ax, epsilon in zip(panels, (3.0, 10.0), strict=True):
        rows = frame[frame["budget_epsilon"] == epsilon]
        assert plots.lines(rows, "round", "test_loss", ax=ax, title=f"{epsilon:g}") is figure
    plots.save(figure, tmp_path / "a.png")
    assert len(figure.legends) == 1 and len(figure.texts) == 1
    assert len(figure.legends[0].get_texts()) == len(plots.TITLES)
    assert "epsilon = 3 and 10" in texts(figure)[0]
    assert_tidy(figure)
    height = figure.get_size_inches()[1]
    plots.save(figure, tmp_path / "a.svg")  # saved twice, finished once
    assert len(figure.texts) == 1 and figure.get_size_inches()[1] == height


@pytest.mark.slow
def test_png_stands_in_for_large_svg(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"design": f"series {k}", "round": r, "loss": rng.normal()}
        for k in range(6)
        for r in range(3000)
    ]
    (tmp_path / "a.svg").write_text("an older one")
    path = plots.lines(pandas.DataFrame(rows), "round", "loss", path=tmp_path / "a.svg")
    assert path == tmp_path / "a.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size <= 200_000
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]


def test_figure_is_replaced_whole(tmp_path, ten, monkeypatch):
    path = plots.lines(ten, "round", "test_loss", path=tmp_path / "deep" / "a.svg")
    before = path.read_bytes()

    def crash(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(ValueError, match="cannot be written .no space"):
        plots.lines(ten, "round", "accuracy", path=path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["a.svg"]
    with pytest.raises(ValueError, match="end it in .svg, .png or .pdf"):
        plots.save(plots.lines(ten, "round", "accuracy"), tmp_path / "a.gif")


@pytest.mark.slow
def test_records_are_drawn_with_sensible_defaults(tmp_path):
    swept = records.write(tmp_path / "swept" / "run.jsonl", make_rows(), {})
    tuning = [{**row, "phase": "tuning", "seed": 99} for row in make_rows()]
    records.write(tmp_path / "swept" / "tuning.jsonl", tuning, {})
    across = {"x": "budget_epsilon", "where": ["phase=final"]}
    figure = plots.from_records(tmp_path / "swept", **across)
    assert figure == tmp_path / "swept" / "swept_test_loss_budget_epsilon.svg"
    assert "over 3 seeds" in figure.read_text()
    assert plots.from_records(swept, **across).name == "run_test_loss_budget_epsilon.svg"
    with pytest.raises(ValueError, match="choose one value of budget_epsilon first"):
        plots.from_records(swept)
    single = records.write(tmp_path / "one.jsonl", make_rows(epsilons=(3.0,)), {})
    assert plots.from_records(single).name == "one_test_loss_round.svg"
    assert plots.from_records(single, y="accuracy").name == "one_accuracy_round.svg"


@pytest.mark.parametrize("minimum", [1.0, 3.0])
def test_epsilon_axis_names_largest_agent(minimum):
    rows = pandas.DataFrame(make_rows(("independent",)))
    figure = plots.lines(rows[rows["round"] == 300], "epsilon", "test_loss")
    assert figure.axes[0].get_xlabel() == "epsilon"
    different = guarantee(3.0).replace(per_agent_epsilon=(minimum, 3.0)).to_dict()
    rows["guarantee"] = [different if row == 3.0 else None for row in rows["epsilon"]]
    figure = plots.lines(rows[rows["round"] == 300], "epsilon", "test_loss")
    expected = "largest epsilon of an agent" if minimum < 3 else "epsilon"
    assert figure.axes[0].get_xlabel() == expected


def test_first_metric_is_drawn_where_there_is_no_test_loss(tmp_path):
    rows = [
        {"design": a, "agents": 20, "seed": s, "round": r, "energy": r + s, "other": 1.0}
        for a in ("whisper", "independent")
        for s in (0, 1)
        for r in (2, 6)
    ]
    path = records.write(tmp_path / "run.jsonl", rows, {})
    assert plots.from_records(path).name == "run_energy_round.svg"


def test_records_without_what_is_asked_are_refused(tmp_path):
    path = records.write(tmp_path / "run.jsonl", make_rows(), {})
    with pytest.raises(ValueError, match="y is 'nonsense'; choose one of experiment"):
        plots.from_records(path, y="nonsense")
    empty = records.write(tmp_path / "empty.jsonl", [], {})
    with pytest.raises(ValueError, match="no rows"):
        plots.from_records(empty)
    bare = records.write(tmp_path / "bare.jsonl", [{"design": "whisper", "loss": 1.0}], {})
    with pytest.raises(ValueError, match="x is 'round'; choose one of"):
        plots.from_records(bare)


def test_records_of_two_participations_are_not_mixed(tmp_path):
    """Two runs with everything alike but (k, b): neither one mean nor one caption for both."""

    def stated(pattern):
        return Guarantee.of(
            epsilon=3.0, delta=1e-5, mu=float(gdp.mu(3.0, 1e-5)), relation="zero_out_record",
            attacker="outsider", rounds=300, clip_norm=0.1, accountant="gdp", release=False,
            participation=pattern,
        ).to_dict()  # fmt: skip

    def rows(pattern, seeds, **extra):
        kept = stated(pattern) if pattern else Guarantee.none(300).to_dict()
        return [
            {"design": "independent", "seed": s, "round": r, "test_loss": 1.0, **extra}
            | {"guarantee": kept}
            for s in seeds
            for r in (100, 300)
        ]

    pair = rows((20, 15), range(3)) + rows((60, 5), range(2))
    mixed = pandas.DataFrame(pair)
    with pytest.raises(ValueError, match="k = 20, b = 15; k = 60, b = 5"):
        plots.lines(mixed, "round", "test_loss")
    apart = mixed.assign(design=[str(g["participation"]) for g in mixed["guarantee"]])
    drawn = plots.lines(apart, "round", "test_loss", "design")
    caption = plots.finish(drawn)
    assert "k = 20, b = 15" in caption and "k = 60, b = 5" in caption
    single = rows(None, range(3), design="non_private")
    records.write(tmp_path / "r.jsonl", pair + single, {})
    with pytest.raises(ValueError, match="k = 20, b = 15; k = 60, b = 5"):
        plots.from_records(tmp_path / "r.jsonl")


def test_indistinguishable_runs_are_refused():
    rows = [{"design": "independent", "seed": 0, "round": r, "test_loss": 1.0} for r in (1, 2)]
    with pytest.raises(ValueError, match=r"no column tells them apart.*result\.rows\(run="):
        plots.lines(pandas.DataFrame(rows + rows), "round", "test_loss")
    graphs = [{**row, "graph": name} for row in rows for name in ("ring", "er")]
    with pytest.raises(ValueError, match=r"choose one value of graph first \(where graph=ring"):
        plots.lines(pandas.DataFrame(graphs), "round", "test_loss")


def test_design_with_parameters_has_look_of_its_own(tmp_path):
    names = ["polynomial", "polynomial(degree=4)", "polynomial(degree=8)"]
    rows = [
        {"design": name, "seed": seed, "round": r, "test_loss": r + len(name)}
        for name in names for seed in range(2) for r in (1, 2)
    ]  # fmt: skip
    drawn = plots.lines(pandas.DataFrame(rows), "round", "test_loss")
    result = drawn.axes[0].get_lines()
    assert [line.get_label() for line in result] == [
        "polynomial", "polynomial (degree=4)", "polynomial (degree=8)",
    ]  # fmt: skip
    assert len({(line.get_color(), line.get_marker()) for line in result}) == 3
