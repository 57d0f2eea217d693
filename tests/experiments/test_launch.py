"""The shared command line: presets, cells, resuming, errors."""

import dataclasses
import warnings

import pytest

from _common import launch
from dpjax.engine import estimate
from dpjax.plans import plan
from dpjax.results import plots, records
from tests.support import make_config


@dataclasses.dataclass(frozen=True)
class Config:
    """Two options.

    Attributes:
        rounds: Rounds.
        names: Names.
    """

    rounds: int = 5
    names: tuple[str, ...] = ("a",)

    def __post_init__(self):
        launch.check(self)


PRESETS = {"tiny": Config(), "cpu": Config(rounds=50, names=("a", "b"))}


def collect(argv):
    observed = []

    def body(config, lab):
        """Do the work."""
        observed.append((config, lab))

    return launch.main("trial", PRESETS, body, argv), observed


def test_preset_sets_defaults_and_options_override(tmp_path):
    code, [(config, lab)] = collect(
        ["--rounds", "7", "--preset", "cpu", "--output", str(tmp_path), "--no-resume"]
    )
    assert code == 0
    assert config == Config(rounds=7, names=("a", "b"))
    assert lab.folder == tmp_path / "trial" / "cpu"
    assert not lab.options.resume
    assert lab.command.startswith("python experiments/trial.py --rounds 7 --preset cpu")


def test_unknown_preset_and_value_errors_are_one_line(capsys):
    code, observed = collect(["--preset", "huge"])
    assert code == 2 and not observed
    assert "preset is 'huge'; choose one of tiny, cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--bad", "no option --bad; see experiments/trial.py --help"),
        (
            "--presets tiny",
            "no option --presets; did you mean --preset? If not, see experiments/trial.py --help",
        ),
        (
            "--no-resum",
            "no option --resum; did you mean --resume? If not, see experiments/trial.py --help",
        ),
        ("extra", "'extra' is one argument too many; see experiments/trial.py --help"),
        ("--rounds", "--rounds has no value; see experiments/trial.py --help"),
        ("--rounds=1.5", "--rounds is '1.5', which is no INT; see experiments/trial.py --help"),
        ("--rounds 0", "rounds is 0; give a whole number of at least 1"),
        ("--preset huge", "preset is 'huge'; choose one of tiny, cpu"),
    ],
)
def test_errors_are_one_line_as_those_of_dpjax(arguments, line, capsys):
    code, observed = collect(arguments.split())
    assert code == 2 and not observed
    assert capsys.readouterr() == ("", f"trial: error: {line}\n")


def test_warnings_are_one_line(capsys):
    def body(config, lab):
        """Do the work."""
        warnings.warn("this is slow", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert launch.main("trial", PRESETS, body, []) == 0
    assert capsys.readouterr() == ("", "trial: warning: this is slow\n")


def test_completion_is_written(tmp_path):
    path = tmp_path / "completion"
    with pytest.raises(SystemExit) as stop:
        collect(["--tyro-write-completion", "bash", str(path)])
    assert not stop.value.code and "--rounds" in path.read_text()


def test_help_names_options_and_presets(capsys):
    with pytest.raises(SystemExit) as stop:
        collect(["--preset", "tiny", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("Do the work", "--rounds", "--devices", "--output", "tiny"):
        assert word in text


def test_cells_are_run_once_and_tied_to_their_config(tmp_path):
    options = launch.Options(output=tmp_path)
    calls = []

    def compute(checkpoint):
        calls.append(checkpoint)
        checkpoint.mkdir(parents=True)
        return [{"design": "x", "seed": 0, "round": 1, "loss": 0.5}]

    lab = launch.Lab("trial", "tiny", options, "python experiments/trial.py")
    first = lab.cell("one", {"rounds": 1}, compute, seed=0)
    again = lab.cell("one", {"rounds": 1}, compute, seed=0)
    assert len(calls) == 1 and not calls[0].exists()
    assert first["loss"].tolist() == again["loss"].tolist() == [0.5]
    assert first["experiment"].tolist() == ["trial"]
    with pytest.raises(ValueError, match="made with another config"):
        lab.cell("one", {"rounds": 2}, compute)
    strict = launch.Lab("trial", "tiny", dataclasses.replace(options, resume=False), "c")
    with pytest.raises(ValueError, match="never overwritten"):
        strict.cell("one", {"rounds": 1}, compute)
    assert len(calls) == 1


def test_other_seeds_are_those_of_all_runs():
    """A second set of seeds shares no run with the first, also none that tuned."""

    @dataclasses.dataclass(frozen=True)
    class Seeded:
        seeds: tuple[int, ...] = (0, 1)
        tuning_seeds: tuple[int, ...] = (100,)
        tuning_seed: int = 7

    moved = launch._on_other_seeds(Seeded(), 5000)
    assert moved == Seeded((5000, 5001), (5100,), 5007)
    assert launch._on_other_seeds(Seeded(), 0) == Seeded()
    with pytest.raises(ValueError, match="other_seeds is 5000, and this experiment has no seeds"):
        launch._on_other_seeds(Config(), 5000)


def test_runs_that_chose_steps_are_not_drawn_unasked(tmp_path):
    """As after scripts/demo: a folder of records gives a figure without further options."""
    rows = []
    for phase, seed, step in (("tuning", 100, 0.1), ("tuning", 100, 0.5), ("final", 0, 0.5)):
        row = {"phase": phase, "design": "whisper", "seed": seed, "step_size": step}
        rows.append(row | {"round": 1, "test_loss": 0.25})
    lab = launch.Lab("trial", "tiny", launch.Options(output=tmp_path), "c")
    lab.cell("one", {}, lambda checkpoint: rows)
    drawn = plots.from_records(lab.folder, out=tmp_path / "figure.svg")
    assert "Rows of phase = final." in " ".join(drawn.read_text().split())
    lab.cell("two", {}, lambda checkpoint: rows, plot={"where": ["seed=100"]})
    assert records.read_metadata(lab.folder / "two.jsonl")["plot"] == {"where": ["seed=100"]}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rounds": 0}, "rounds is 0; give a whole number of at least 1"),
        ({"rounds": 2.5}, "rounds is 2.5"),
        ({"names": ("a", "b", "a")}, "names is .*, with an entry twice"),
    ],
)
def test_options_that_are_no_numbers_or_come_twice_are_refused(options, text):
    launch.check(Config())
    with pytest.raises(ValueError, match=text):
        launch.check(Config(**options))


def test_paths_are_of_files_that_are_there(tmp_path):
    kind = dataclasses.make_dataclass("Fine", ["weights"])
    path = tmp_path / "vit.safetensors"
    for missing in (path, tmp_path):
        with pytest.raises(ValueError, match=f"weights is '{missing}', where no file is; give"):
            launch.check(kind(missing))
    path.touch()
    launch.check(kind(path))
    launch.check(kind(None))


@pytest.mark.parametrize("options", [[], ["--no-resume"]])
def test_stopping_is_told_in_one_line(capsys, options):
    def body(config, lab):
        """Do the work."""
        raise KeyboardInterrupt

    assert launch.main("trial", PRESETS, body, options) == 130
    without = " without --no-resume" if options else ""
    assert capsys.readouterr().err == (
        f"trial: stopped; finished cells are kept, the same command{without} carries on\n"
    )


def test_figures_of_longer_presets_are_kept_apart(tmp_path):
    suffixes = {
        preset: launch.Lab("trial", preset, launch.Options(output=tmp_path), "c").suffix
        for preset in ("tiny", "demo", "cpu", "cpu_cifar", "long", "gpu", "paper_spectra")
    }
    assert set(list(suffixes.values())[:4]) == {""}
    assert list(suffixes.values())[4:] == ["_long", "_gpu", "_paper_spectra"]


@pytest.mark.parametrize("value", [(0.5, 0.0), (0.5, float("nan")), (1.5,), ("a",)])
def test_entries_are_checked_one_by_one(value):
    kind = dataclasses.make_dataclass("Shares", [("validation", tuple[float, ...])])
    launch.check(kind((0.5, 0.25)))
    with pytest.raises(ValueError, match="validation is"):
        launch.check(kind(value))


def test_numbers_are_checked_by_type_and_name():
    kind = dataclasses.make_dataclass(
        "Numbers",
        [("agents", int), ("records", int), ("seeds", tuple[int, ...]), ("probability", float)],
    )
    for fine in ((2, 0, (0, 1), 1.0), (1, 5, (3,), 0.1)):
        launch.check(kind(*fine))
    launch.check(kind(0, 0, (0,), 1.0), {"agents": 0})
    launch.check(kind(1, 0, (), -1.0), empty=("seeds",), free=("probability",))
    for invalid, text in (
        ((0, 0, (0,), 1.0), "agents is 0; give a whole number of at least 1"),
        ((1, -1, (0,), 1.0), "records is -1"),
        ((1, 0, (-1,), 1.0), "seeds is -1"),
        ((1, 0, (0,), 1.5), "probability is 1.5; give one of at most 1"),
        ((1, 0, (0,), 0.0), "probability is 0"),
    ):
        with pytest.raises(ValueError, match=text):
            launch.check(kind(*invalid))
    names = dataclasses.make_dataclass("Names", [("systems", tuple[str, ...])])
    with pytest.raises(ValueError, match="systems holds 'b'; choose from a"):
        launch.check(names(("b",)), known={"systems": ("a",)})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tuning_seed", 1, r"tuning_seed shares \[1\] with seeds"),
        ("tuning_seeds", (5, 0, 1), r"tuning_seeds share \[0, 1\] with seeds"),
    ],
)
def test_seeds_of_tuning_are_not_reported(name, value, text):
    kind = dataclasses.make_dataclass("Seeded", ["seeds", name])
    launch.check(kind((0, 1), (7,) if isinstance(value, tuple) else 7))
    with pytest.raises(ValueError, match=text):
        launch.check(kind((0, 1), value))


def test_records_stay_valid_when_option_is_added(tmp_path):
    options = launch.Options(output=tmp_path, quiet=True)
    lab = launch.Lab("trial", "tiny", options, "c")
    lab.cell("one", {"rounds": 1}, lambda folder: [{"loss": 0.5}])
    frame = lab.cell("one", {"rounds": 1, "weights": None}, lambda folder: [])
    assert frame["loss"].tolist() == [0.5]
    with pytest.raises(ValueError, match="made with another config"):
        lab.cell("one", {"rounds": 1, "weights": "file"}, lambda folder: [])


def test_cells_of_another_commit_are_read_with_word(tmp_path, monkeypatch, capsys):
    """Their code may have computed other rows."""

    def told(commit):
        monkeypatch.setattr(records, "metadata", lambda **_: {"commit": commit})
        lab = launch.Lab("trial", "tiny", launch.Options(output=tmp_path), "python trial.py")
        lab.cell("one", {"epsilon": 1.0}, lambda folder: [{"x": 1}])
        return capsys.readouterr().out

    assert "1 rows in" in told("abc")
    assert told("abc").endswith("one.jsonl: read\n")
    assert told("def").endswith("one.jsonl: read, made at commit abc\n")


def test_cell_stores_its_own_place_of_sweep():
    selection = launch.stored(PRESETS["cpu"], "names", name="a", rounds=7)
    assert selection == {"rounds": 7, "name": "a"}
    with pytest.raises(ValueError, match="listed holds 'colours'"):
        launch.stored(PRESETS["cpu"], "colours")
    assert launch.file_name("a + b (first v1)_") == "a_b_first_v1"


def test_what_must_hold_entry_is_refused_without() -> None:
    config = dataclasses.make_dataclass("Config", [("filters", tuple)])
    launch.check(config(("none",)))
    launch.check(config(()), empty=["filters"])
    with pytest.raises(ValueError, match="filters is empty; give at least one entry"):
        launch.check(config(()))


def test_paired_options_have_equal_lengths() -> None:
    kind = dataclasses.make_dataclass("Config", ["epsilon", "gamma", "q1"])
    each = {"epsilon": ("gamma", "q1")}
    launch.check(kind((10.0, 1.0), (0.5, 0.5), (0.9, 0.8)), each=each)
    with pytest.raises(ValueError, match="gamma is .*, with an entry twice"):
        launch.check(kind((10.0, 1.0), (0.5, 0.5), (0.9, 0.8)))
    with pytest.raises(ValueError, match="epsilon is .*, with an entry twice"):
        launch.check(kind((1.0, 1.0), (0.5, 0.5), (0.9, 0.8)), each=each)
    for q1 in ((0.9,), (0.9, 0.8, 0.7)):
        text = f"q1 has {len(q1)} entries and epsilon 2; give one for each of epsilon"
        with pytest.raises(ValueError, match=text):
            launch.check(kind((10.0, 1.0), (0.5, 0.5), q1), each=each)


@pytest.mark.slow
def test_estimates_are_printed_and_nothing_is_stored(tmp_path, capsys, monkeypatch, network, small):
    """Also of a run whose step size another one chooses."""
    monkeypatch.setattr(estimate, "_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)

    def body(config, lab):
        """Do the work."""

        def compute(folder):
            training_plan = plan.make(make_config(rounds=8), network)
            first = lab.run(
                training_plan, small, seeds=[0], eval_every=3, checkpoint=folder / "first"
            )
            assert first.rounds.tolist() == [3, 6, 8]
            step = float(first.metrics["test_loss"][-1].mean())
            later = plan.make(make_config(rounds=6, step_size=step), network)
            return lab.run(later, small, seeds=[0, 1], checkpoint=folder / "later").rows()

        assert len(lab.cell("cell", {}, compute)) == 12
        lab.say("a report of what was not run")

    assert launch.main("trial", PRESETS, body, ["--estimate"]) == 0
    first, later, total = capsys.readouterr().out.splitlines()
    assert first.startswith("cell/first: 1 run of 8 rounds: about ")
    assert later.startswith("cell/later: 2 runs of 6 rounds: about ")
    seconds = sum(float(line.split(", and about ")[1].split()[0]) for line in (first, later))
    minutes = float(total.removeprefix("All runs together take about ").split()[0])
    assert abs(minutes - seconds / 60) < 0.06
    assert not list(tmp_path.iterdir())
