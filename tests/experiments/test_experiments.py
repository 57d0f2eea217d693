"""Every experiment's tiny preset runs, stores records, draws, and reads them back."""

import dataclasses
from pathlib import Path

import pytest

from dpjax.accounting.guarantee import Guarantee
from dpjax.results import records
from tests.support import load_script

ROOT = Path(__file__).resolve().parents[2]


def cells(tmp_path, name):
    return sorted((tmp_path / name / "tiny").glob("*.jsonl"))


NEEDS = {"mafalda_housing": "housing"}
TEXTS = ("sst2", "bpe")


PRESETS = (
    *("cifar_doppler", "compare", "dome_gossip", "doppler_decentralised", "doppler_spectra"),
    *("mafalda_housing", "tracking_fusion", "tracking_leakage", "tracking_mnist"),
    *("sites_accuracy", "whisper_departure", "whisper_logistic", "whisper_quadratic"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper_variance", *PRESETS])
def test_tiny_preset(tmp_path, capsys, monkeypatch, real_data, name):
    if name in NEEDS:
        monkeypatch.setenv("DPJAX_DATA", str(real_data(NEEDS[name]).parent))
    module = load_script(name)
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet"]
    assert module.main(arguments) == 0
    first = capsys.readouterr().out
    paths = cells(tmp_path, name)
    before = [path.read_bytes() for path in paths]
    assert paths and list((tmp_path / name / "tiny").glob("*.svg"))
    metadata = records.read_metadata(paths[0])
    assert metadata["command"].startswith(f"python experiments/{name}.py --preset tiny")
    assert metadata["preset"] == "tiny" and metadata["versions"]["jax"]
    assert module.main(arguments) == 0
    again = capsys.readouterr().out
    assert again.count(": read") == len(paths)
    assert [path.read_bytes() for path in paths] == before
    if name == "cifar_doppler":
        remark = module.PRESETS["tiny"].remark
        assert remark in first.splitlines()
        for figure in (tmp_path / name / "tiny").glob("*.svg"):
            assert "digits, MLP, 2 epochs" in " ".join(figure.read_text().split())
    tables = [line for line in first.splitlines() if not line.startswith((" ", str(tmp_path)))]
    assert len(tables) > 5 and set(tables) <= set(again.splitlines())
    assert module.main([*arguments, "--no-resume"]) == 2
    assert "never overwritten" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_of_run_carry_its_guarantee(tmp_path):
    module = load_script("whisper_logistic")
    assert module.main(["--preset", "tiny", "--output", str(tmp_path), "--quiet"]) == 0
    frame = records.read(tmp_path / "whisper_logistic" / "tiny")
    private = frame[(frame["design"] == "whisper") & (frame["phase"] == "final")]
    last = private[private["round"] == 60]
    stated = Guarantee.from_dict(last["guarantee"].iloc[0])
    assert stated.epsilon == 10 and stated.relation == "replace_agent" and not stated.release
    assert set(frame[frame["phase"] == "tuning"]["seed"]).isdisjoint(
        frame[frame["phase"] == "final"]["seed"]
    )


def test_tuning_on_reported_seeds_is_refused(tmp_path, capsys):
    module = load_script("whisper_logistic")
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--tuning-seeds", "0", "5"]
    code = module.main(arguments)
    streams = capsys.readouterr()
    assert code == 2 and "tuning_seeds share [0]" in streams.err + streams.out
    assert not list(tmp_path.iterdir())


def test_methods_of_image_experiment_have_equal_trials(capsys):
    module = load_script("cifar_doppler")
    for preset in module.PRESETS.values():
        for name in preset.methods:
            trials = preset.trials(name)
            assert sum(len(steps) for _, steps in trials) == len(preset.steps), name
    tuned = dataclasses.replace(module.PRESETS["cpu"], rivals=tuple(module.RIVALS)).trials(
        "momentum"
    )
    steps = module.PRESETS["cpu"].steps
    assert [dealt for _, dealt in tuned] == [steps[::2], steps[1::2]]
    for options, text in (
        (["--tuning-seed", "0"], "tuning_seed shares [0]"),
        (["--steps", "1.0", "--rivals", "muon"], "steps is (1.0,), muon_steps is (0.02, 0.01);"),
        (
            ["--steps", "1.0", "--rivals", "momentum"],
            "steps is (1.0,); give 2 or more, one a setting",
        ),
        (["--optimizer", "adam", "--moment-steps"], "moment_steps is (); give 1 or more"),
        (["--rivals", "adamw"], "rivals holds 'adamw'; choose from momentum, nesterov"),
        (["--rivals", "adamw"], "DiSK, two gradients, DP-PMLF, muon"),
        (["--filter", "f9"], "filter is 'f9'"),
        (["--optimizer", "adam", "--filter", "adaptive"], "whose first moment it cannot be"),
    ):
        code = module.main(["--preset", "tiny", *options])
        streams = capsys.readouterr()
        assert code == 2 and text in " ".join((streams.err + streams.out).split())


def test_unused_lists_of_steps_may_have_any_length():
    module = load_script("cifar_doppler")
    tiny = module.PRESETS["tiny"]
    for options in (
        {"steps": (1.0,)},
        {"optimizer": "adam", "moment_steps": (1e-3,)},
        {"optimizer": "muon", "muon_steps": (0.02,)},
        {"optimizer": "galore", "rivals": ("muon",), "steps": ()},
    ):
        result = dataclasses.replace(tiny, **options)
        counts = {sum(len(s) for _, s in result.trials(name)) for name in result.methods}
        assert len(counts) == 1, options
    for options in (
        {"optimizer": "adam", "moment_steps": (1e-3,), "rivals": ("momentum",)},
        {"optimizer": "muon", "muon_steps": (0.02,), "rivals": ("larger batch",)},
    ):
        with pytest.raises(ValueError, match=r"_steps is .*, steps is .*; give as many each"):
            dataclasses.replace(tiny, **options)


def test_image_experiment_says_where_it_is_not_papers():
    module = load_script("cifar_doppler")
    gpu = module.PRESETS["gpu"]
    assert gpu.remark == module.PRESETS["full"].remark == ""
    assert module.PRESETS["paper_cifar"].remark == module.PRESETS["paper_cifar100"].remark == ""
    remark = module.PRESETS["tiny"].remark
    assert remark == "Not the paper's setting: digits, MLP, 2 epochs."
    for options, word in (
        ({"dataset": "cifar10_small"}, "5,000 of CIFAR-10"),
        ({"records": 5000}, "5,000 records"),
        ({"model": "wrn16_4"}, "WRN-16-4"),
        ({"epochs": 4.0}, "4 epochs"),
    ):
        assert word in dataclasses.replace(gpu, **options).remark


@pytest.mark.slow
def test_text_experiment_says_that_it_is_not_papers(tmp_path, capsys, data_folder):
    pytest.importorskip("tokenizers")
    if not all((data_folder / name).is_dir() for name in TEXTS):
        pytest.skip(f"{' and '.join(TEXTS)} are not in {data_folder}")
    module = load_script("glue_doppler")
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet", "--frozen", "words"]
    assert module.main(arguments) == 0
    output = capsys.readouterr().out
    assert module.NOT_THE_PAPERS in output
    (figure,) = (tmp_path / "glue_doppler" / "tiny").glob("*.svg")
    assert "the paper's run" in figure.read_text()
    frame = records.read(cells(tmp_path, "glue_doppler"))
    assert set(frame["start"]) == {"random"} and set(frame["design"]) == {
        "sgd",
        "sgd + first v1",
    }


@pytest.mark.slow
def test_image_experiment_runs_every_method(tmp_path, capsys):
    module = load_script("cifar_doppler")
    tiny = ["--preset", "tiny", "--quiet", "--epochs", "1", "--seeds", "0"]
    rivals = ["--rivals", *module.RIVALS, "--filter", "none", "adaptive", "0.5,0.5;"]
    rivals += ["--batch-size", "64"]
    assert module.main([*tiny, *rivals, "--output", str(tmp_path / "sgd")]) == 0
    frame = records.read(tmp_path / "sgd")
    assert set(frame["design"]) == {"sgd", "sgd + adaptive", "sgd + 0.5,0.5;", *module.RIVALS}
    losses = {str(Guarantee.from_dict(item).epsilon) for item in frame["guarantee"]}
    assert losses == {"8.0"}
    for optimizer in ("adam", "galore", "muon", "nesterov"):
        options = ["--optimizer", optimizer, "--output", str(tmp_path / optimizer), "--per-layer"]
        assert module.main([*tiny, *options, "--schedule", "cosine"]) == 0
    capsys.readouterr()


@pytest.mark.slow
def test_own_model_example_is_short_and_learns(capsys):
    path = ROOT / "examples" / "own_model.py"
    assert len(path.read_text().splitlines()) < 50
    result = load_script("own_model", "examples").main(rounds=60)
    assert result.metrics["test_accuracy"][-1].mean() > 0.45
    assert "differentially private per agent" in capsys.readouterr().out


@pytest.mark.slow
def test_noise_over_rounds_example_is_short_and_gains(capsys):
    path = ROOT / "examples" / "over_rounds.py"
    assert len(path.read_text().splitlines()) < 50
    results = load_script("over_rounds", "examples").main(epochs=6, batches=6)
    losses = [results[name].metrics["test_loss"][-1].mean() for name in ("independent", "mafalda")]
    assert losses[1] < losses[0]
    out = capsys.readouterr().out
    assert "at most 6, 6 apart, with noise correlated over rounds" in out and "nan  1." in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dpjax.plans.statements.HopelessWarning")
def test_sweep_is_drawn_and_carries_on(tmp_path, monkeypatch):
    module = load_script("sweep", "examples")
    small = dict(clips=(0.3, 1.0), steps=(0.1, 0.3), rounds=8, seeds=2)
    module.main(tmp_path, epsilons=(3.0, 30.0), **small)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    result = module.main(tmp_path, epsilons=(3.0, 30.0), **small)
    assert [path.name for path in result] == ["independent.svg", "whisper_horizon.svg"]
    assert "<!-- clip norm 0.3 -->" in result[0].read_text()
    assert "epsilon = 3 and 30" in result[1].read_text()
    assert {path: path.read_bytes() for path in before} == before
    frame = records.read(tmp_path / "final")
    assert len(frame) == 2 * 2 * 2 * 2 and set(frame["seed"]) == {0, 1}
    for column, tried in (("protect.clip_norm", {0.3, 1.0}), ("budget.epsilon", {3.0, 30.0})):
        assert set(frame[column]) == tried
    assert set(frame["step_size"]) <= {0.1, 0.3}
    # All points are there: nothing is run.
    monkeypatch.setattr("dpjax.commands.sweep.run", None)
    assert module.main(tmp_path, epsilons=(3.0, 30.0), **small) == result
