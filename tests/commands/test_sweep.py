"""Sweeps: the rows of plain runs, records, several processes, the best points, refusals."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pandas
import pytest

import dpjax as dp
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.dsgd import DSGD
from dpjax.commands import sweep
from dpjax.results import records

ROOT = Path(__file__).resolve().parents[2]
W = dp.mixing.metropolis_hastings(dp.graphs.complete(4))
CONFIG = dp.Config(
    protect=dp.Protect("replace_agent", clip_norm=1.0), sampler=dp.samplers.Random(1), rounds=8,
    noise=dp.noise.Independent(), budget=dp.Budget(5.0, delta=1e-5),
    optimizer=dp.optimizers.Sgd(0.05),
)  # fmt: skip
GRID = {
    "noise": [None, dp.noise.Independent(), dp.noise.Whisper()],
    "budget.epsilon": [10.0, 30.0],
    "optimizer.step_size": [0.05, 0.1],
}


def swept(grid=GRID, **options):
    options = {"seeds": [0, 1], "eval_every": 4} | options
    return dp.sweep(CONFIG, grid, W, dp.quadratics(4), **options)


@pytest.mark.slow
def test_rows_are_those_of_runs_and_are_kept(tmp_path, monkeypatch):
    result = swept(folder=tmp_path)
    frame = result.to_frame()
    assert len(result.points) == 2 + 4 + 4 and len(frame) == 10 * 2 * 2
    assert frame["point"].is_monotonic_increasing
    for number in (0, 3, 9):
        point = result.points[number]
        config = CONFIG.using(point["noise"])
        if config.noise is not None:
            budget = dataclasses.replace(config.budget, epsilon=point["budget.epsilon"])
            config = dataclasses.replace(config, budget=budget)
        config = dataclasses.replace(
            config, optimizer=dp.optimizers.Sgd(point["optimizer.step_size"])
        )
        own = frame[frame["point"] == number]
        columns = ["design", "epsilon", "step_size", "seed", "round", "mean_gap"]
        single = dp.run(dp.make_plan(config, W), dp.quadratics(4), seeds=[0, 1], eval_every=4)
        expected = single.to_frame()[columns]
        pandas.testing.assert_frame_equal(
            own[columns].reset_index(drop=True), expected, check_exact=False, rtol=1e-4
        )
        assert own["noise"].iloc[0] == (None if point["noise"] is None else config.label)
        assert np.isnan(own["budget.epsilon"]).all() == (point["noise"] is None)
    # One file for each noise; all is there, and nothing is run.
    assert len(list(tmp_path.iterdir())) == 3 + 1 and len(records.read(tmp_path)) == len(frame)
    monkeypatch.setattr(sweep, "run", None)
    pandas.testing.assert_frame_equal(swept(folder=tmp_path).to_frame(), frame)
    with pytest.raises(TypeError):
        swept(folder=tmp_path, seeds=[0])


def test_sweep_is_summed_up_by_its_last_metrics():
    rows = [(p, s, r, (1, None)[p], float(p + s + r)) for p, s, r in np.ndindex(2, 2, 2)]
    names = ["point", "seed", "round", "noise", "loss"]
    bare = [Guarantee.none(2).to_dict()] * len(rows)
    frame = pandas.DataFrame(rows, columns=names).assign(epsilon=math.inf, guarantee=bare)
    frame["design"] = frame["noise"].map({1: "one"}).fillna("non_private")
    frame = frame[["noise", "design", "epsilon", "guarantee", "seed", "round", "loss", "point"]]
    lines = sweep.Sweep(({"noise": 1}, {"noise": None}), frame).summary().splitlines()
    assert lines[0].split() == ["noise", "epsilon", "loss"]
    assert [line.split("  ")[-1] for line in lines[2:]] == ["1.5 +- 0.5", "2.5 +- 0.5"]
    assert [line.split()[0] for line in lines[2:]] == ["one", "non-private"]
    mixed = swept([{"budget.epsilon": 30.0}, {"optimizer.step_size": 0.1}]).summary().splitlines()
    assert mixed[0].split()[:3] == ["budget.epsilon", "optimizer.step_size", "epsilon"]
    assert [line.split()[:2] for line in mixed[2:]] == [["30", "30"], ["0.1", "5"]]


def test_summary_shows_range_of_budgets_by_agent():
    table = swept({"budget.epsilon": [(1.0, 2.0, 3.0, 4.0), 4.0]}, seeds=[0]).summary()
    different, equal = table.splitlines()[2:]
    assert "1 to 4 by agent" in different
    assert "by agent" not in equal and equal.split()[:2] == ["4", "4"]


@pytest.mark.slow
def test_best_points_are_grid():
    result = swept({"noise": GRID["noise"][:2], "optimizer.step_size": [0.05, 1e-9]})
    best = result.best("mean_gap", over="optimizer.step_size")
    assert [point["optimizer.step_size"] for point in best] == [0.05, 0.05]
    worst = result.best("mean_gap", over=["optimizer.step_size"], largest=True)
    assert [point["optimizer.step_size"] for point in worst] == [1e-9, 1e-9]
    again = swept(best)
    assert list(again.points) == best and set(again.frame["optimizer.step_size"]) == {0.05}
    for invalid in ({"metric": "loss"}, {"over": "rounds"}):
        with pytest.raises(ValueError, match=f"{next(iter(invalid))} is"):
            result.best(**{"metric": "mean_gap", "over": "noise"} | invalid)


def test_best_points_are_grouped_by_value():
    @dataclasses.dataclass(frozen=True)
    class Hidden:
        value: int

        def __repr__(self):
            return "Hidden"

    parts = [Hidden(1), Hidden(2), np.arange(3), np.arange(4)]
    points = [{"part": part, "step": step} for part in parts for step in (1, 2)]
    points[1]["part"] = Hidden(1)
    points[7]["part"] = np.arange(4)
    rows = [{"point": i, "seed": 0, "loss": float(i)} for i in range(8)]
    result = sweep.Sweep(tuple(points), pandas.DataFrame(rows))
    assert result.best("loss", over="step") == points[::2]


def test_records_are_tied_to_networks_functions_and_settings():
    sparse = dp.mixing.metropolis_hastings(dp.graphs.ring(4), sparse=True)
    problem = dp.quadratics(4)

    def identity(matrix=W, **changes):
        task = sweep._Task([dataclasses.replace(problem, **changes)], matrix, {"seeds": (0,)})
        return str(sweep._described(task))

    same = identity(sparse)
    assert identity(sparse.copy()) == same
    sparse.data[:] = sparse.data[::-1].copy() + np.arange(len(sparse.data))
    assert identity(sparse) != same
    assert identity() == identity()
    others = [
        identity(),
        identity(metrics=lambda params, _: {"mean_gap": params.sum()}),
        identity(batch_loss=lambda params, x, y: x.sum() * params.sum()),
        identity(weighted=lambda params, x, y, weights: params * weights(x).sum()),
        identity(augment=lambda key, x: 2 * x),
        identity(augment=lambda key, x: 3 * x),
        identity(init_per_agent=True),
    ]
    with jax.enable_x64(True):
        others.append(identity())
    assert len(set(others)) == len(others)


def by_closure(factor):
    def make(step):
        return optax.sgd(factor * step)

    return {"optimizer": dp.optimizers.Chain(make, 0.1)}


def by_default(factor):
    def make(step, factor=factor):
        return optax.sgd(factor * step)

    return {"optimizer": dp.optimizers.Chain(make, 0.1)}


def by_noise(factor):
    def make(step, noise):
        return optax.sgd(step * (1 + factor * noise(0)))

    return {"optimizer": dp.optimizers.Chain(make, 0.1, uses_noise=True)}


def by_schedule(factor):
    def schedule(round):
        return 0.1 / (1 + factor * round)

    return {"optimizer": dp.optimizers.Chain(optax.sgd, schedule)}


def by_method(factor):
    class Mine(DSGD):
        def absorb(self, ctx, public_state, carry, received):
            models, memory = super().absorb(ctx, public_state, carry, received)
            return jax.tree.map(lambda leaf: factor * leaf, models), memory

    return {"method": Mine()}


def by_sampler(factor):
    @dataclasses.dataclass(frozen=True)
    class Mine(dp.samplers.Random):
        @property
        def divisor(self):
            return factor

    return {"sampler": Mine(1), "protect": dp.Protect("replace_record", clip_norm=1.0)}


def by_design(factor):
    class Mine(dp.noise.Independent):
        def over_agents(self, target, bound):
            design = super().over_agents(target, bound)
            return dataclasses.replace(design, covariance=factor * design.covariance)

    return {"noise": Mine()}


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "edited",
    [by_closure, by_default, by_noise, by_schedule, by_method, by_sampler, by_design],
)
def test_code_edited_under_its_name_is_run_again(edited, tmp_path, monkeypatch):
    """Rows of a function or class are never those of another one that had its name."""

    def rows(factor):
        return swept([edited(factor)], folder=tmp_path, seeds=[0]).to_frame()

    first = rows(1.0)
    second = rows(2.0)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert not first["mean_gap"].equals(second["mean_gap"])
    # The same code has the same file.
    monkeypatch.setattr(sweep, "run", None)
    pandas.testing.assert_frame_equal(rows(1.0), first)


def test_files_that_change_names_are_refused(tmp_path):
    """Rows of one sampler are not read as another's."""

    def rows():
        grid = {"sampler": [dp.samplers.Random(1), dp.samplers.Full()]}
        return swept(grid, folder=tmp_path, seeds=[0]).to_frame()

    first = rows()
    one, other = tmp_path.glob("*.jsonl")
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    with pytest.raises(ValueError, match="was .*; call it so again, or delete it"):
        rows()
    one.unlink()
    other.unlink()
    pandas.testing.assert_frame_equal(rows(), first)


def test_parts_of_package_are_named_by_its_version_alone(monkeypatch):
    """So that rows that are there are read without designing noise again."""
    monkeypatch.setattr(sweep, "_plans", None)
    assert sweep._computation([CONFIG], sweep._Task([dp.quadratics(4)], W, {})) == ""


@pytest.mark.slow
def test_files_of_functions_are_same_in_every_process(tmp_path):
    code = (
        "from tests.commands.test_sweep import by_closure, swept; "
        "from pathlib import Path; import sys; "
        "swept([by_closure(2.0)], folder=Path(sys.argv[1]))"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


@pytest.mark.parametrize(
    ("grid", "options", "text"),
    [
        ({"budget": 3}, {}, "grid is .*; give a list of values for each field"),
        ({1: [2]}, {}, "grid is .*; give a list of values for each field"),
        (3, {}, "grid is 3; give a list"),
        ({"noise": "x"}, {}, "grid is"),
        ({"rounds": []}, {}, "grid is"),
        ([{"rounds": 3}, 3], {}, "grid is"),
        ({"budgt": [1]}, {}, r"^a field of grid is 'budgt'; did you mean budget\? If not, "),
        ({"budget.eps": [1]}, {}, r"grid is 'budget.eps'; did you mean budget.epsilon\?"),
        ({"rounds.x": [1]}, {}, "^a field of grid is 'rounds.x'; did you mean rounds?"),
        ({"budgt.rounds": [1]}, {}, "grid is 'budgt.rounds'; .* choose one of protect, sampler, "),
        ({"rounds": [5, -1]}, {}, "rounds is -1"),
        ({"release": [True]}, {}, "config is a release"),
        ({"rounds": [5]}, {"seeds": [0, 0]}, "seeds is"),
        ({"rounds": [5]}, {"parallel": 0}, "parallel is 0; give how many"),
        ({"rounds": [5]}, {"parallel": 1.5}, "parallel is 1.5; give how many"),
        ({"rounds": [5]}, {"parallel": np.int64(-2)}, "parallel is .*-2.*; give how many"),
        ({"rounds": [5]}, {"parallel": "jobs.yaml"}, "folder is missing; name one"),
        ({"rounds": [5]}, {"folder": 3}, "folder is 3; give a path"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(grid, options, text, monkeypatch):
    monkeypatch.setattr(sweep, "run", None)
    with pytest.raises(ValueError, match=text):
        swept(grid, **options)


def test_points_that_rows_show_alike_are_refused(monkeypatch):
    monkeypatch.setattr(sweep, "run", None)
    same = {"optimizer": [by_closure(factor)["optimizer"] for factor in (1.0, 2.0)]}
    with pytest.raises(ValueError, match="grid has 2 points that rows show as .*by_closure"):
        swept(same)
    named_alike = [dp.noise.Covariance(np.eye(4) + part, "mine") for part in (0, 1)]
    with pytest.raises(ValueError, match="rows show as {'noise': 'mine'}; give .* a name each"):
        swept({"noise": named_alike})


def test_designs_with_other_parameters_have_rows_of_their_own():
    part = dp.noise.Whisper
    grid = {"noise": [part("run"), part(3), part("run", max_variance=4.0)]}
    result = swept(grid, seeds=[0])
    display = ["whisper_horizon", "whisper_horizon(horizon=3)", "whisper_horizon(max_variance=4.0)"]
    frame = result.to_frame().drop_duplicates("noise")
    assert frame["noise"].tolist() == frame["design"].tolist() == display
    names = [re.split("  +", line)[0] for line in result.summary().splitlines()[2:]]
    assert names == [
        "Whisper, whole run", "Whisper (horizon=3)", "Whisper, whole run (max_variance=4.0)"
    ]  # fmt: skip


def test_progress_is_points_done_of_all(tmp_path, capsys):
    grid = {"noise": [None, dp.noise.Independent()], "optimizer.step_size": [0.1, 0.2]}
    swept(grid, folder=tmp_path)
    assert "points" not in capsys.readouterr().err
    next(tmp_path.glob("*.jsonl")).unlink()
    swept(grid, folder=tmp_path, progress=True)
    output = capsys.readouterr().err
    assert re.findall(r"\d of \d points done", output) == [
        "2 of 4 points done",
        "4 of 4 points done",
    ]


@pytest.mark.slow
def test_processes_give_bits_of_one(tmp_path, capfd):
    frame = swept().to_frame()
    second = swept(parallel=2, progress=True).to_frame()
    pandas.testing.assert_frame_equal(second, frame, check_exact=True)
    output = capfd.readouterr().err
    assert "10 of 10 points done" in output and "waits for" not in output
