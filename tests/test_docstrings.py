"""Examples in docstrings are run, and what users call first has one."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from dpjax.accounting import gdp
from tests import test_public_api

ROOT = Path(__file__).resolve().parents[1]

# These read files of public weights, some of them by hundreds of names, and of a network.
OF_FILES = {
    "dpjax.topology.graphs.facebook_ego",
}


def sources() -> list[str]:
    """Return the modules that hold examples."""
    paths = (ROOT / "dpjax").rglob("*.py")
    names = (path.relative_to(ROOT).with_suffix("") for path in paths if ">>>" in path.read_text())
    return sorted(".".join(name.parts) for name in names)


def without(modules: list[str]) -> list[str]:
    """Return the public classes and functions that show no call."""
    missing = []
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if getattr(thing, "__module__", "") != module.__name__ or not callable(thing):
                continue
            members = vars(thing).values() if inspect.isclass(thing) else ()
            texts = [thing.__doc__, *(getattr(member, "__doc__", None) for member in members)]
            if not any(">>>" in (text or "") for text in texts):
                missing.append(f"{module.__name__}.{name}")
    return missing


@pytest.mark.parametrize("name", sources())
def test_examples_are_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # Some write a file.
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed, capsys.readouterr().out


def test_what_is_public_has_example() -> None:
    names = [name for name in test_public_api.core_modules() if name != "dpjax"]
    assert set(without(names)) == OF_FILES


@pytest.mark.mutant
def test_missing_example_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdp.epsilon, "__doc__", "Epsilon.")
    assert without(["dpjax.accounting.gdp"]) == ["dpjax.accounting.gdp.epsilon"]


@pytest.mark.mutant
def test_untrue_example_is_caught() -> None:
    def double(x: float) -> float:
        """Return twice the number.

        Example:
            >>> 2 * 2.0
            5.0
        """
        return 2 * x

    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(verbose=False)
    messages: list[str] = []
    for test in finder.find(double, "double", globs={}):
        runner.run(test, out=messages.append)
    assert runner.summarize(verbose=False).failed == 1 and "5.0" in "".join(messages)
