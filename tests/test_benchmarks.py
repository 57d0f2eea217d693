"""What benchmarks compare is the same work."""

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import bench_dpsgd, bench_secagg, bench_sketch, bench_tracking, float32_attack
from dpjax.results import records


def summed(way: str, size: int, mapped: int = 1) -> list[np.ndarray]:
    """A step's sum of gradients of eight images, as a flat list."""
    total: Any = bench_dpsgd.make("cnn5", way, 8, size, mapped)()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(total)]


@pytest.mark.slow
def test_clipped_sums_are_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dpsgd, "CLIP_NORM", 0.05)
    ours = summed("dpjax", 4)
    theirs = summed("jax_privacy", 8)
    for item, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(item, other, atol=2e-5)
    plain = summed("plain conv", 8)
    each = (np.hstack([leaf.ravel() for leaf in total]) for total in (ours, plain))
    clipped, complete = map(np.linalg.norm, each)
    assert clipped <= 8 * 0.05 < complete
    for item, other in zip(plain, summed("plain patches", 4), strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-3, atol=1e-3)
    mapped = summed("dpjax", 4, mapped=2)
    for item, other in zip(mapped, summed("dpjax patches", 4, mapped=2), strict=True):
        assert not np.array_equal(item[0], item[1])
        np.testing.assert_allclose(item, other, atol=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the bench extra is not here")
def test_pytorchs_network_is_as_large() -> None:
    params = list(bench_dpsgd.torch_network().parameters())
    assert sum(param.numel() for param in params) == 412_426


def test_float32_attack_finds_every_possible_word() -> None:
    draws = float32_attack.random_laplaces(3_000)
    for state, other in ((0.0, 0.1), (1 / 3, 1 / 3 + 0.001)):
        messages = np.float32(state) + draws
        present = np.float32(other)
        assert float32_attack.has_words(messages, state, 1.0).all()
        result = float32_attack.has_words(messages, other, 1.0)
        assert 0.5 < result.mean() < 1
        # Many more words are tried for what it holds to be excluded: not one is found.
        left = messages[~result]
        expected = left.astype(np.float64) - float(present)
        size = np.abs(expected)
        steps = np.arange(-1_000, 1_001, dtype=np.int32)
        for beyond, tail in ((True, np.exp(-size)), (False, -np.expm1(-size))):
            near = np.clip(tail, 2.0**-39, 0.4999).astype(np.float32)
            tried = (near.view(np.int32)[:, None] + steps).view(np.float32)
            values = float32_attack.of_tails(tried, beyond, (expected < 0)[:, None])
            assert not (present + values == left[:, None]).any()


def test_attack_sees_no_difference_where_there_is_none() -> None:
    draws = {
        "laplace": float32_attack.random_laplaces(20_000),
        "normal": float32_attack.every_normal()[::1024],
    }
    for kind, some in draws.items():
        assert float32_attack.attack(kind, 1.0, 0.3, 0.0, some)["excluded"] == 0
        # Sums as coarse as the number they are added to: everything is reached.
        assert float32_attack.attack("laplace", 1.0, 1e-4, 1.0, draws["laplace"])["excluded"] == 0
    few = float32_attack.attack("normal", 1.0, 1.0, 0.1, draws["normal"])
    assert few["excluded"] > 0.9 and few["messages"] == 1
    lost = float32_attack.attack("laplace", 1.0, 1e-7, 1.0, draws["laplace"])["unchanged"]
    # Half a spacing below 1 and half of twice that above it.
    below, above = (-np.expm1(-half / 1e-7) for half in (2.0**-25, 2.0**-24))
    assert abs(lost - (below + above) / 2) < 5 * 0.5 / np.sqrt(20_000)


def test_every_way_estimates_same(capsys: pytest.CaptureFixture) -> None:
    for coordinates in (1, 3):
        x, y = bench_tracking.rounds(3, 80, coordinates)
        ways = bench_tracking.ways(coordinates, list(bench_tracking.WAYS))
        assert ("scikit_learn" in ways) == (coordinates == 1) and len(ways) >= 3
        results = {name: way(x, y) for name, way in ways.items()}
        for name, values in results.items():
            # scikit-learn adds noise of its own, 1e-10 wide, and cuts at 0.
            expected = (
                np.maximum(results["tree"], 0.0) if name == "scikit_learn" else results["tree"]
            )
            np.testing.assert_allclose(values, expected, atol=1e-10)
    options = ["--pairs", "2", "--trials", "40", "--repeats", "1", "--ways", "tree", "plain"]
    assert bench_tracking.main(["--what", "estimator", *options]) == 0
    assert "times_tree" in capsys.readouterr().out


def test_what_is_found_of_gaussians_is_of_stated_truth() -> None:
    x, y = (gaussian[0] for gaussian in bench_tracking.gaussians(20_000, 2, 0.8, 0))
    pair = np.corrcoef(x[:, 0], y[:, 0])[0, 1], np.corrcoef(x[:, 1], y[:, 1])[0, 1]
    assert -0.5 * sum(np.log1p(-(r**2)) for r in pair) == pytest.approx(0.8, abs=0.05)
    assert abs(np.corrcoef(x[:, 0], y[:, 1])[0, 1]) < 0.05


@pytest.mark.slow
def test_loops_over_agents_do_what_arrays_of_them_do(capsys: pytest.CaptureFixture) -> None:
    options = Namespace(agents=6, run_rounds=20, run_trials=3, repeats=1)
    loop, arrays = (bench_tracking.scripted(options, 2, loop)() for loop in (True, False))
    np.testing.assert_allclose(loop, arrays, rtol=1e-9)
    sizes = ["--agents", "6", "--run-rounds", "20", "--run-trials", "3", "--repeats", "1"]
    assert bench_tracking.main(["--what", "runs", *sizes]) == 0
    assert "trials_rounds_per_second" in capsys.readouterr().out


@pytest.mark.slow
def test_ways_to_follow_space_find_same_one() -> None:
    sizes = ["--dimensions", "300", "--columns", "4", "--repeats", "1"]
    assert bench_sketch.main(["--what", "peers", *sizes]) == 0
    calls, truth = bench_sketch.peer_calls(300, 4, 32)
    for call in calls.values():
        missed = truth - (basis := np.linalg.qr(np.asarray(call(), float))[0]) @ (basis.T @ truth)
        assert np.linalg.norm(missed, 2) < 1e-2


@pytest.mark.slow
def test_loop_with_its_own_sketch_is_told_by_seeds() -> None:
    case = bench_sketch.BASE | {"k": 8, "noise": 0.01, "floor": "narrow"}
    angle, missed, selection, columns, error = bench_sketch.loop(40, 50, 2, case, np.float32)
    assert angle.shape == missed.shape == selection.shape == columns.shape == (2,)
    assert (0 < missed).all() and (missed < 1).all() and (selection <= 4).all()
    np.testing.assert_allclose(columns, selection + 4, atol=0.5)  # a round apart, of those to come
    assert (error >= 0.5 * missed).all()


@pytest.mark.slow
def test_training_tells_what_frames_hold_by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_sketch.TASKS, "digits", (192, 4.0, 1, (8,)))
    bench_sketch.task.cache_clear()
    held, scores = bench_sketch.trained("digits", 0.9, bench_sketch.Learned(8, probes=8), 2, 2)
    bench_sketch.task.cache_clear()
    assert held.shape == scores.shape == (2,) and (0 <= scores).all() and (scores <= 1).all()
    # All columns are probes: a random frame's share, 8 of 2,410, over six rounds.
    assert (0.2 * 8 / 2410 < held).all() and (held < 3 * 8 / 2410).all()


def test_page_says_what_was_recorded_of_probes_in_training() -> None:
    stored = Path(__file__).parents[1] / "benchmarks" / "records"
    names = ("sketch_training.jsonl", "sketch_training_digits.jsonl")
    frame = records.read([stored / name for name in names])
    frame = frame[(frame["forgetting"] == 0.95) & (frame["times"] == 1)]
    better = []
    for (_, _, k), rows in frame.groupby(["dataset", "centre", "k"]):
        accuracy = rows.pivot(index="seed", columns="probes", values="test_accuracy")
        gain = accuracy[k // 2] - accuracy[4]
        assert len(gain) == 5 and gain.mean() > 0
        # Student's t with four degrees of freedom, at 95 %.
        better.append(gain.mean() > 2.776 * gain.std() / np.sqrt(5))
    assert len(better) == 6 and sum(better) == 2


@pytest.mark.slow
def test_frames_of_loop_move_and_stay_orthonormal() -> None:
    frames = bench_sketch.motions(30, 12, 4, bench_sketch.BASE | {"k": 6})
    products = frames.transpose(0, 2, 1) @ frames
    np.testing.assert_allclose(products, np.stack([np.eye(6)] * 4), atol=1e-4)
    assert np.abs(frames[1:] - frames[:-1]).max() > 0.1


@pytest.mark.slow
def test_sums_that_are_timed_are_sums(capsys: pytest.CaptureFixture) -> None:
    for name in ("cryptography", "msgpack"):
        pytest.importorskip(name, reason="the extra `secure` is not installed")
    sizes = ["--clients", "20", "--jit-clients", "20", "--lengths", "8", "--repeats", "0"]
    assert bench_secagg.main([*sizes, "--peer-clients", "0"]) == 0
    output = capsys.readouterr().out
    assert all(f"what {kind}" in output for kind in ("protocol", "tcp", "jit"))
    assert all(f"adversary {name}" in output for name in bench_secagg.ADVERSARIES)
    values = bench_secagg.vectors_of(5, 3)
    bench_secagg.check(values, [0, 2], values[0] + values[2])
    with pytest.raises(AssertionError, match="the sum is wrong"):
        bench_secagg.check(values, [0, 2], values[0] + values[1])


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="the bench extra is not here")
@pytest.mark.filterwarnings("ignore:'click.utils.:DeprecationWarning")  # flwr's, on import
def test_peer_sums_same_vectors() -> None:
    terms = bench_secagg.terms_of(20, 8)
    values = bench_secagg.vectors_of(20, 8)
    leaves = bench_secagg.leaves_of(terms, ("mask",))
    ours = bench_secagg.dpjax_sum(terms, values, leaves)
    assert bench_secagg.flower_sum(terms, values, leaves).keys() == ours.keys()
