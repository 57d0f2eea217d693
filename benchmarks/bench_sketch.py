"""The learned sketch: what it finds when it sees only itself, and what a round costs.

- ``loop``: no times. Gradients of a fixed space come as S (S' g + z) alone, as they do in federated
  rounds, so that the sketch learns from its own frame. ``angle``: the largest between that space
  and as many leading directions of the basis, after all rounds, in radians, the mean over seeds
  with the least and the largest. ``missed``: the share of the gradients' energy that the frame
  misses, over the last quarter of the rounds. ``kept``: directions kept, over the same rounds;
  ``columns``: numbers sent. ``error``: squared error of decoded gradients, noise and what is missed
  together, over the gradients' energy. One parameter is changed at a time; noise, forgetting and
  the floor under what is kept together ("late": narrow in the second half of the rounds alone). The
  unit of noise is a gradient's deviation in each direction.
- ``moving``: no times. The frames of such a loop in its last rounds, under noise correlated over
  rounds: mean squared error of running sums of decoded noise over that of white noise in the same
  frames, at the same guarantee for a unit of one round (`_moving`), by strategy and
  way of drawing.
- ``training``: no times. Models trained at a server through DOME's sketch, with its running mean
  taken off before (``centre`` .9) and without: ``held``, the share of the mean clipped gradient of
  a sample of records in the frame, the mean over rounds, and the test accuracy in the end, one row
  a seed. Forgetting and probes are changed one at a time, forgetting also in three times as many
  rounds of the same guarantee. Nobody who trains in earnest can see ``held``.
- ``peers``: seconds a gradient. ``update`` is dpjax's, probes included; ``svd`` decomposes all
  gradients that still weigh more than 1e-4, anew in every round; ``incremental_pca`` is
  scikit-learn's `partial_fit`, given one gradient a call, and ``incremental_pca by k`` given k a
  call, which a sketch that every round needs cannot wait for; both without forgetting, and they
  take the mean off. ``times_update``: how many times as long as ``update`` a way takes, the median
  over turns; ``angle``: between its space and the stream's.

Compilation is excluded; times are medians of repeated calls.
"""

import functools
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _moving as moving
from _timing import Bench, turns
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.algorithms.sketches import Learned
from dpjax.contrib import sketching
from dpjax.contrib.rules import UpdateRule
from dpjax.contrib.trace import Passed, trace
from dpjax.data import load, partition, split
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import plan, protect
from dpjax.plans.noise import SumShares
from dpjax.topology import graphs, mixing
from dpjax.transforms import clipping, sketch

RANK = 3
BASE = {
    "rank": 3,
    "k": 16,
    "probes": 4,
    "forgetting": 0.9,
    "share": 0.99,
    "noise": 0.0,
    "floor": "none",
}
SWEEPS: dict[str, list[Any]] = {
    "k": [8, 32],
    "forgetting": [0.5, 0.8, 0.95, 0.99, 1.0],
    "share": [0.9, 0.999, 1.0],
}
FORGETTINGS = (0.9, 0.97)
NOISES = (0.03, 0.1, 0.3)
FLOORS = ("none", "drop", "narrow")
GROUPS = ("base", *SWEEPS, "worse", "probes", "noise", "memory", "floor")

EXACT = jax.lax.Precision.HIGHEST


def cases(groups: Sequence[str], rank: int) -> Iterator[dict[str, Any]]:
    """The base, one thing changed at a time, then noise: those of the groups asked for."""
    base = BASE | {"rank": rank}
    changes: dict[str, list[dict[str, Any]]] = {"base": [{}]}
    changes |= {name: [{name: value} for value in values] for name, values in SWEEPS.items()}
    changes["worse"] = [
        {"forgetting": 1.0, "share": 1.0},
        {"share": 1.0, "probes": 0},
        {"as_published": True},
    ]
    changes["probes"] = [{"noise": 0.1, "probes": probes} for probes in (0, 1, 2, 8, 12)]
    changes["noise"] = [
        {"noise": noise, "forgetting": forgetting, "floor": floor}
        for noise in NOISES
        for forgetting in FORGETTINGS
        for floor in FLOORS
    ]
    changes["memory"] = [{"noise": 0.1, "forgetting": f} for f in (0.8, 0.9, 0.95, 0.98, 0.99)]
    changes["floor"] = [
        {"noise": noise, "forgetting": forgetting, "floor": floor}
        for noise in (0.003, 0.01, 0.03, 0.1)
        for forgetting in (0.9, 0.95)
        for floor in (*FLOORS, "late")
    ]
    for group in groups:
        for change in changes[group]:
            yield base | change


def loop(
    dimension: int, rounds: int, seeds: int, case: dict[str, Any], dtype: Any
) -> tuple[np.ndarray, ...]:
    """Angle, missed share, directions kept, columns in use and error, each by seed."""
    k = case["k"]
    rank = case["rank"]
    noise = case["noise"]
    level = None
    if case["floor"] != "none":
        level = sketching.noise_floor(noise**2, k, case["forgetting"])
    if case.get("as_published"):
        rules = [functools.partial(sketch.update, share=case["share"], as_published=True)]
    else:
        options = {name: case[name] for name in ("probes", "forgetting", "share")}
        narrow = {"narrow": (True,), "late": (False, True)}.get(case["floor"], (False,))
        rules = [
            functools.partial(sketch.update, floor=level, narrow=item, **options) for item in narrow
        ]

    def one(key: Any) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        truth = sketch.orthonormal(jax.random.normal(keys[0], (dimension, rank), dtype))

        def step(rule: Any, state: sketch.Sketch, round: Any) -> tuple[sketch.Sketch, Any]:
            draws, probes, mask = jax.random.split(jax.random.fold_in(keys[2], round), 3)
            gradient = truth @ jax.random.normal(draws, (rank,), dtype)
            z = noise * jax.random.normal(mask, (k,), dtype)
            inside = state.frame.T @ truth
            missed = 1 - jnp.sum(jnp.square(inside)) / rank
            decoded = state.frame @ (state.frame.T @ gradient + z)
            error = jnp.sum(jnp.square(decoded - gradient)) / rank
            columns = jnp.sum(jnp.any(state.frame, axis=0)).astype(dtype)
            new = rule(state, decoded, probes)
            return new, (missed, new.kept.astype(dtype), columns, error)

        last = sketch.start(dimension, k, keys[1], dtype)
        parts = []
        for rule, part in zip(rules, np.array_split(np.arange(rounds), len(rules)), strict=True):
            numbers = jnp.asarray(part, jnp.int32)
            last, result = jax.lax.scan(functools.partial(step, rule), last, numbers)
            parts.append(result)
        late = rounds - max(rounds // 4, 1)
        means = (jnp.mean(jnp.concatenate(value)[late:]) for value in zip(*parts, strict=True))
        basis = last.basis[:, :rank]
        outside = truth - jnp.matmul(
            basis, jnp.matmul(basis.T, truth, precision=EXACT), precision=EXACT
        )
        # By sines, so that small angles keep their digits.
        sine = jnp.linalg.svd(outside, compute_uv=False)[0]
        return jnp.arcsin(jnp.minimum(sine, 1)), *means

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds, dtype=jnp.uint32))
    return tuple(map(np.asarray, jax.jit(jax.vmap(one))(keys)))


def loops(bench: Bench, options: Namespace) -> None:
    """A row for each case and dimension."""
    for dimension in options.loop_dimensions:
        for case in cases(options.groups, options.rank):
            with jax.enable_x64(True):
                result = loop(dimension, options.rounds, options.seeds, case, jnp.float64)
            jax.clear_caches()
            angle, missed, selection, columns, error = result
            row = {"algorithm": "printed" if case.get("as_published") else "sketch"}
            row |= {"dimension": dimension, "rounds": options.rounds, "seeds": options.seeds}
            row |= {name: case[name] for name in BASE}
            row |= {"angle": float(angle.mean()), "angle_least": float(angle.min())}
            row |= {"angle_most": float(angle.max()), "missed": float(missed.mean())}
            row |= {"columns": float(columns.mean()), "error": float(error.mean())}
            bench.row(section="loop", **row, kept=float(selection.mean()))


def motions(dimension: int, rounds: int, last: int, case: dict[str, Any]) -> np.ndarray:
    """Frames [last, d, k] of the last rounds of a loop, one seed."""
    k = case["k"]
    rank = case["rank"]
    noise = case["noise"]
    options = {name: case[name] for name in ("probes", "forgetting", "share")}

    def step(state: sketch.Sketch, round: Any) -> tuple[sketch.Sketch, None]:
        draws, probes, mask = jax.random.split(jax.random.fold_in(jax.random.key(2), round), 3)
        numbers = truth @ jax.random.normal(draws, (rank,), truth.dtype)
        z = noise * jax.random.normal(mask, (k,), truth.dtype)
        decoded = state.frame @ (state.frame.T @ numbers + z)
        return sketch.update(state, decoded, probes, **options), None

    truth = sketch.orthonormal(jax.random.normal(jax.random.key(0), (dimension, rank)))
    state = sketch.start(dimension, k, jax.random.key(1), truth.dtype)
    state = jax.lax.scan(step, state, jnp.arange(rounds - last, dtype=jnp.int32))[0]
    frames = []
    function = jax.jit(step)
    for round in range(rounds - last, rounds):
        frames.append(np.asarray(state.frame, np.float64))
        state, _ = function(state, jnp.int32(round))
    return np.stack(frames)


def moved(bench: Bench, options: Namespace) -> None:
    """A row for each case, strategy and way of drawing."""
    last = 64
    root = np.cumprod([1.0, *((2 * i - 1) / (2 * i) for i in range(1, last))])
    strategies = {
        "prefix sums": np.stack([np.eye(last, k=-i) * c for i, c in enumerate(root)]).sum(0),
        "bands (1, .5)": np.eye(last) + 0.5 * np.eye(last, k=-1),
    }
    for dimension in options.loop_dimensions:
        for k, probes in ((16, 4), (4, 1), (4, 0)):
            case = BASE | {"k": k, "probes": probes, "share": 0.999, "noise": 0.03}
            case |= {"forgetting": 0.95}
            frames = motions(dimension, options.rounds, last, case)
            white = np.trace(moving.running(np.eye(last), frames), axis1=1, axis2=2).mean()
            for name, strategy in strategies.items():
                scale = np.square(strategy).sum(axis=0).max()
                for draws in moving.DRAWS:
                    if draws == "frame":
                        continue
                    result = moving.running(strategy, frames, draws)
                    error = scale * np.trace(result, axis1=1, axis2=2).mean() / white
                    row = {"dimension": dimension, "k": k, "probes": probes, "strategy": name}
                    bench.row(section="moving", **row, algorithm=draws, error=float(error))


RULES: dict[str, list[dict[str, Any]]] = {
    "base": [{}],
    "forgetting": [{"forgetting": f} for f in (0.9, 0.98, 1.0)],
    "probes": [{"probes": p} for p in (1, 2, "half", "all")],
    "rounds": [{"times": 3, "forgetting": f} for f in (0.95, 0.98, 1.0)],
}
"""What is changed in `trainings`, of forgetting .95, four probes and the data set's own epochs."""

TASKS: dict[str, tuple[int, float, int, tuple[int, ...]]] = {
    "a9a": (6_400, 1.0, 3, (16, 48)),
    "digits": (0, 4.0, 6, (16, 64)),
}
"""Records (0: all), epsilon, epochs and columns of each data set."""


@functools.cache
def task(dataset: str) -> Problem:
    """A linear model of a9a, a small network of digits, at four places of sixteen clients."""
    (x, y), test = split.with_test(load.load(dataset), 0.2, seed=1)
    count = len(y[: TASKS[dataset][0] or None]) // 64 * 64
    shards = partition.iid(count, 4, 0)
    train = x[:count], y[:count]
    if dataset == "a9a":
        return supervised(Linear(), "logistic", train, test, shards, name=dataset)
    model = MLP((32,), 10)
    return supervised(model, "cross_entropy", train, test, shards, name=dataset)


def trained(
    dataset: str, centre: float, rule: Learned, times: int, seeds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Share of the gradient in the frame, the mean over rounds, and test accuracy, by seed."""
    complete, (_, epsilon, epochs, _) = task(dataset), TASKS[dataset]
    separation = len(complete.y) // 64
    sample = slice(0, 128)
    total = clipping.per_example(complete.loss, 1.0, method="automatic")
    x = jnp.asarray(complete.x[sample])
    y = jnp.asarray(complete.y[sample])
    training_plan = plan.make(
        plan.Config(
            method=Federated(Trusted(), sketch=rule, centre=centre),
            noise=SumShares(),
            budget=protect.Budget(epsilon, 1e-5),
            protect=protect.Protect(
                "zero_out_record", clip_norm=1.0, clipping="automatic", attacker="aggregator"
            ),
            sampler=samplers.Cyclic(times * epochs, separation, 16),
            optimizer=UpdateRule("adam", floor=1e-3).chain(0.08),
            rounds=times * epochs * separation,
        ),
        mixing.metropolis_hastings(graphs.complete(4)),
    )

    def read(passed: Passed) -> Any:
        gradient = sketch.flat(
            total(jax.tree.map(lambda leaf: leaf[0], passed.before.models), x, y)
        )
        frame = passed.before.memory.sketch.sketch.frame
        inside = jnp.matmul(frame.T, gradient[0], precision="highest")
        after = jax.tree.map(lambda leaf: leaf[0], passed.after.models)
        return jnp.sum(inside**2) / jnp.sum(gradient[0] ** 2), sketch.flat(after)[0]

    held, models = trace(training_plan, complete, seeds=range(seeds), read=read)
    back = sketch.flat(complete.init(jax.random.key(0)))[1]
    last = [jax.tree.map(lambda leaf: leaf[None], back(jnp.asarray(m[-1]))) for m in models]
    scores = [complete.metrics(model, complete.evaluation)["test_accuracy"] for model in last]
    return held.mean(axis=1), np.array(scores, np.float64)


def trainings(bench: Bench, options: Namespace) -> None:
    """A row for each data set, centre, number of columns, rule and seed."""
    for dataset in options.datasets:
        for centre in options.centres:
            for k in TASKS[dataset][3]:
                for change in (item for name in options.rules for item in RULES[name]):
                    case = {"forgetting": 0.95, "probes": 4, "times": 1} | change
                    case["probes"] = {"half": k // 2, "all": k}.get(case["probes"], case["probes"])
                    rule = Learned(k, case["forgetting"], case["probes"])
                    result = trained(dataset, centre, rule, case["times"], options.seeds)
                    jax.clear_caches()
                    row = {"algorithm": "sketch", "dataset": dataset, "centre": centre, "k": k}
                    row |= case
                    for seed, (held, score) in enumerate(zip(*result, strict=True)):
                        pair = {"held": float(held), "test_accuracy": float(score)}
                        bench.row(section="training", **row, seed=seed, **pair)


def peer_calls(dimension: int, k: int, rounds: int) -> tuple[dict[str, Callable[[], Any]], Any]:
    """A call a way that takes one gradient in (``by k``: k of them), and the stream's space."""
    from sklearn.decomposition import IncrementalPCA

    rng = np.random.default_rng(0)
    truth = np.linalg.qr(rng.normal(size=(dimension, RANK)))[0]
    gradients = (rng.normal(size=(rounds, RANK)) @ truth.T).astype(np.float32)
    gradients += (1e-3 / np.sqrt(dimension) * rng.normal(size=gradients.shape)).astype(np.float32)
    step = jax.jit(functools.partial(sketch.update, forgetting=BASE["forgetting"]))
    state = sketch.start(dimension, k, jax.random.key(0))
    for round, gradient in enumerate(gradients):
        state = step(state, gradient, jax.random.fold_in(jax.random.key(1), round))
    last = jnp.asarray(gradients[-1])
    weighed = 0.9 ** (np.arange(rounds)[::-1, None] / 2) * gradients
    window = weighed[-int(np.log(1e-4) / np.log(0.9)) :].astype(np.float32)
    peers = {name: IncrementalPCA(n_components=k) for name in ("one", "many")}
    for peer in peers.values():
        for batch in gradients.reshape(-1, k, dimension):
            peer.partial_fit(batch)
    return {
        "update": lambda: step(state, last, jax.random.key(2)).basis[:, :RANK],
        "svd": lambda: np.linalg.svd(window, full_matrices=False)[2][:RANK].T,
        "incremental_pca": lambda: peers["one"].partial_fit(gradients[-1:]).components_[:RANK].T,
        "incremental_pca by k": lambda: (
            peers["many"].partial_fit(gradients[-k:]).components_[:RANK].T
        ),
    }, truth


def peers(bench: Bench, options: Namespace) -> None:
    """A row for each way, dimension and number of columns."""
    for dimension in options.dimensions:
        for k in options.columns:
            calls, truth = peer_calls(dimension, k, 8 * k)
            result = turns(calls, options.repeats)
            for name, item in result.items():
                gradients = k if name.endswith("by k") else 1
                row = {"algorithm": name, "dimension": dimension, "k": k}
                row |= {"seconds": item.median / gradients}
                pair = zip(item.times, result["update"].times, strict=True)
                ratios = [other / gradients / mine for other, mine in pair]
                row["times_update"] = statistics.median(ratios or [item.first])
                basis = np.linalg.qr(np.asarray(item.result, np.float64))[0]
                missed = truth - basis @ (basis.T @ truth)
                row["angle"] = float(np.arcsin(min(1.0, np.linalg.norm(missed, 2))))
                bench.row(section="peers", **row)


SECTIONS = {"loop": loops, "moving": moved, "training": trainings, "peers": peers}
"""What ``--what`` chooses from: functions of the bench and its options."""


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=9)
    bench.parser.add_argument("--what", nargs="+", choices=SECTIONS, default=["peers"])
    group = bench.parser.add_argument_group("loop")
    group.add_argument("--loop-dimensions", type=int, nargs="+", default=[200, 1000])
    group.add_argument("--rounds", type=int, default=4000)
    group.add_argument("--seeds", type=int, default=3)
    group.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="of cases")
    group.add_argument("--rank", type=int, default=3, help="of the gradients' space")
    group = bench.parser.add_argument_group("training")
    group.add_argument("--datasets", nargs="+", choices=TASKS, default=list(TASKS))
    group.add_argument("--centres", nargs="+", type=float, default=[0.9, 0.0])
    group.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="of cases")
    group = bench.parser.add_argument_group("peers")
    group.add_argument("--dimensions", type=int, nargs="+", default=[1000, 10_000, 100_000])
    group.add_argument("--columns", type=int, nargs="+", default=[16])
    options = bench.parse(argv)
    for name in options.what:
        SECTIONS[name](bench, options)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
