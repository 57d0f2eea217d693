"""Examples in docstrings are run, and what users call first has one."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from dpjax.plans import links, noise, optimizers, samplers

ROOT = Path(__file__).resolve().parents[1]

NAMED = {
    "topology.graphs": "erdos_renyi ring complete grid exponential florentine from_edgelist",
    "topology.mixing": "metropolis_hastings uniform_neighbors survivors",
    "topology.gossip": "mix",
    "mechanism.participation": "Participation",
    "mechanism.factorization": "minimize_trace",
    "mechanism.filters": "checked impulse_response",
    "mechanism.spatial": "independent pairwise whisper central energy figures",
    "mechanism.temporal": "workload_gram mafalda prefix_sum identity anti_pgd sensitivity "
    "objective strategy_of",
    "mechanism.spacetime": "design",
    "mechanism.laplace": "geometric geometric_gaussian first_scale first_deviation",
    "accounting.pure": "epsilon mu epsilon_of_moves mu_of_moves",
    "accounting.replay": "measured",
    "accounting.gdp": "epsilon delta mu rdp zcdp",
    "accounting.leakage": "mutual_information",
    "accounting.discrete": "Cohort tau round_epsilon loss largest_rho smallest_grid",
    "accounting.finite": "grid",
    "accounting.views": "dsgd muffliato decor zip_dl linear",
    "secagg.graph": "parameters harary",
    "secagg.local": "summed",
    "secagg.tcp": "Listener",
    "secagg.terms": "Terms",
    "secagg.transport": "terms_of taking_turns",
    "secagg.integers": "Stream discrete_gaussians variance_above SumCode encode",
    "transforms.noise": "correlated scheduled",
    "transforms.integers": "privatizer discrete_gaussians",
    "transforms.clipping": "per_agent per_example",
    "transforms.lowpass": "lowpass",
    "transforms.optimizers": "momentum muon",
    "transforms.sketch": "start update flat fingerprint Quantile aligned",
    "transforms.masks": "masked unmasked_sum",
    "data.partition": "iid by_size dirichlet by_owner",
    "algorithms.dsgd": "DSGD",
    "algorithms.relays": "Relayed spanning",
    "algorithms.scaled": "Scaled",
    "algorithms.sketches": "Learned noise_floor",
    "algorithms.zip_dl": "ZipDL",
    "algorithms.average": "Average",
    "algorithms.disk": "DiSK",
    "algorithms.pmlf": "PMLF",
    "commands.account": "account",
    "commands.design": "design",
    "plans.integers": "Discrete",
    "plans.protect": "Protect Budget",
    "plans.plan": "Config make",
    "plans.problem": "supervised quadratics",
    "engine.run": "run",
    "results.records": "write",
    "results.tables": "summary text",
}
"""What scripts call by names that stay, and what a run is made of."""

BASES = {"Correlated"}
"""Noise that is no design by itself."""


def sources() -> list[str]:
    """Return the modules that hold examples."""
    paths = (ROOT / "dpjax").rglob("*.py")
    names = (path.relative_to(ROOT).with_suffix("") for path in paths if ">>>" in path.read_text())
    return sorted(".".join(name.parts) for name in names)


def called() -> list[tuple[str, str]]:
    """Return (module, name) of all that must have an example."""
    names = [(f"dpjax.{module}", name) for module, all in NAMED.items() for name in all.split()]
    for module in (noise, links, optimizers, samplers):
        parts = [name for name in module.__all__ if inspect.isclass(getattr(module, name))]
        names += [(module.__name__, name) for name in parts if name not in BASES]
    return names


@pytest.mark.parametrize("name", sources())
def test_examples_are_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # Some write a file.
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed, capsys.readouterr().out


@pytest.mark.parametrize(("module", "name"), called())
def test_what_users_call_first_has_an_example(module: str, name: str) -> None:
    home = importlib.import_module(module)
    thing = getattr(home, name)
    assert name in home.__all__, f"{module}.{name} is not public"
    assert ">>>" in (thing.__doc__ or ""), f"{module}.{name} has no example"


@pytest.mark.mutant
def test_an_untrue_example_is_caught() -> None:
    def double(x: float) -> float:
        """Return twice the number.

        Example:
            >>> 2 * 2.0
            5.0
        """
        return 2 * x

    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    told: list[str] = []
    for test in finder.find(double, "double", globs={}):
        runner.run(test, out=told.append)
    assert runner.summarize(verbose=False).failed == 1 and "5.0" in "".join(told)
