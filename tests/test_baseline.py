"""What a change of the code's form must keep: values of an earlier commit, compared one by one.

The file `BASELINE` holds them, with the commit and versions in its head. Keys, batches and integers
are the same bits on every machine. Losses and arrays agree to 1e-12, and raw normals to the bit,
on a platform like that of the head; elsewhere to `ELSEWHERE`. If a value changes on purpose, write
the file again and say why in the changelog:

    python -m tests.test_baseline --write tests/baseline/values.json
"""

import argparse
import base64
import functools
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # The tests' platform, before the first import of jax.
    importlib.import_module("tests.conftest")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.typing import ArrayLike

import dpjax as dp

# Where a part moves, its line here is the one to change.
from dpjax.accounting import budget, gdp, leakage, pure, views
from dpjax.accounting.guarantee import Guarantee
from dpjax.algorithms.exchange import Trusted
from dpjax.contrib.masks import Masked
from dpjax.contrib.optimizers import scale_by_adam
from dpjax.engine.keys import derive
from dpjax.mechanism import laplace, spacetime, spatial, temporal
from dpjax.mechanism.design import Design
from dpjax.mechanism.participation import Participation
from dpjax.results import records
from dpjax.secagg import graph
from tests.support import load_script, make_config, make_problem

Value = Any
"""A number, a text, or a list or dict of values: what JSON holds."""
Values = dict[str, Value]

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tests" / "baseline" / "values.json"
STORED = ROOT / "docs" / "records"

CLOSE = 1e-12
ELSEWHERE = 1e-5
"""Other libraries and processors round otherwise, also in the float32 factor of the noise."""
RUN = 1e-5
"""A run is one compiled program. A compiler may add in another order where the program differs,
though it means the same; so bits of models are reported and not required."""

AGENTS = 6
RECORDS = 24
NETWORK = dp.mixing.metropolis_hastings(dp.graphs.erdos_renyi(AGENTS, 0.5, 0))
COMPLETE = dp.mixing.metropolis_hastings(dp.graphs.complete(AGENTS))
RING = dp.mixing.metropolis_hastings(dp.graphs.ring(AGENTS))
COUNTS = np.full(AGENTS, RECORDS)
UNEQUAL = np.array([20, 24, 30, 24, 45, 28])
KEY = jax.random.key(11, impl="threefry2x32")

GROUPS = ((0, 3, 4), (1, 2, 5))
DEALT = {"relation": "replace_record", "participation": (4, 5), "batch_size": 5}
POISSON = {"relation": "zero_out_record", "design": "whisper", "epsilon": 2.0}
CORRELATION = 0.2 + 0.8 * np.eye(AGENTS)
STRATEGY = np.eye(20) + 0.5 * np.eye(20, k=-1)
PURE = {
    "budget": dp.Budget(1.0, accountant="pure"),
    "protect": dp.Protect("replace_agent", gradient_gap=2.0, norm="l1"),
    "optimizer": dp.optimizers.Sgd(0.01, decay=0.8),
    "sampler": dp.samplers.Random(1),
}
LAPLACE = dp.noise.ScheduledLaplace(0.9)
CLIPPED = {**PURE, "protect": dp.Protect("replace_agent", 1.0, norm="l1")}
GAP = {**PURE, "budget": dp.Budget(1.0, delta=1e-5)}
GAP["protect"] = dp.Protect("replace_agent", gradient_gap=2.0)
SUMS = {
    "matrix": COMPLETE,
    "rounds": 12,
    "sampler": dp.samplers.Clients(3, 2, 2),
    "method": dp.methods.Federated(Trusted()),
    "counts": np.full(AGENTS, 6),
}
CLIENT = dp.Protect("zero_out_client", clip_norm=0.5, attacker="aggregator")
ZCDP = dp.Budget(2.0, 1e-5, accountant="zcdp")

# Changes of `tests.support.make_config`; and "matrix" and "counts" of the plan.
PLANS: dict[str, Values] = {
    "no noise": {"design": "non_private"},
    "independent": {"design": "independent"},
    "independent, records": {"design": "independent", "relation": "replace_record"},
    "independent, rdp": {"design": "independent", "accountant": "rdp"},
    "whisper, paper": {"design": "whisper", "accountant": "paper", "allow_unsound": True},
    "independent, node": {"design": "independent", "attacker": "node"},
    "gossip steps": {"design": "independent", "method": dp.methods.DSGD(gossip_steps=3)},
    "pairwise": {"design": "pairwise"},
    "whisper": {"design": "whisper"},
    "whisper, horizon": {"design": "whisper_horizon", "rounds": 12},
    "whisper, groups": {"design": "whisper", "subgroups": GROUPS},
    "whisper, budgets": {"design": "whisper", "epsilon": (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)},
    "whisper, schedule": {"design": "whisper", "matrix": np.stack([NETWORK, RING])},
    "whisper, release": {"design": "whisper", "release": True},
    "automatic clip": {"design": "whisper", "relation": "zero_out_record", "clipping": "automatic"},
    "anti-pgd": {"design": "anti_pgd"},
    "prefix sum": {"design": "prefix_sum", **DEALT},
    "prefix sum, coalition": {"design": "prefix_sum", "attacker": "coalition", "nodes": (0, 3)},
    "mafalda": {"design": "mafalda", **DEALT},
    "mafalda, release": {"design": "mafalda", **DEALT, "release": True},
    "banded inverse": {"design": "banded_inverse"},
    "one step": {"design": "one_step"},
    "space-time": {"design": "spacetime", "rounds": 8},
    "covariance": {"noise": dp.noise.Covariance(CORRELATION, "mine", strategy=STRATEGY)},
    "polynomial": {"noise": dp.noise.Polynomial()},
    "full": {
        "design": "independent", "relation": "zero_out_record", "sampler": dp.samplers.Full(),
        "counts": UNEQUAL,
    },
    "poisson": {**POISSON, "sampler": dp.samplers.Poisson(6.0, 4), "counts": COUNTS},
    "poisson, unequal": {**POISSON, "sampler": dp.samplers.Poisson(5.0, 8), "counts": UNEQUAL},
    "poisson, bands": {
        **POISSON, "sampler": dp.samplers.Poisson(3.0, 4, separation=2), "counts": COUNTS,
        "noise": dp.noise.PrefixSum(bands=2),
    },
    "pair keys": {"noise": dp.noise.PairKeys(2.0), "attacker": "node"},
    "pair keys, coalition": {
        "noise": dp.noise.PairKeys(2.0), "attacker": "coalition", "nodes": (1, 4),
    },
    "zip-dl": {
        "method": dp.methods.ZipDL(), "noise": dp.noise.ZeroSum(), "attacker": "node",
        "gradients": "view", "rounds": 5,
    },
    "disk": {"method": dp.methods.DiSK(), "design": "whisper"},
    "pmlf": {
        **POISSON, "method": dp.methods.PMLF(length=3, beta=0.5, gossip_steps=2),
        "design": "independent", "sampler": dp.samplers.Poisson(6.0, 4), "counts": COUNTS,
    },
    "average": {
        "method": dp.methods.Average(dp.methods.DSGD(), decay=0.6), "design": "whisper",
    },
    "adam": {
        "design": "whisper",
        "optimizer": dp.optimizers.Chain(optax.adam, optax.cosine_decay_schedule(0.1, 20)),
    },
    "tracking, laplace": {
        **PURE, "method": dp.methods.Tracking(5.0), "noise": LAPLACE,
    },
    "tracking, normal": {
        **GAP, "method": dp.methods.Tracking(5.0), "noise": dp.noise.ScheduledGaussian(0.9),
    },
    "two variables": {**CLIPPED, "method": dp.methods.DiffTVAB(), "noise": LAPLACE},
    "sums of steps": {**CLIPPED, "method": dp.methods.PPDOAGT(), "noise": LAPLACE},
    "d-sgd, laplace": {**CLIPPED, "noise": LAPLACE},
    "shares": {**SUMS, "noise": dp.noise.SumShares(), "protect": CLIENT},
    "shares, dropouts": {
        **SUMS, "noise": dp.noise.SumShares(1, 1), "method": dp.methods.Federated(Trusted(1)),
        "protect": dp.Protect("replace_record", clip_norm=0.5, attacker="aggregator"),
    },
    "integers": {
        **SUMS, "noise": dp.noise.Discrete(6), "protect": CLIENT, "budget": ZCDP,
    },
    "integers, masked": {
        **SUMS, "noise": dp.noise.Discrete(6, 1, 1), "protect": CLIENT, "budget": ZCDP,
        "method": dp.methods.Federated(Masked(1)),
    },
    "sketch": {
        **SUMS, "noise": dp.noise.Independent(), "method": dp.methods.dome(2, probes=1),
        "protect": dp.Protect("zero_out_client", clip_norm=0.5),
        "optimizer": dp.optimizers.Chain(
            lambda step, noise: optax.chain(scale_by_adam(noise), optax.sgd(step)), 0.1, True
        ),
    },
}  # fmt: skip
PRIVATIZERS = (
    *("independent", "whisper", "mafalda", "poisson, bands", "space-time", "polynomial"),
    *("pair keys", "tracking, laplace", "tracking, normal", "shares", "integers"),
)
SAMPLERS = ("independent", "prefix sum", "full", "poisson, unequal", "poisson, bands", "shares")
SLOW_PLANS = ("zip-dl", "poisson, unequal")
RUNS = ("whisper", "mafalda", "tracking, laplace")
SLOW_RUNS = (
    *("poisson, bands", "pair keys", "zip-dl", "integers", "integers, masked", "sketch", "disk"),
    *("average", "adam", "two variables", "space-time", "no noise"),
)
PRESETS = ("whisper_quadratic", "whisper_departure", "tracking_mnist")
CODED = 10
"""Rounds whose draws a float32 model can tell apart."""


@functools.cache
def make_plan(name: str) -> dp.Plan:
    """The plan of a row of `PLANS`."""
    changes = dict(PLANS[name])
    matrix = changes.pop("matrix", NETWORK)
    counts = changes.pop("counts", None)
    return dp.make_plan(make_config(**changes), matrix, counts=counts)


@functools.cache
def make_task(name: str) -> dp.Problem:
    """A problem that fits the plan of a row."""
    counts = PLANS[name].get("counts")
    return make_problem(AGENTS, records=RECORDS if counts is None else int(counts[0]))


# ------------------------------------------------------------------------------ What is compared.


def array_value(array: ArrayLike) -> Values:
    """An array by its bits; and numbers that show how far another one is from it."""
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(array.tobytes())
    # Waves weigh entries differently, so that a permutation shows.
    flat = array.astype(np.float64).ravel()
    waves = np.cos(np.arange(flat.size))
    return {
        "kind": array.dtype.str,
        "shape": list(array.shape),
        "sha256": digest.hexdigest(),
        "first": flat[:6].tolist(),
        "moments": [float(np.abs(flat).sum()), float(flat @ waves), float(np.square(flat).sum())],
    }


def tree_value(tree: object) -> list[Values]:
    """The arrays of a tree in its order, whatever its class."""
    return [array_value(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


def stated(compute: Callable[[], Value]) -> Value:
    """A number, or "refused" where none is stated: a refusal must stay one."""
    try:
        return compute()
    except ValueError:
        return "refused"


def loss_values(guarantee: Guarantee) -> Values:
    """Whatever a guarantee states as a number."""
    rounds = guarantee.rounds
    marks = sorted({1, rounds // 2, rounds})
    accountant = guarantee.accountant if guarantee.mu is None else "gdp"
    values = {
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "mu": guarantee.mu,
        "exact": guarantee.exact_epsilon,
        "agents": list(guarantee.per_agent_epsilon or ()),
        "agents' mu": list(guarantee.per_agent_mu or ()),
        "after": [stated(lambda mark=mark: guarantee.after(mark).epsilon) for mark in marks],
        "records": [stated(lambda k=k: guarantee.for_records(k)) for k in (1, 2, 5)],
        "twice": stated(lambda: guarantee.followed_by(guarantee, planned=True).epsilon),
        "stopped": stated(lambda: guarantee.stopping_at(marks).stopped(marks[1]).epsilon),
        "total": stated(lambda: within(guarantee, accountant)),
        "parties": [party.epsilon for party in guarantee.protection()],
    }
    again = Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict())))
    values["stored"] = again.epsilon
    return values


def within(guarantee: Guarantee, accountant: str) -> float:
    """Epsilon of a total of which a guarantee is the first phase."""
    total = dp.Budget(20.0, guarantee.delta, accountant=accountant)
    return guarantee.within(total).epsilon


def plan_values(name: str) -> Values:
    """Losses, forecast and arrays of a plan."""
    plan = make_plan(name)
    values = loss_values(plan.guarantee)
    values["forecast"] = stated(lambda: plan.forecast(100).ratio)
    values["disagreement"] = stated(lambda: plan.forecast(100).disagreement)
    pattern = plan.config.pattern
    values["participation"] = [pattern.rounds, pattern.epochs, pattern.separation]
    values["divisor"] = float(plan.sampler.divisor)
    values["grid"] = None if plan.grid is None else plan.grid.spacing
    arrays = {key: array_value(array) for key, array in plan.arrays.items()}
    for key in ("factor", "strategy", "applied_strategy"):
        array = stated(functools.partial(getattr, plan, key))
        if isinstance(array, np.ndarray):
            arrays[f"plan.{key}"] = array_value(array)
    values["arrays"] = arrays
    return values


def batch_values(name: str) -> list[Values]:
    """Batches of three rounds: rows and padding."""
    sampler = make_plan(name).sampler
    counts = jnp.asarray(PLANS[name].get("counts", COUNTS))
    values = []
    for number in range(3):
        batch = sampler.draw(jax.random.fold_in(KEY, number), jnp.int32(number), counts)
        values.extend(tree_value([batch.rows]))
        values.extend(tree_value([] if batch.padding is None else [batch.padding]))
    return values


def noise_values(name: str) -> list[Values]:
    """Noisy payloads of three rounds: raw noise first, then beside a payload."""
    plan = make_plan(name)
    arrays = {key: jnp.asarray(array, jnp.float32) for key, array in plan.arrays.items()}
    link = optax.with_extra_args_support(plan.privatizer.transformation(arrays, KEY))
    payload = {"a": jnp.zeros((AGENTS, 4), jnp.float32), "b": jnp.zeros((AGENTS, 2), jnp.float32)}
    values = []
    state = link.init(payload)
    for number in range(3):
        # Whole numbers take the round's public key, and other noise none.
        noisy, state = link.update(payload, state, key=jax.random.fold_in(KEY, 100 + number))
        values.extend(tree_value(noisy))
        payload = jax.tree.map(lambda leaf: leaf + 0.125, payload)
    return values


def drawn_in_a_run(name: str) -> list[int]:
    """For every record, which of the first rounds of a run drew it, as binary digits.

    A record's gradient is its own axis, and the step of round t is 2^-t, or 0 from `CODED` on. So
    the sum of all models says of each record in which rounds it was drawn, whatever draws it.
    """
    plan = make_plan(name)
    counts = PLANS[name].get("counts", COUNTS)
    total = int(counts.sum())
    shards = dp.partition.by_size(total, counts.tolist(), 0)
    task = dp.Problem(
        init=lambda key: {"w": jnp.zeros(total)},
        loss=lambda params, x, y: jnp.sum(params["w"] * x),
        metrics=lambda params, evaluation: {"size": jnp.sum(params["w"])},
        x=np.eye(total, dtype=np.float32),
        y=np.zeros(total, np.float32),
        partition=shards,
        evaluation=(np.zeros(1, np.float32),),
    )
    config = dp.Config(
        protect=dp.Protect("zero_out_record", clip_norm=2.0),
        sampler=plan.config.sampler,
        optimizer=dp.optimizers.Chain(optax.sgd, lambda t: jnp.where(t < CODED, 2.0**-t, 0.0)),
        rounds=plan.config.rounds,
    )
    silent = dp.make_plan(config, COMPLETE, counts=counts)
    result = dp.run(silent, task, seeds=[3])
    models = np.asarray(result.params["w"], np.float64)[0, 0]
    codes = -models.sum(axis=0) * silent.sampler.divisor * 2.0 ** (CODED - 1)
    return np.rint(codes).astype(int).tolist()


def run_values(name: str) -> Values:
    """Metrics and models of a short run, as hexadecimal floats."""
    plan = make_plan(name)
    result = dp.run(plan, make_task(name), seeds=[0, 5], eval_every=plan.config.rounds // 4)
    return result_values(result)


def result_values(result: dp.Result) -> Values:
    """Metrics, models and the epsilon of a result."""
    metrics = {name: hexadecimal(values) for name, values in result.metrics.items()}
    models = [hexadecimal(leaf) for leaf in jax.tree.leaves(result.params)]
    epsilons = [guarantee.epsilon for guarantee in result.guarantees]
    return {"metrics": metrics, "models": models, "epsilons": epsilons}


def hexadecimal(array: ArrayLike) -> dict[str, list[str]]:
    """Numbers without rounding."""
    return {"hex": [float(number).hex() for number in np.asarray(array, np.float64).ravel()]}


def function_values() -> Values:
    """Values of functions whose names are fixed."""
    participation = Participation(20, 4, 5)
    design = spacetime.design(NETWORK, Participation(8, 4, 2))
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 200, 2))
    decaying = {
        f"printed={printed}": laplace.geometric(1.0, 2.0, 0.01, 0.8, 0.9, 10, printed=printed)
        for printed in (False, True)
    }
    observed = {
        "dsgd": views.dsgd(NETWORK).ldp(),
        "muffliato": views.muffliato(NETWORK, 3).pndp([0]),
        "zip-dl": views.zip_dl(NETWORK).pndp([0]),
    }
    keys = [derive(seed, purpose) for seed in (0, 7) for purpose in ("initial", "batches", "noise")]
    degree = graph.parameters(100, 0.1, 0.05)
    return {
        "gdp": [gdp.epsilon(1.0, 1e-5), gdp.delta(0.5, 2.0), gdp.mu(2.0, 1e-6), gdp.zcdp(0.3)],
        "bound": budget.precision_bound(
            8.0, 1e-5, rounds=20, clip_norm=0.5, relation="replace_agent"
        ),
        "pure": pure.epsilon(0.01 * 0.8 ** np.arange(10), 0.1 * 0.9 ** np.arange(10), 2.0),
        "laplace": {key: tree_value([p.step_sizes, p.scales]) for key, p in decaying.items()},
        "leakage": leakage.mutual_information(x, x + y),
        "mafalda": array_value(temporal.mafalda(NETWORK, participation)),
        "sensitivity": temporal.sensitivity(STRATEGY, participation),
        "whisper": array_value(spatial.whisper(NETWORK, 0.3)),
        "space-time": [array_value(design.strategy), array_value(design.covariance), design.value],
        "views": {
            key: array_value(view.gdp(Participation(4, 4, 1), gradients="view"))
            for key, view in observed.items()
        },
        "keys": tree_value([jax.random.key_data(key) for key in keys]),
        "graph": [int(degree.degree), int(degree.threshold)],
    }


# ------------------------------------------------------------------------------ Files as written.


def written_files() -> dict[str, str]:
    """A design, a plan, a result and a record as this code writes them, in base64."""
    contents = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        plan = make_plan("whisper")
        result = dp.run(plan, make_task("whisper"), seeds=[0], eval_every=10)
        about = {"command": "python -m tests.test_baseline", "experiment": "baseline"}
        sampled = make_plan("poisson, bands").guarantee.to_dict()
        rows = [*result.rows(), {**result.rows()[-1], "guarantee": sampled}]
        plan.design.save(base / "design.npz")
        plan.save(base / "plan.npz")
        make_plan("mafalda").save(base / "strategy.npz")
        result.save(base / "result.npz")
        records.write(base / "record.jsonl", rows, about)
        for path in sorted(base.iterdir()):
            contents[path.name] = base64.b64encode(path.read_bytes()).decode()
    return contents


def read_files(contents: dict[str, str], folder: Path) -> Values:
    """What the reader of this code makes of them."""
    for name, content in contents.items():
        (folder / name).write_bytes(base64.b64decode(content))
    values: Values = {}
    for name in ("design", "plan", "strategy"):
        design = Design.load(folder / f"{name}.npz")
        values[name] = {
            "covariance": array_value(design.covariance),
            "bound": design.precision_bound,
            "value": design.value,
            "bounded": design.lower_bound,
            "horizon": design.horizon,
        }
        with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
            entries = {key: file[key] for key in file.files}
        numbers = {key: entry for key, entry in entries.items() if entry.dtype.kind in "fiub"}
        values[name]["entries"] = {key: array_value(entry) for key, entry in numbers.items()}
        row = "mafalda" if name == "strategy" else "whisper"
        config = make_plan(row).config
        strategy = make_plan(row).strategy
        plan = dp.make_plan(config, NETWORK, design=design, strategy=strategy)
        values[name]["losses"] = loss_values(plan.guarantee)
    result = dp.Result.load(folder / "result.npz")
    values["result"] = result_values(result)
    values["result"]["losses"] = loss_values(result.guarantees[0])
    frame = records.read(folder / "record.jsonl")
    values["record"] = {
        "losses": [loss_values(Guarantee.from_dict(text)) for text in frame["guarantee"]],
        "metrics": {name: hexadecimal(frame[name]) for name in result.metrics},
    }
    return values


def archive_values(path: Path) -> Values:
    """What is read of a committed archive: its rows, and the losses of its guarantees."""
    frame = records.read(path)
    epsilons = []
    stored = [entry for entry in frame.get("guarantee", ()) if isinstance(entry, dict)]
    texts = {json.dumps(entry, sort_keys=True) for entry in stored}
    for text in sorted(texts):
        guarantee = Guarantee.from_dict(json.loads(text))
        if guarantee.relation is not None:
            epsilons.append([guarantee.epsilon, guarantee.exact_epsilon, guarantee.rounds])
    return {"rows": len(frame), "losses": array_value(np.array(epsilons))}


def preset_values(name: str, folder: Path) -> Values:
    """The numbers in the records of an experiment's smallest preset."""
    script = load_script(name)
    assert script.main(["--preset", "tiny", "--output", str(folder), "--quiet"]) == 0
    values = {}
    for path in sorted((folder / name / "tiny").glob("*.jsonl")):
        frame = records.read(path)
        numeric = frame.select_dtypes("number")
        # Times differ from run to run.
        columns = [column for column in sorted(numeric) if "second" not in column]
        values[path.stem] = {column: hexadecimal(numeric[column]) for column in columns}
    return values


# ------------------------------------------------------------------------------ The comparison.


class Mode(NamedTuple):
    """How near numbers must be, and whether floating-point arrays must have the same bits."""

    tolerance: float
    exact: bool = False


def differences(old: Value, new: Value, mode: Mode, path: str = "") -> list[str]:
    """Where two trees of values differ by more than the mode allows."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            return [f"{path}: {sorted(old.keys() ^ new.keys())} on one side only"]
        if "sha256" in old:
            return of_arrays(old, new, mode, path)
        if "hex" in old:
            return of_numbers(old["hex"], new["hex"], mode, path)
        pairs = [(f"/{name}", old[name], new[name]) for name in old]
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{path}: {len(new)} entries, {len(old)} before"]
        pairs = [(f"[{index}]", old[index], new[index]) for index in range(len(old))]
    else:
        near = near_enough(old, new, mode.tolerance)
        return [] if near else [f"{path}: {new!r}, before {old!r}"]
    lines = []
    for step, before, after in pairs:
        lines.extend(differences(before, after, mode, path + step))
    return lines


def of_arrays(old: Values, new: Values, mode: Mode, path: str) -> list[str]:
    """Differences of two arrays: of bits; or of numbers, where these may differ."""
    if old["sha256"] == new["sha256"]:
        return []
    refused = [f"{path}: {new['first']}, before {old['first']}"]
    if (old["kind"], old["shape"]) != (new["kind"], new["shape"]):
        return refused
    if mode.exact or old["kind"][1] in "biu":
        return refused
    # Entries near 0 are compared by the mean size of all.
    size = old["moments"][0] / max(1, int(np.prod(old["shape"])))
    distances = np.abs(np.array(old["first"]) - new["first"])
    allowed = mode.tolerance * np.maximum(size, np.abs(old["first"]))
    sums = differences(old["moments"], new["moments"], mode)
    return refused if (distances > allowed).any() or sums else []


def of_numbers(old: list[str], new: list[str], mode: Mode, path: str) -> list[str]:
    """Differences of two lists of hexadecimal numbers, by the largest of them."""
    if len(old) != len(new):
        return [f"{path}: {len(new)} entries, {len(old)} before"]
    before = np.array([float.fromhex(text) for text in old])
    after = np.array([float.fromhex(text) for text in new])
    scale = np.abs(before[np.isfinite(before)]).max(initial=0.0)
    if np.allclose(after, before, rtol=0, atol=mode.tolerance * scale, equal_nan=True):
        return []
    return [f"{path}: {after[:6].tolist()}, before {before[:6].tolist()}"]


def near_enough(old: Value, new: Value, tolerance: float) -> bool:
    """Whether two plain values are equal, or two numbers as near as the tolerance."""
    if type(old) is not float and type(new) is not float:
        return old == new
    if not isinstance(old, float | int) or not isinstance(new, float | int):
        return False
    if np.isnan(old) or np.isnan(new):
        return bool(np.isnan(old) and np.isnan(new))
    return old == new or abs(old - new) <= tolerance * max(abs(old), abs(new))


def machine() -> dict[str, str]:
    """What the bits of floating-point numbers depend on."""
    info = Path("/proc/cpuinfo")
    wide = info.exists() and "avx512f" in info.read_text()
    return {
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy")},
        "machine": platform.machine(),
        "vectors": "avx512" if wide else "narrow",
        "platform": jax.default_backend(),
        "flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
    }


@functools.cache
def baseline() -> Values:
    """The stored values."""
    return json.loads(BASELINE.read_text())


def compare(section: str, name: str, new: Value, mode: Mode) -> None:
    """Fail where new values differ from the stored ones, with the first differences."""
    # As JSON, so that tuples and NumPy's numbers are what the file holds.
    new = json.loads(json.dumps(new, default=float))
    lines = differences(baseline()[section][name], new, mode, name)
    assert not lines, "\n".join([f"{len(lines)} values of {section} changed:", *lines[:20]])


def stated_mode() -> Mode:
    """Of losses and arrays."""
    return Mode(CLOSE if machine() == baseline()["head"]["machine"] else ELSEWHERE)


def bit_mode() -> Mode:
    """Of raw normals."""
    alike = machine() == baseline()["head"]["machine"]
    return Mode(ELSEWHERE, exact=alike)


def marked(names: Iterable[str], slow: tuple[str, ...]) -> list[object]:
    """Names as parameters, some of them slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.gate(22)
@pytest.mark.parametrize("name", marked(PLANS, SLOW_PLANS))
def test_plan_states_and_holds_what_it_did(name):
    compare("plans", name, plan_values(name), stated_mode())


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_draws_same_bits(name):
    compare("batches", name, batch_values(name), bit_mode())


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", marked(SAMPLERS, SAMPLERS[:3]))
def test_run_draws_same_records(name):
    compare("draws", name, drawn_in_a_run(name), bit_mode())


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", PRIVATIZERS)
def test_privatizer_draws_same_bits(name):
    compare("noise", name, noise_values(name), bit_mode())


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", marked((*RUNS, *SLOW_RUNS), SLOW_RUNS))
def test_short_run_ends_as_it_did(name):
    compare("runs", name, run_values(name), Mode(RUN))


@pytest.mark.slow
def test_functions_of_fixed_names_return_what_they_did():
    new = function_values()
    for name in new:
        compare("functions", name, new[name], stated_mode())


def test_stored_files_are_read_as_they_were(tmp_path):
    new = read_files(baseline()["contents"], tmp_path)
    for name in new:
        compare("files", name, new[name], stated_mode())


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(STORED.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_committed_records_are_read_as_they_were(path):
    compare("archives", path.name, archive_values(path), stated_mode())


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_tiny_preset_records_what_it_did(name, tmp_path):
    compare("presets", name, preset_values(name, tmp_path), Mode(RUN))


@pytest.mark.parametrize(
    ("section", "name", "entry", "changed"),
    [
        ("plans", "whisper", "epsilon", lambda epsilon: epsilon * (1 + 3e-12)),
        ("plans", "poisson", "records", lambda losses: [losses[0], losses[1] + 1e-10, losses[2]]),
        ("plans", "whisper, budgets", "agents", lambda losses: losses[::-1]),
        ("plans", "poisson", "total", lambda refused: 20.0),
        ("plans", "no noise", "forecast", lambda ratio: 1e-300),
        ("batches", "poisson, bands", 0, lambda rows: rows | {"sha256": "another"}),
        ("draws", "shares", 5, lambda code: code ^ 1),
        ("noise", "integers", 1, lambda words: words | {"sha256": "another"}),
        ("runs", "whisper", "epsilons", lambda losses: [losses[0] * 1.00002]),
        ("functions", "gdp", 2, lambda mu: float("nan")),
    ],
)
def test_changed_value_is_noticed(section, name, entry, changed):
    old = baseline()[section][name]
    new = json.loads(json.dumps(old))
    mode = Mode(RUN if section == "runs" else CLOSE)
    assert not differences(old, new, mode)
    new[entry] = changed(new[entry])
    (line,) = differences(old, new, mode)[:1]
    assert str(entry) in line


@pytest.mark.parametrize(("error", "noticed"), [(3e-13, False), (3e-12, True), (0.1, True)])
def test_array_may_differ_by_its_last_digits_alone(error, noticed):
    array = np.random.default_rng(0).normal(size=(3, 4))
    near = array * (1 + error)
    assert bool(differences(array_value(array), array_value(near), Mode(CLOSE))) == noticed
    assert differences(array_value(array), array_value(near), Mode(CLOSE, exact=True))
    swapped = array_value(array[:, ::-1])
    assert differences(array_value(array), swapped, Mode(CLOSE))
    narrow = array_value(array.astype(np.float32))
    assert differences(array_value(array), narrow, Mode(1e-3))
    integers = array_value(np.arange(4))
    assert differences(integers, array_value(np.array([0, 1, 2, 4])), Mode(1e3))
    lines = differences(hexadecimal(array), hexadecimal(near), Mode(CLOSE))
    assert bool(lines) == noticed


def test_file_has_value_of_every_row():
    stored = baseline()
    assert stored["plans"].keys() == PLANS.keys()
    assert stored["runs"].keys() == {*RUNS, *SLOW_RUNS}
    assert stored["archives"].keys() == {path.name for path in STORED.glob("*.jsonl.gz")}
    assert stored["head"]["commit"] and BASELINE.stat().st_size < 2**19


# ------------------------------------------------------------------------------ Writing.


def all_values() -> Values:
    """What the file holds."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT
    )
    contents = written_files()
    values: Values = {
        "head": {
            "commit": revision.stdout.strip(),
            "python": platform.python_version(),
            "machine": machine(),
        },
        "plans": {name: plan_values(name) for name in PLANS},
        "batches": {name: batch_values(name) for name in SAMPLERS},
        "draws": {name: drawn_in_a_run(name) for name in SAMPLERS},
        "noise": {name: noise_values(name) for name in PRIVATIZERS},
        "runs": {name: run_values(name) for name in (*RUNS, *SLOW_RUNS)},
        "functions": function_values(),
        "contents": contents,
        "archives": {path.name: archive_values(path) for path in sorted(STORED.glob("*.jsonl.gz"))},
    }
    with tempfile.TemporaryDirectory() as folder:
        values["files"] = read_files(contents, Path(folder))
    values["presets"] = {}
    for name in PRESETS:
        with tempfile.TemporaryDirectory() as folder:
            values["presets"][name] = preset_values(name, Path(folder))
    return values


def as_text(values: Values) -> str:
    """JSON with one entry of a section a line, so that a changed one is a changed line."""
    sections = []
    for section, entries in values.items():
        lines = []
        for name, entry in entries.items():
            text = json.dumps(entry, default=float, separators=(",", ":"))
            lines.append(f"{json.dumps(name)}: {text}")
        sections.append(f"{json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def print_bits() -> None:
    """Say of each short run whether models and metrics still have the stored bits."""
    for name in (*RUNS, *SLOW_RUNS):
        lines = differences(baseline()["runs"][name], run_values(name), Mode(0.0), name)
        print(f"{name}: {'the same bits' if not lines else lines[0]}")


def main() -> None:
    """Write the values of this commit, or compare the bits of short runs."""
    parser = argparse.ArgumentParser(description="Values that a change of form must keep.")
    parser.add_argument("--write", metavar="FILE", help="write the values of this commit")
    parser.add_argument("--bits", action="store_true", help="compare the bits of short runs")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "experiments"))
    if options.write:
        Path(options.write).write_text(as_text(all_values()))
    if options.bits:
        print_bits()


if __name__ == "__main__":
    main()
