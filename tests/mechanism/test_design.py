"""Saved designs: fingerprints, refusals, files that are complete or not there."""

from pathlib import Path

import numpy as np
import pytest

from dpjax.mechanism import design, spatial
from dpjax.plans import noise
from dpjax.topology import graphs, mixing
from tests.support import DESIGNED, designed

W = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 0))


@pytest.mark.parametrize("kind", DESIGNED)
def test_make_save_load(kind: str, tmp_path: Path) -> None:
    result = designed(kind, W, 0.3, 10)
    assert result.kind == kind
    read = design.Design.load(result.save(tmp_path / "folder" / "design.npz"))
    for name in ("kind", "mixing_fingerprint", "precision_bound", "horizon", "value"):
        assert getattr(read, name) == getattr(result, name)
    assert (read.fingerprint, read.gap) == (result.fingerprint, result.gap)
    assert read.options == result.options
    assert read.check(W, 0.3) is read
    assert read.horizon == (10 if kind == "whisper_horizon" else None)
    assert result.value == pytest.approx(spatial.energy(result.covariance, W, result.horizon))
    if kind.startswith("whisper"):
        assert 0 <= result.gap < 1e-8
    assert not list(tmp_path.glob("**/*.tmp"))


def test_every_agent_computes_same_bits() -> None:
    edges = list(graphs.erdos_renyi(8, 0.5, 0).edges)
    prints = set()
    for order in (edges, edges[::-1]):
        graph = graphs.ring(8)
        graph.remove_edges_from(list(graph.edges))
        graph.add_edges_from(order)
        matrix = mixing.metropolis_hastings(graph)
        covariance = design.Design.whisper(matrix, 0.3, tolerance=0, max_iterations=40)
        prints.add(covariance.fingerprint)
    assert len(prints) == 1


def test_mismatch_is_refused() -> None:
    covariance = design.Design.whisper(W, 0.3, horizon=10)
    other = W.copy()
    other[0, 0] = np.nextafter(other[0, 0], 1)
    with pytest.raises(ValueError, match="mixing has fingerprint"):
        covariance.check(other, 0.3)
    with pytest.raises(ValueError, match=r"precision_bound is 0\.31"):
        covariance.check(W, 0.31)


def test_bounds_per_agent_survive_file(tmp_path: Path) -> None:
    bounds = np.linspace(1, 2, 8)
    read = design.Design.load(design.Design.whisper(W, bounds).save(tmp_path / "d.npz"))
    read.check(W, bounds)
    with pytest.raises(ValueError, match="precision_bound"):
        read.check(W, bounds[::-1])


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "other kind", "empty"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    path = design.Design.whisper(W, 0.3).save(tmp_path / "d.npz")
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        arrays["covariance"][0, 0] *= 0.5  # too little noise
        np.savez(path, **arrays)
    elif damage == "foreign":
        np.savez(path, x=np.ones(3))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        from dpjax.mechanism.factorization import Solution, minimize_trace

        minimize_trace(factor=W).save(path)
        assert Solution.load(path).n == 8 if hasattr(Solution, "n") else Solution.load(path)
    with pytest.raises(ValueError, match="path is"):
        design.Design.load(path)
    with pytest.raises(FileNotFoundError, match="^path is .*which does not exist; give a file"):
        design.Design.load(tmp_path / "absent.npz")


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(ValueError, match="path is .*cannot be written .disk full.; make room"):
        design.Design.whisper(W, 0.3).save(tmp_path / "d.npz")
    assert not list(tmp_path.iterdir())


def test_options_are_recorded() -> None:
    covariance = design.Design.whisper(W, 0.3, step_sizes=np.ones(5), weights=np.ones(8))
    assert covariance.horizon == 5
    assert set(covariance.options) == {"step_sizes", "weights", "max_variance"}
    grouped = design.Design.whisper(W, 0.3, subgroups=[[0, 1, 2], [3, 4, 5, 6, 7]])
    assert grouped.options["subgroups"] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert 0 <= grouped.gap < 1e-5


def test_pairwise_reports_its_bound() -> None:
    complete = mixing.metropolis_hastings(graphs.complete(8))
    assert not design.Design.pairwise(complete, 1.0).converged
    assert design.Design.pairwise(W, 1.0).converged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 0}, "horizon is 0"),
    ],
)
def test_whisper_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        design.Design.whisper(W, 0.3, **options)


def test_design_is_of_network_that_is_checked() -> None:
    with pytest.raises(ValueError, match="mixing"):
        design.Design.independent(np.eye(3), 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: design.Design.whisper(W, 1.0, subgroups=[["Bonn"]]), "subgroups names 'Bonn'"),
        (lambda: noise.Whisper(subgroups=(("Bonn",),)), "subgroups names 'Bonn'"),
        (lambda: noise.Whisper("all"), "horizon is 'all'; give \"run\", a whole number from 1"),
    ],
)
def test_subgroups_and_horizons_that_are_none_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
