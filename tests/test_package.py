"""The package's metadata, its plain files and its scripts."""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dpjax
from dpjax.accounting import forecast, gdp
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import make_config

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("cluster", "contrib", "pretrained", "secure", "sites", "dev")
FOLDERS = (ROOT / "scripts", ROOT / ".ci")
# Whose dpjax examples run: `scripts/test --all` names a Python that has the wheel alone.
PYTHON = os.environ.get("DPJAX_INSTALLED", sys.executable)
SCRIPTS = [
    path for folder in FOLDERS for path in folder.iterdir() if path.is_file() and not path.suffix
]


def test_version_is_one() -> None:
    assert f"version: {dpjax.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert dpjax.__version__ in (ROOT / "CHANGELOG.md").read_text()
    try:
        installed = importlib.metadata.version("dpjax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dpjax is on the path, not installed")
    assert installed == dpjax.__version__


def test_package_is_typed_and_licensed() -> None:
    assert (Path(dpjax.__file__).parent / "py.typed").is_file()
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_extras_are_there() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"cuda", "contrib", "pretrained", "secure", "sites", "dev", "bench", "docs"} <= set(
        extras
    )
    assert {"dpjax[contrib]", "dpjax[pretrained]", "dpjax[secure]", "dpjax[sites]"} <= set(
        extras["dev"]
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_bash(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not path.name.startswith("_"):
        assert os.access(path, os.X_OK)
        assert "set -euo pipefail" in path.read_text()


def test_no_python_is_clear_message(tmp_path: Path) -> None:
    command = f"set -euo pipefail; cd {ROOT}; source scripts/_environment.sh; environment dev"
    env = {"PATH": os.environ["PATH"], "DPJAX_VENV": str(tmp_path / "v"), "DPJAX_PYTHON": "nope"}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"  # a setting of pip's: uv is left out
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "dpjax needs Python 3.11 or newer" in done.stderr and "nope" in done.stderr
    assert not (tmp_path / "v").exists()


def _environment(folder: Path, extra: str, venv: Path) -> str:
    """Run ``environment`` in ``folder`` and return what pip was called with."""
    command = f"set -euo pipefail; source scripts/_environment.sh; environment {extra}"
    env = {"PATH": os.environ["PATH"], "DPJAX_VENV": str(venv), "PIP_RETRIES": "0"}
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, env=env, cwd=folder)
    calls = venv / "calls"
    text = calls.read_text() if calls.exists() else ""
    calls.unlink(missing_ok=True)
    return text


def test_environment_is_made_again_for_changed_project(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_environment.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # A stand-in for the interpreter of an environment: it only writes down pip's installs.
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    stub = f'#!/bin/sh\ncase "$*" in *install*) echo "$*" >>"{venv}/calls";; esac\n'
    (venv / "bin" / "python").write_text(stub)
    (venv / "bin" / "python").chmod(0o755)

    assert "--editable ." in _environment(tmp_path, "", venv)
    assert _environment(tmp_path, "", venv) == ""
    assert "--editable .[dev]" in _environment(tmp_path, "dev", venv)
    assert _environment(tmp_path, "dev", venv) == ""
    assert _environment(tmp_path, "", venv) == "", "the dev environment holds the plain one"
    with open(tmp_path / "pyproject.toml", "a") as project:
        project.write("# changed\n")
    assert "--editable .[dev]" in _environment(tmp_path, "dev", venv)


def test_version_managers_give_newest_python(tmp_path: Path) -> None:
    """Shims that do not start, versions that are not supported and other names are passed over."""

    def interpreter(path: Path, code: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)

    newest = max(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"])))
    right = tmp_path / f"versions/{newest}.0/bin/python"
    for path in (right, tmp_path / "versions/3.99.0/bin/python", tmp_path / "bin/python3.99"):
        interpreter(path, "exit 0")
    interpreter(tmp_path / f"bin/python{newest}", "exit 127")
    interpreter(tmp_path / "current", "echo 3.11")
    command = f"cd {ROOT}; source scripts/_environment.sh; newest_python"
    path = f"{tmp_path}/bin:{os.defpath}"
    env = {"PATH": path, "PYENV_ROOT": str(tmp_path), "PYTHON": str(tmp_path / "current")}

    def found() -> tuple[str, str]:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
        return done.stdout.strip(), done.stderr

    assert found() == (str(right), "")
    interpreter(tmp_path / "current", f"echo {newest}")
    assert found()[0] == "" and f"skipped: Python {newest} is in use" in found()[1]


def test_lock_holds_what_project_needs() -> None:
    lock = dict(
        re.findall(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$", LOCK.read_text(), re.MULTILINE)
    )
    needed = sum(
        (PROJECT["optional-dependencies"][name] for name in EXTRAS), PROJECT["dependencies"]
    )
    for line in needed:
        requirement = Requirement(line)
        if requirement.name != "dpjax":
            assert lock[requirement.name.lower()] in requirement.specifier, line
    with open(ROOT / "benchmarks/records/dsgd.jsonl") as record:
        versions = json.loads(next(record))["metadata"]["versions"]
    assert {name: lock[name] for name in ("jax", "jaxlib", "numpy")}.items() <= versions.items()


def test_readme_s_quick_start_has_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    command = readme.partition("## Quick start")[2]
    assert 0 <= command.index("scripts/demo") < command.index("scripts/test")


def quick_start() -> tuple[str, str]:
    """The README's first program, and what it prints."""
    program, printed = re.findall(
        r"```(?:python|text)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )[:2]
    return program, printed


@pytest.mark.slow
def test_short_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program, printed = quick_start()
    assert len(ast.parse(program).body) <= 15
    exec(program.replace("rounds=100", "rounds=2").replace("range(3)", "[0]"), {})
    _, *caption = capsys.readouterr().out.splitlines()
    _, *expected = printed.splitlines()
    assert caption == [line.replace("T = 100", "T = 2") for line in expected]


@pytest.mark.slow
def test_quick_start_prints_what_readme_shows(tmp_path: Path) -> None:
    program, printed = quick_start()
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    accuracy, *caption = done.stdout.splitlines()
    reference, *expected = printed.splitlines()
    assert caption == expected
    assert float(accuracy.split()[1]) == pytest.approx(float(reference.split()[1]), abs=0.02)


# What pages say is given.
GIVEN = {
    "SECURITY": """
import dpjax as dp
config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), noise=dp.noise.Independent(),
                   budget=dp.Budget(4.0, delta=1e-5), sampler=dp.samplers.Random(1),
                   optimizer=dp.optimizers.Sgd(0.1), rounds=2)
plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
""",
    "file": """
rows = [f"{site},{30 + age},{60 + age},{answer}"
        for site in ("A", "B") for age, answer in enumerate(["yes", "no"] * 5)]
open("patients.csv", "w").write("\\n".join(["site,age,pulse,ill", *rows]))
""",
    "network": """
open("network.txt", "w").write("Aachen Bonn\\nBonn Cologne\\nCologne Aachen\\n")
""",
}


def examples(path: Path) -> str:
    """The programs of a page, one after the other, as somebody who reads it would type them."""
    argument = GIVEN.get(path.stem, "")
    matches = re.findall(r"```py(?:thon)?\n(.*?)```", path.read_text(), flags=re.DOTALL)
    if importlib.util.find_spec("torch") is None:
        matches = [program for program in matches if "import torch" not in program]
    return "\n".join([argument, *matches]) if matches else ""


# `tests/experiments/test_examples.py` runs those of own_loop with the files that they read.
WITH_EXAMPLES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if examples(path) and path.stem != "own_loop" and path.parent.name != "reference"
]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*WITH_EXAMPLES, ROOT / "SECURITY.md"], ids=lambda page: page.stem)
def test_examples_of_page_run(page: Path, tmp_path: Path) -> None:
    """Outside the repository, with the package alone: none imports the shared code of folders."""
    path = "" if PYTHON != sys.executable else str(ROOT)
    done = subprocess.run(
        [PYTHON, "-c", examples(page)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
QUICK = {"secure_sum": ["8"]}
"""Examples that take seconds, with their arguments; the others only say how they are called."""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_starts_with_package_alone(example: Path, tmp_path: Path) -> None:
    """Where a wheel is installed, nothing of the checkout is on the path but the example."""
    copied = shutil.copy(example, tmp_path)
    path = "" if PYTHON != sys.executable else str(ROOT)
    done = subprocess.run(
        [PYTHON, copied, *QUICK.get(example.stem, ["--help"])], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if example.stem not in QUICK:
        assert done.stdout.startswith(f"usage: {example.name}")


@pytest.mark.slow
def test_installed_package_is_not_that_of_checkout(tmp_path: Path) -> None:
    if PYTHON == sys.executable:
        pytest.skip("DPJAX_INSTALLED names no Python with a wheel")
    done = subprocess.run(
        [PYTHON, "-c", "import dpjax; print(dpjax.__file__)"], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorials_run_and_were_run(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    program = (
        "import sys, nbclient, nbformat; book = nbformat.read(sys.argv[1], as_version=4); "
        "nbclient.NotebookClient(book, timeout=600, kernel_name='python3').execute()"
    )
    done = subprocess.run(
        [PYTHON, "-c", program, str(path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_documents_name_files_that_exist() -> None:
    pages = set((ROOT / "docs").rglob("*.md")) - set((ROOT / "docs" / "reference").glob("*.md"))
    for document in [*ROOT.glob("*.md"), *sorted(pages)]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_table_of_models_that_network_affords_is_computed() -> None:
    """Closed forms in every row; what the design over the horizon gains, between the two."""
    text = (ROOT / "docs/parts/model_size.md").read_text()
    rows = re.findall(r"^\| `er:(\d+):\S+` \| (agent|record) \| (.*) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 6
    for n, unit, cells in rows:
        units = int(n) * (32 if unit == "record" else 1)
        for epsilon, cell in zip((1.0, 4.0, 10.0), cells.split(" | "), strict=True):
            numbers = cell.split(", ")
            independent, horizon, best = (int(number.replace(",", "")) for number in numbers)
            mu = float(gdp.mu(epsilon, 1e-5))
            ratio = forecast.GOOD[unit]
            limit = (ratio * units * mu / 2) ** 2
            assert best == int(limit) and independent == int(limit / int(n))
            assert independent <= horizon <= best


def test_table_s_horizon_aware_numbers_are_plan_s() -> None:
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(12, 0.4, 0))
    for relation, affords in (("replace_agent", 26), ("replace_record", 4332)):
        config = make_config(
            design="whisper_horizon", epsilon=10.0, relation=relation, rounds=1000, batch_size=32
        )
        assert plan.make(config, matrix).forecast(1).affords() == affords
