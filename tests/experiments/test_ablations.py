"""The ablations of DOPPLER: which runs which study has, what it says, what it refuses."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pandas
import pytest
from scipy import signal

from _common.claims import NO, UNTOLD, YES
from dpjax.accounting.guarantee import Guarantee
from dpjax.contrib.central import Central
from dpjax.contrib.optimizers import scale_by_adam
from dpjax.contrib.rules import UpdateRule
from dpjax.results import records
from dpjax.transforms.lowpass import FILTERS
from tests.support import load_script


@functools.cache
def script(name="doppler_ablations"):
    return load_script(name)


@pytest.mark.parametrize("preset", ["tiny", "cpu", "gpu", "paper_ablations", "full"])
def test_runs_that_studies_share_are_run_once_and_others_apart(preset):
    module = script()
    config = module.PRESETS[preset]
    display = {study: module.curves(config, study) for study in config.study}
    entries = [cell for curves in display.values() for cell in curves.values()]
    cells = set(entries)
    assert len({cell.name for cell in cells}) == len(cells) < len(entries)
    assert not display["response"]
    # The filtered run of SGD is one of five studies.
    plain = module.plain(config)
    for study in ("optimizers", "filters", "clipping", "schedules"):
        assert plain in display[study].values(), study
    assert {cell.clipping for cell in display["clipping"].values()} == {"flat", "automatic"}
    assert {cell.per_layer for cell in display["clipping"].values()} == {False, True}
    assert all(cell.every for cell in display["steps"].values())
    epsilons = {cell.epsilon for cell in display["finetuning"].values()}
    assert epsilons == set(config.epsilon)
    budget = {cell.epsilon for cell in display["filters"].values()}
    assert budget == {config.at_epsilon}


def test_every_optimizer_has_as_many_trials():
    for preset in script().PRESETS.values():
        assert len({len(preset.tried(base)) for base in ("sgd", "adam", "galore")}) == 1


def test_what_is_said_follows_from_rows_of_right_cells():
    module = script()
    config = module.PRESETS["tiny"]
    display = {study: module.curves(config, study) for study in config.study}
    frames = {}
    for cell in {cell for curves in display.values() for cell in curves.values()}:
        rows = []
        steps = config.tried(cell.optimizer) if cell.every else (1.0,)
        for step in steps:
            points = 60.0 + 4.0 * (cell.filter != "none") - 3.0 * cell.per_layer
            points -= 2.0 * (cell.clipping == "flat") + 1.0 * (cell.schedule == "cosine")
            points -= 5.0 * (cell.filter == "second") + abs(step - config.moment_steps[1])
            for seed in (0, 1, 2):
                jitter = 0.1 * ((seed + len(cell.name)) % 3)
                own = {**cell.columns, "phase": "every step" if cell.every else "final"}
                own |= {"seed": seed, "step_size": step, "rounds": 9}
                for position, part in ((3, 0.5), (9, 1.0)):
                    accuracy = (points * part + jitter) / 100
                    rows.append(own | {"round": position, "test_accuracy": accuracy})
        # Trials are on validation records, and are no part of a verdict.
        rows.append(rows[-1] | {"phase": "tuning", "test_accuracy": 0.99})
        frames[cell] = pandas.DataFrame(rows)

    def said(study):
        selection = module.chosen(frames, display[study])
        assert selection["points"].max() < 70
        return {claim.words: claim.verdict for claim in module.judged(config, study, selection)}

    assert said("optimizers") == {
        "SGD is better behind a filter at every budget": YES,
        "the gain is 3 to 10 points": YES,
    }
    assert set(said("models").values()) == {YES}
    assert set(said("clipping").values()) == {YES}
    assert tuple(said("schedules").values()) == (NO, YES)
    filters = said("filters")
    assert filters["and worse in the end"] == YES
    # Of those that were not run nothing can be told.
    assert filters["filters of other coefficients have another accuracy"] == UNTOLD
    assert said("steps")["the best step size is inside the grid"] == YES
    fine = said("finetuning")
    assert tuple(fine.values()) == (YES, NO, f"{UNTOLD}: one budget")


@pytest.mark.parametrize("moves", [None, 2])
def test_curves_are_tuned_beyond_their_ends_as_moves_says(monkeypatch, moves):
    module = script()
    requests = []

    def stop(*arguments, **options):
        requests.append(options["moves"])
        raise InterruptedError

    monkeypatch.setattr(module.tune, "reported", stop)
    config = dataclasses.replace(module.PRESETS["tiny"], moves=moves)
    with pytest.raises(InterruptedError):
        module.train(config, module.plain(config), SimpleNamespace(run=None), None)
    assert requests == [moves or 0]
    # A record that was made without the option is as good as before.
    assert module.PRESETS["cpu"].moves is None
    with pytest.raises(ValueError, match="moves is -1"):
        dataclasses.replace(config, moves=-1)


def test_waves_are_kept_as_frequency_response_says():
    module = script()
    frame = pandas.DataFrame(module.response(None)).drop_duplicates("series")
    assert len(frame) == 11
    for _, row in frame.iterrows():
        b, a = FILTERS["sgd" if row["series"] == "no filter" else row["series"]]
        for name, period in zip(("slow", "fast"), module.PERIODS, strict=True):
            _, gain = signal.freqz(b, [1.0, *a], worN=[2 * np.pi / period])
            assert row[name] == pytest.approx(abs(gain[0]), rel=2e-3), (row["series"], name)


def test_what_is_not_papers_is_said(tmp_path):
    module = script()
    complete = module.PRESETS["full"]
    cpu = module.PRESETS["cpu"]
    assert module.remark(complete, "filters") == module.remark(complete, "models") == ""
    assert module.remark(complete, "finetuning") == module.NOT_THE_PAPERS
    path = tmp_path / "vit.safetensors"
    path.touch()
    tuned = dataclasses.replace(complete, weights=path)
    assert module.remark(tuned, "finetuning") == ""
    assert {cell.pretrained for cell in module.curves(tuned, "finetuning").values()} == {True}
    for study in ("filters", "models", "optimizers"):
        assert module.remark(cpu, study).startswith("Not the paper's setting: ")
    fewer = dataclasses.replace(complete, records=500)
    assert "500 records" in module.remark(fewer, "steps")


@pytest.mark.parametrize(
    "options, text",
    [
        (("--tuning-seed", "0"), "tuning_seed shares [0]"),
        (("--steps", "1.0", "0.5"), "give three or more"),
        (("--moment-steps", "1e-3"), "give as many each"),
        (("--filter", "none"), "compared with itself"),
        (("--filters", "f9"), "filter is 'f9'"),
        (("--optimizers", "adamw"), "optimizers holds 'adamw'"),
        (("--models", "cnn6"), "models holds 'cnn6'"),
        (("--epsilon",), "epsilon is empty"),
        (("--filter", "sgd"), "filter has 'sgd', which changes nothing"),
        (("--filters", "none", "1,0;0"), "filters has '1,0;0', which changes nothing"),
        (("--optimizers", "adam", "--filter", "wiener"), "filter is 'wiener' with adam"),
        (("--stepped", "galore", "--filter", "adaptive"), "filter is 'adaptive' with galore"),
        (("--dataset", "digitz"), "dataset is 'digitz'; choose from digits,"),
        (("--pictures", "a9a"), "pictures is 'a9a'; choose from digits,"),
        (("--weights", "gone.safetensors"), "weights is 'gone.safetensors', where no file is"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, options, text):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), *options]
    code = script().main(arguments)
    streams = capsys.readouterr()
    assert code == 2 and text in " ".join((streams.err + streams.out).split())
    assert not list(tmp_path.iterdir())


def test_only_what_studies_use_must_fit(tmp_path, monkeypatch):
    tiny = script().PRESETS["tiny"]
    # Adam has no part in them.
    changes = {"stepped": "adam", "optimizers": ("sgd", "adam"), "filter": "wiener"}
    dataclasses.replace(tiny, study=("filters", "models"), **changes)
    for study in ("steps", "optimizers"):
        with pytest.raises(ValueError, match="filter is 'wiener' with adam"):
            dataclasses.replace(tiny, study=(study,), **changes)
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    (tmp_path / "own.npz").touch()
    dataclasses.replace(tiny, dataset="own")
    (tmp_path / "housing.npz").touch()
    with pytest.raises(ValueError, match="dataset is 'housing'; choose from"):
        dataclasses.replace(tiny, dataset="housing")


@pytest.mark.slow
def test_guarantee_told_is_of_reported_run(monkeypatch):
    module = script()
    config = dataclasses.replace(module.PRESETS["tiny"], study=("clipping",))
    recipe = Central(epochs=1, batch_size=10)
    rows = []
    for phase, count in (("tuning", 640), ("final", 710)):
        (result,) = recipe.plans(UpdateRule(), [0.5], 8.0, count, delta=1e-5)
        row = {"design": "sgd", "phase": phase, "step_size": 0.5, "test_accuracy": 0.5}
        row |= {"round": result.config.rounds}
        rows.append(row | {"guarantee": result.guarantee.to_dict()})
    stated = [Guarantee.from_dict(row["guarantee"]).statement() for row in rows]
    assert [row["round"] for row in rows] == [64, 71] and stated[0] != stated[1]
    monkeypatch.setattr(module, "report", lambda *arguments: None)
    messages = []
    lab = SimpleNamespace(cell=lambda *_, **__: pandas.DataFrame(rows), say=messages.append)
    module.experiment(config, lab)
    assert stated[1] in messages[-1] and stated[0] not in messages[-1]


@pytest.mark.slow
def test_study_without_data_is_drawn(tmp_path, capsys):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet", "--study", "response"]
    assert script().main(arguments) == 0
    assert f"Fig. 5: a mean stays as it is: {YES}" in capsys.readouterr().out
    folder = tmp_path / "doppler_ablations" / "tiny"
    assert (folder / "doppler_ablations_response.svg").exists()


@pytest.mark.slow
def test_study_is_run_and_judged(tmp_path, capsys):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet", "--study", "steps"]
    assert script().main([*arguments, "--stepped", "sgd", "--seeds", "0"]) == 0
    output = capsys.readouterr().out
    assert f"Fig. 10: the smallest is slow early: {UNTOLD}: one seed" in output
    frame = records.read(tmp_path / "doppler_ablations" / "tiny")
    assert set(frame["phase"]) == {"every step"} and set(frame["filter"]) == {"none", "first v1"}
    assert set(frame["step_size"]) == {2.0, 1.0, 0.5} and len(frame) == 2 * 3 * 3
    stated = [Guarantee.from_dict(item) for item in frame["guarantee"]]
    assert {guarantee.epsilon for guarantee in stated} == {8.0}
    counts = {value.delta for value in stated}
    assert len(counts) == 1 and counts.pop() == pytest.approx(1438**-1.1, rel=1e-6)


@pytest.mark.slow
def test_tiny_preset(tmp_path, capsys):
    module = script()
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet"]
    assert module.main(arguments) == 0
    first = capsys.readouterr().out
    folder = tmp_path / "doppler_ablations" / "tiny"
    for figure in ("4", "5", "7", "8", "9", "10", "11", "12"):
        assert f"Fig. {figure}: " in first
    assert module.NOT_THE_PAPERS in first
    drawn = {path.stem.removeprefix("doppler_ablations_") for path in folder.glob("*.svg")}
    assert drawn == {*module.STUDIES, "filters_2"} - {"filters", "finetuning"}
    frame = records.read(folder)
    trained = frame[frame["filter"].notna()]
    assert {Guarantee.from_dict(item).epsilon for item in trained["guarantee"]} == {8.0}
    assert module.main(arguments) == 0
    again = capsys.readouterr().out
    assert again.count(": read") == len(list(folder.glob("*.jsonl")))
    # One study alone reads the records that it shares.
    assert module.main([*arguments, "--study", "clipping"]) == 0
    assert capsys.readouterr().out.count(": read") == 4


def glue_rows(ends):
    for name, points in ends.items():
        for seed in (0, 1, 2):
            extra = 0.1 * ((seed + len(name)) % 3)
            yield {
                "design": name, "budget_epsilon": 3.0, "seed": seed, "round": 4, "rounds": 4,
                "points": points + extra,
            }  # fmt: skip


def test_table_3_is_judged(capsys):
    module = script("glue_doppler")
    config = module.Config(epsilon=(3.0,), uncorrected=True)
    assert set(config.methods) == {"adam", "adam + first v1", module.UNCORRECTED}
    messages = []
    lab = SimpleNamespace(say=messages.append)
    ends = {"adam": 90.0, "adam + first v1": 91.0, module.UNCORRECTED: 91.2}
    module.judge(config, lab, pandas.DataFrame(glue_rows(ends)))
    text = "\n".join(messages)
    assert module.NOT_THE_PAPERS in text
    assert f"Table 3: it gains over AdamBC at every budget: {YES}" in text
    assert f"Table 3: and less than a point over DPAdam without correction: {YES}" in text
    messages.clear()
    module.judge(dataclasses.replace(config, optimizer="sgd", uncorrected=False), lab, None)
    assert "not judged" in messages[0]
    with pytest.raises(ValueError, match="uncorrected is True with sgd"):
        dataclasses.replace(config, optimizer="sgd")


@pytest.mark.parametrize(
    "base, text", [(96.3, f"{UNTOLD}: SGD leaves 3.7 points"), (60.0, NO), (89.0, NO)]
)
def test_points_that_base_does_not_leave_cannot_be_gained(base, text):
    module = script("cifar_doppler")
    messages = []
    rows = [
        {"design": name, "seed": seed, "points": base + lost * (1 + seed / 9)}
        for name, lost in (("sgd", 0.0), ("sgd + first v1", -0.5))
        for seed in (0, 1, 2)
    ]
    frame = pandas.DataFrame(rows)
    module.compare(module.PRESETS["cpu"], SimpleNamespace(say=messages.append), frame)
    assert len(messages) == 1 and messages[0].splitlines()[-1].endswith(f" {text}")


def test_uncorrected_adam_keeps_noise():
    module = script("glue_doppler")
    values = np.array([0.5, -0.2], np.float32)

    def out(rule, noise):
        link = rule(0.1, noise)
        return jax.jit(link.update)(values, link.init(values))[0]

    plain = scale_by_adam(0.0)
    expected = -0.1 * plain.update(values, plain.init(values))[0]
    np.testing.assert_allclose(out(module.Uncorrected("adam"), 0.03), expected, rtol=1e-6)
    assert not np.allclose(out(UpdateRule("adam"), 0.03), expected, rtol=1e-2)
