"""The examples: how they are called, and one's own covariance and one's own training loop."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import dpjax as dp
from dpjax import cli
from dpjax.accounting.rounding import up
from dpjax.plans import plan
from dpjax.topology import graphs, mixing
from tests.support import load_script, make_config

ROOT = Path(__file__).resolve().parents[2]
SIX = ["Lyon", "Paris", "Brest", "Nice", "Metz", "Lille"]


def example(name):
    """An example as a module."""
    return load_script(name, "examples")


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py"))
WITH_ARGUMENTS = ("own_loop", "release", "secure_sum", "sweep", "two_processes")
NEEDS = {"flare_filter": "nvflare", "flower_mod": "flwr"}
"""Libraries of others that examples import."""
SMALL = {
    "central": {"rounds": 24, "tried": ("SGD",)},
    "departure": {"rounds": 3},
    "federated": {},
    "flare_filter": {},
    "flower_mod": {},
    "over_rounds": {"epochs": 2, "batches": 3},
    "own_design": {"rounds": 5},
    "own_method": {"rounds": 5},
    "own_model": {"rounds": 5},
    "own_sampler": {"rounds": 5},
    "release": {"folder": "released", "rounds": 200},
    "secure_sum": {"clients": 8, "length": 50, "corrupt": 0.0},
    "sweep": {"folder": "swept", "clips": (0.3,), "epsilons": (3.0,), "rounds": 8, "seeds": 2},
    "two_processes": {"folder": "two"},
}
"""Arguments of `main`; `own_loop` has a test of its own."""
BRIEF = ("secure_sum",)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_how_it_is_called(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"python examples/{name}.py" in ast.get_docstring(ast.parse(text))
    # Asked for help, or given what it does not take, it answers before it trains.
    assert ".parse_args()" in text


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_arguments_that_do_not_fit_are_answered_by_usage(name, tmp_path):
    command = [sys.executable, ROOT / "examples" / f"{name}.py", "--nothing"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: {name}.py [-h]")
    assert not list(tmp_path.iterdir())


def test_loop_without_its_file_says_so(tmp_path):
    command = [sys.executable, ROOT / "examples" / "own_loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: own_loop.py [-h] design\n")


@pytest.mark.filterwarnings("ignore::dpjax.plans.statements.HopelessWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BRIEF else pytest.mark.slow)
        for name in EXAMPLES
        if name != "own_loop"
    ],
)
def test_example_runs_twice_in_one_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    module = example(name)
    if name == "federated":
        monkeypatch.setattr(module, "PLACES", 6)
        monkeypatch.setattr(module, "CLIENTS", 4)
    for _ in range(2):
        module.main(**SMALL[name])
        output = capsys.readouterr()
        assert output.out or (name == "sweep" and "points done" in output.err)


def saved(folder, design, relation="replace_agent", rounds=6, **changes):
    """The file of a plan for six sites on a ring."""
    if relation != "replace_agent":
        changes["participation"] = (2, 3)
    config = make_config(
        design=design, epsilon=10.0, relation=relation, rounds=rounds, clip_norm=1.0, **changes
    )
    matrix = mixing.metropolis_hastings(graphs.ring(6))
    return plan.make(config, matrix).save(folder / "design.npz", SIX)


def sites_of(module, path, features=4):
    """The sites of a file, one secret a group, and what was read."""
    design = {name: value[()] for name, value in np.load(path).items()}
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 40, features))
    y = rng.choice([-1.0, 1.0], (6, 40))
    groups = design["seed_group"]
    return [module.Site(design, i, x[i], y[i], 77 + int(groups[i])) for i in range(6)], design


def test_loop_runs_where_dpjax_cannot_be_imported(tmp_path):
    path = saved(tmp_path, "whisper_horizon", rounds=20)
    code = (
        "import runpy, sys; sys.modules['dpjax'] = None; sys.modules['jax'] = None; "
        f"sys.argv = ['own_loop.py', {str(path)!r}]; "
        f"runpy.run_path({str(ROOT / 'examples' / 'own_loop.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, capture_output=True, check=True)
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    for name in SIX:
        (numbers,) = re.findall(
            rf"^{name}: accuracy (\S+), without noise (\S+)$", text, re.MULTILINE
        )
        private, bare = map(float, numbers)
        # The same loop and data, so that the difference is what privacy costs.
        # The noise is another one each time: no more than this holds always.
        assert 0.05 < private and 0.8 < bare <= 1 and private < bare + 0.02
    assert "NOT protected from each other" in text and "at most 20 rounds" in text


def test_commands_of_loop_and_of_its_page_make_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("sites.txt").write_text("Lyon Paris\nParis Brest\nBrest Nice\nNice Lyon\n")
    module = example("own_loop")
    page = (ROOT / "docs" / "howto" / "own_loop.md").read_text()
    for text, labels in ((module.__doc__, list("012345")), (page, SIX[:4])):
        (command,) = re.findall(r"^dpjax (design (?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
        assert cli.main(command.replace("\\\n", " ").split()) == 0
        assert len(module.train("design.npz", rounds=2)) == len(labels)
        out = capsys.readouterr().out
        assert all(f"\n{label}: accuracy" in out for label in labels)
        Path("design.npz").unlink()
    # The same from Python, with the names of the sites.
    code, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(code, {})
    with np.load("design.npz") as file:
        assert file["labels"].tolist() == SIX[:4]
    with np.load(saved(tmp_path, "mafalda", "replace_record")) as file:
        listed = set(re.findall(r"`(\w+)`", page.partition("## Seven rules")[0]))
        assert {name for name in file.files} - listed <= {
            *("header", "digest", "covariance", "multipliers", "precision_bound")
        }


@pytest.mark.parametrize("design", ["independent", "whisper_horizon", "mafalda", "spacetime"])
def test_loop_s_noise_is_file_s(design, tmp_path):
    """Covariance over sites and rounds together, from what the sites draw one by one."""
    module = example("own_loop")
    size = 20_000
    sites, held = sites_of(module, saved(tmp_path, design), features=size)
    drawn = np.empty((6, 6, size))
    for t in range(6):
        for i, site in enumerate(sites):
            site.t = t
            drawn[t, i] = site.noise()
    flat = drawn.reshape(36, size)
    inverse = np.linalg.inv(held.get("strategy", np.eye(6)))
    expected = np.kron(inverse @ inverse.T, held["factor"] @ held["factor"].T)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    error = np.abs(flat @ flat.T / size - expected) / scale
    assert error.max() < 0.04
    # Half again as much noise, or no correlation over rounds, would be seen.
    assert (np.abs(expected - 1.5 * expected) / scale).max() > 0.04
    if "strategy" in held:
        fresh = np.kron(np.eye(6), held["factor"] @ held["factor"].T)
        assert (np.abs(fresh - expected) / scale).max() > 0.1


@pytest.mark.parametrize("relation", ["replace_agent", "replace_record"])
def test_what_loop_clips_is_what_relation_moves(relation, tmp_path):
    """Without noise, a round's message moves by the stated sensitivity at most, and can."""
    module = example("own_loop")
    sites, held = sites_of(module, saved(tmp_path, "independent", relation))
    site, other = (module.Site(held, 0, s.x.copy(), s.y, 7) for s in (sites[0], sites[0]))
    divisor = site.batch_size if relation == "replace_record" else 1
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(50):
        site.noise = other.noise = lambda: 0.0
        distance = 1e3 * rng.normal(size=4)
        if relation == "replace_agent":
            site.x = np.tile(distance, (40, 1))
            other.x = np.tile(-distance, (40, 1))
        else:
            site.x[3], other.x[3] = distance, -distance  # Record 3 is in round 0: 3 mod 3.
        moved = np.linalg.norm(site.message() - other.message()) / site.step_size * divisor
        largest = max(largest, moved)
    # 2 C, and C is 1.
    assert 1.9 < largest <= 2 + 1e-9


def test_records_take_part_when_guarantee_says(tmp_path):
    sites, held = sites_of(example("own_loop"), saved(tmp_path, "mafalda", "replace_record"))
    epochs, separation = held["participation"]
    taken = {}
    for t in range(int(held["rounds"])):
        sites[0].t = t
        for record in sites[0].rows():
            taken.setdefault(int(record), []).append(t)
    assert sorted(taken) == list(range(40))
    for rounds in taken.values():
        assert len(rounds) == epochs and set(np.diff(rounds)) == {separation}


def test_loop_stops_when_budget_is_spent(tmp_path):
    module = example("own_loop")
    sites = module.train(saved(tmp_path, "whisper"), seed=1)
    with pytest.raises(RuntimeError, match="budget is spent"):
        sites[0].message()
    # No round repeats another's noise.
    drawn = [module.normals(sites[0].design, 0, 5, t, 3) for t in range(6)]
    assert len({tuple(item) for item in drawn}) == 6


@pytest.mark.slow
def test_own_design_example_is_short_and_lies_between(capsys):
    assert len((ROOT / "examples" / "own_design.py").read_text().splitlines()) <= 40
    result = example("own_design").main(rounds=60)
    loss = dict(
        zip(
            [item.config.label for item in result.plans],
            result.metrics["test_loss"][-1].mean(0),
            strict=True,
        )
    )
    assert loss["whisper_horizon"] < loss["half-half"] < loss["independent"]
    out = capsys.readouterr().out
    assert "half-half" in out and "times the largest drift" in out


@pytest.mark.slow
def test_departure_example_states_total(capsys):
    first, second = example("departure").main(rounds=3)
    (stated,) = second.guarantees
    assert stated.epsilon == 3.0 and stated.rounds == 6 and len(stated.phases) == 2
    assert stated.phases[0] == first.guarantees[0] and first.guarantees[0].epsilon == 2.0
    assert 0.999 * stated.mu < stated.spent.mu <= stated.mu
    assert second.plans[0].agents == 8
    out = capsys.readouterr().out
    assert "first phase left epsilon 2.062" in out and "was fixed before the first phase" in out


def test_noise_of_own_loop_page_cannot_be_guessed():
    """Standard normals from all bits of SHAKE-256, the same on the page and in the example."""
    page = (ROOT / "docs" / "howto" / "own_loop.md").read_text().partition("## Between processes")
    (code, *_) = re.findall(r"```python\n(.*?)```", page[2], flags=re.DOTALL)
    exec(code, names := {})
    secret, shape = bytes(range(16)), (3, 100_000)
    drawn = names["normals"](secret, 5, shape)
    design = {"seed_group": np.zeros(3, int), "factor": np.eye(3)}
    number = int.from_bytes(secret, "big")
    for i, row in enumerate(drawn):
        other = example("own_loop").normals(design, i, number, 5, shape[1])
        np.testing.assert_allclose(other, row, rtol=1e-15)
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 0.02
    # Another round, or another bit of the secret, gives other numbers.
    for other in (names["normals"](secret, 6, shape), names["normals"](bytes(16), 5, shape)):
        assert np.abs(np.corrcoef(drawn[0], other[0])[0, 1]) < 0.02 and not np.any(other == drawn)


def test_own_loop_page_states_total_over_departure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "own_loop.md").read_text().partition("## A site leaves")[2]
    (code, *_) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    terms = {"epsilon": 10.0, "delta": 1e-5, "rounds": 20, "clip_norm": 1.0}
    network = mixing.metropolis_hastings(graphs.complete(6))
    options = {"dp": dp, "dataclasses": dataclasses, "W": network, "terms": terms, "names": SIX}
    exec(code, options)
    assert options["plan"].guarantee.epsilon == 6.0
    assert "A total of mu = " in options["stated"].statement()
    assert options["stated"].epsilon == 10.0 and options["stated"].rounds == 50
    with np.load("second.npz") as file:
        assert file["labels"].tolist() == [name for name in SIX if name != "Nice"]
        # The total, and the phase's own beside it.
        text = " ".join(str(file["how_to_use"]).split())
        assert float(file["epsilon"]) == 10.0 and file["rounds"] == 30 and file["phase"] == 2
    epsilon = options["second"].guarantee.epsilon
    assert epsilon == pytest.approx(options["rest"].epsilon)
    assert f"This is phase 2. Its own rounds cost epsilon = {up(epsilon)} at delta" in text
    assert "the total of all phases, epsilon = 10" in text and "at most 30 rounds" in text
    assert "Sites start from the models with which phase 1 ended" in text and "zeros" not in text
    with np.load("first.npz") as file:
        assert float(file["epsilon"]) == 10.0 and "(zeros," in str(file["how_to_use"])


@pytest.mark.slow
def test_own_method_example_is_short_and_learns(tmp_path, monkeypatch, capsys):
    """Without its weights it would settle on another average than that of all agents."""
    import matplotlib

    matplotlib.use("Agg")
    assert len((ROOT / "examples" / "own_method.py").read_text().splitlines()) <= 60
    module = example("own_method")
    result = module.main(rounds=100, output=tmp_path / "it.svg")
    assert (tmp_path / "it.svg").exists()
    out = capsys.readouterr().out
    assert "(epsilon = 10" in out and "over 100 rounds against an outsider" in out
    bare, private = result.metrics["test_accuracy"][-1].mean(axis=0)
    assert bare > 0.9 and 0.4 < private <= bare
    # The broken twin: a method that publishes the gradients of this round beside its models.
    with pytest.raises(ValueError, match="method shows .*public"):

        class Leak(module.Push):
            def emit(self, ctx, public_state):
                outcome = super().emit(ctx, public_state)
                return outcome._replace(public=(outcome.public, outcome.private))

            def send(self, ctx, public_state, emission, noisy):
                return super().send(
                    ctx, public_state, emission._replace(public=emission.public[0]), noisy
                )

        plan.make(make_config(method=Leak()), np.eye(6) / 2 + np.roll(np.eye(6), 1, axis=0) / 2)


@pytest.mark.slow
def test_federated_example_trains_and_follows(monkeypatch, capsys):
    module = example("federated")
    monkeypatch.setattr(module, "PLACES", 6)
    monkeypatch.setattr(module, "CLIENTS", 4)
    module.main()
    out = capsys.readouterr().out
    assert "per client" in out and "DOME" in out
    # Four sums of 40 numbers, each with who was there, and one hash.
    assert f"all 4 rounds receives {4 * (40 * 4 + 4) + 32:,} bytes" in out
    # Model, centre and frame; the model's ten times 64 weights and an offset.
    assert f"({4 * (650 * 40 + 2 * 650):,} bytes); the model alone has 2,600" in out
    assert re.findall("([0-9,]+) bytes a client sends a turn", out) == ["160", "2,600"]
