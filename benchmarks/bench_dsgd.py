"""Training speed: full runs against a PyTorch loop over agents, and against bare floors.

- ``a9a`` cases: logistic regression, 20 agents, batches of 128, Whisper D-SGD, by unit: "agent"
  clips the agent's mean gradient, "record" every record's.
- ``housing`` cases: California housing on a social network (148 agents, a network of 64 hidden
  units, batches of 6, 380 rounds), as in experiments/mafalda_housing.py, by design.
- ``torch`` rows: the usual script: a Python loop over agents, per-sample gradients by
  torch.func.vmap, clipping, correlated noise by a factor, gossip by a matrix product. For a9a.
- ``dpjax`` rows: complete runs of one plan and seed, or of several plans and seeds side by side,
  whose number is ``lanes``. A round of one of them counts one.

Floors are the work of a round that no program avoids, in milliseconds a run, each part a compiled
loop of its own, of the shapes of that row's runs. Plans of a seed share rows, records and normals:

- ``draw``: which records every agent takes.
- ``gather``: these records, from all data, of 64 rounds in turn.
- ``normals``: one round's standard normals [n, d].
- ``colour``: noise over rounds, a chunk of rounds at a time, as one product with rows of C^-1, half
  of whose columns count on average.
- ``gradients``: every agent's mean gradient on a batch that is there, and its step; no clipping,
  which asks for more, above all that of single records.
- ``gossip``: one product [n, n] x [n, d] of all runs.

``times_floor`` is a round over the sum of those that the case needs: runs count by their median,
floors by their least, all in turns, compilation and the measurement of losses excluded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, installed, timed, turns
from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.topology import graphs, mixing
from dpjax.transforms import variates

CHUNK = 32
DESIGNS = ("non_private", "independent", "mafalda")
CASES = ("a9a agent", "a9a record", *(f"housing {design}" for design in DESIGNS))
HIGHEST = jax.lax.Precision.HIGHEST


class Case(NamedTuple):
    """Plans of several step sizes, their problem, and the floors of a round."""

    plans: list[plan.Plan]
    task: Problem
    parts: tuple[str, ...]


def a9a(unit: str, agents: int, rounds: int, steps: int) -> Case:
    """Logistic regression."""
    data = load.load("a9a")
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(agents, 0.5, 0))
    shards = partition.dirichlet(data.y_train, agents, 10.0, 0, minimum=128)
    train = (data.x_train, data.y_train)
    test = (data.x_train[:256], data.y_train[:256])
    task = supervised(Linear(), "logistic", train, test, shards)
    configs = [
        plan.Config(
            noise=noise.Whisper(), budget=protect.Budget(10.0, 1e-5), rounds=rounds,
            protect=protect.Protect(f"replace_{unit}", clip_norm=0.1),
            sampler=samplers.Random(128), optimizer=optimizers.Sgd(0.01 * (1 + k)),
        )
        for k in range(steps)
    ]  # fmt: skip
    plans = [plan.make(config, matrix) for config in configs]
    return Case(plans, task, ("draw", "gather", "normals", "gradients", "gossip"))


def housing(design: str, graph: str) -> Case:
    """A small network, at mu about 1."""
    matrix = mixing.uniform_neighbors(graphs.parse(graph))
    data = load.load("housing")
    epochs = 20
    separation = 19
    x, _ = split.standardise(data.x_train, data.x_train)
    shards = partition.iid(16_512, len(matrix), 0)
    model = MLP(hidden=(64,), outputs=None, activation="relu")
    train = (x[:16_512], data.y_train[:16_512])
    few = (x[:8], data.y_train[:8])
    task = supervised(model, "squared", train, few, shards)
    config = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(epsilon=5.0, delta=1e-6),
        protect=protect.Protect("zero_out_record", clip_norm=1.0),
        sampler=samplers.Cyclic(epochs, separation, -(-int(shards.counts.max()) // separation)),
        optimizer=optimizers.Sgd(0.1), rounds=epochs * separation,
    )  # fmt: skip
    parts = ("draw", "gather", "gradients", "gossip")
    noisy = {"non_private": (), "independent": ("normals",), "mafalda": ("normals", "colour")}
    training_plan = plan.make(config.using(noise.named(design)), matrix)
    return Case([training_plan], task, (*parts, *noisy[design]))


def in_torch(training_plan: plan.Plan, task: Problem, rounds: int) -> float:
    """Seconds a round of the loop over agents in PyTorch."""
    import torch

    config = training_plan.config
    unit = config.protect.unit
    n = training_plan.agents
    batch = config.sampler.batch_size
    clip_norm = config.protect.clip_norm
    step_size = config.optimizer.first
    x = torch.tensor(np.asarray(task.x))
    y = torch.tensor(np.asarray(task.y))
    indices = torch.tensor(np.asarray(task.partition.indices), dtype=torch.long)
    counts = np.asarray(task.partition.counts)
    matrix = torch.tensor(training_plan.mixing, dtype=torch.float32)
    factor = torch.tensor(training_plan.factor)
    d = x.shape[1] + 1
    models = torch.zeros(n, d)

    def loss(params: Any, a: Any, b: Any) -> Any:
        return torch.nn.functional.softplus(-b * (a @ params[:-1] + params[-1]))

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    generator = torch.Generator().manual_seed(0)

    def one_round() -> None:
        nonlocal models
        noise = factor @ torch.randn(n, d, generator=generator)
        sent = torch.empty_like(models)
        for i in range(n):
            drawn = torch.randperm(int(counts[i]), generator=generator)[:batch]
            rows = indices[i, drawn]
            gradients = per_sample(models[i], x[rows], y[rows])
            if unit == "record":
                norms = gradients.norm(dim=1, keepdim=True)
                gradients = gradients * torch.clamp(clip_norm / norms, max=1)
                released = (gradients.sum(0) + noise[i]) / batch
            else:
                gradient = gradients.mean(0)
                gradient = gradient * torch.clamp(clip_norm / gradient.norm(), max=1)
                released = gradient + noise[i]
            sent[i] = models[i] - step_size * released
        models = matrix @ sent

    def many(count: int) -> None:
        for _ in range(count):
            one_round()

    many(3)
    return timed(lambda: many(rounds), 0).first / rounds


def floors(case: Case, plans: int, seeds: int) -> dict[str, Callable[[], float]]:
    """Seconds of a round of all runs, of each part on its own."""
    result = case.plans[0]
    task = case.task
    n = result.agents
    step = result.config.optimizer.first
    rounds = result.config.rounds
    single = task.init(jax.random.key(0))
    models = jax.tree.map(lambda leaf: jnp.tile(leaf, (seeds, plans, n, *[1] * leaf.ndim)), single)
    size = sum(leaf.size for leaf in jax.tree.leaves(single))
    data = jax.tree.map(jnp.asarray, (task.x, task.y))
    weights = jnp.float32(result.mixing)
    indices, counts = (jnp.asarray(part) for part in task.partition[:2])
    all_keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), seeds)

    def draw(key: Any, t: Any) -> Any:
        positions = result.sampler.draw(jax.random.fold_in(key, t), t, counts).rows
        return jnp.take_along_axis(indices, positions, axis=1, mode="promise_in_bounds")

    def normals(key: Any, t: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(key, t), 0)
        return variates.normals(key, (n, size), jnp.float32)

    def gathered(rows: Any, data: Any) -> Any:
        return jax.tree.map(lambda part: part.at[rows].get(mode="promise_in_bounds"), data)

    def stepped(model: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(task.batch_loss)(model, x, y)
        return jax.tree.map(lambda leaf, its: leaf - step * its, model, gradient)

    of_runs = jax.vmap(jax.vmap(jax.vmap(stepped), in_axes=(0, None, None)))
    some = jnp.arange(min(rounds, 64))
    rows = jax.jit(jax.vmap(jax.vmap(draw, (0, None)), (None, 0)))(all_keys, some)
    batch = gathered(rows[0], data)
    empty = jnp.zeros((seeds, n, size))
    sent = jnp.ones((n, seeds * plans * size))
    parts: dict[str, tuple[Any, ...]] = {
        "draw": (lambda _, t, keys: jax.vmap(draw, (0, None))(keys, t), rows[0], all_keys),
        "gather": (lambda _, t, rows, data: gathered(rows[t % len(rows)], data), batch, rows, data),
        "normals": (lambda _, t, keys: jax.vmap(normals, (0, None))(keys, t), empty, all_keys),
        "gradients": (lambda models, _, x, y: of_runs(models, x, y), models, *batch),
        "gossip": (lambda sent, _, w: jnp.matmul(w, sent, precision=HIGHEST), sent, weights),
    }
    if "colour" in case.parts:
        strategy = np.random.default_rng(0).normal(size=(4, CHUNK, -(-rounds // 2)))
        drawn = jnp.ones((seeds, strategy.shape[-1], n * size))
        parts["colour"] = (
            lambda _, t, c, drawn: jnp.matmul(c[t % len(c)], drawn, precision=HIGHEST),
            jnp.zeros((seeds, CHUNK, n * size)), jnp.asarray(strategy, jnp.float32), drawn,
        )  # fmt: skip

    def clocked(name: str) -> Callable[[], float]:
        each, start, *data = parts[name]
        chunk = CHUNK if name == "colour" else 1
        times = -(-rounds // chunk)
        loop = jax.jit(
            lambda start, *data: jax.lax.fori_loop(
                0, times, lambda t, carry: each(carry, t, *data), start
            )
        )

        def seconds() -> float:
            return timed(lambda: loop(start, *data), 0).first / (times * chunk)

        return seconds

    return {name: clocked(name) for name in case.parts}


def measured(case: Case, plans: int, seeds: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a round of one run: of complete runs side by side, and of each floor."""
    rounds = case.plans[0].config.rounds

    def complete() -> float:
        runs = run(case.plans[:plans], case.task, seeds=range(seeds), eval_every=rounds)
        return runs.seconds / rounds

    taken = turns({"": complete, **floors(case, plans, seeds)}, repeats, clock=float)
    return {
        name: 1e3 * (timing.least if name else timing.median) / (plans * seeds)
        for name, timing in taken.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    bench.parser.add_argument("--agents", type=int, default=20, help="of a9a")
    bench.parser.add_argument("--rounds", type=int, default=1000, help="of a9a")
    bench.parser.add_argument("--graph", default="facebook_ego", help="of housing")
    bench.parser.add_argument("--torch-rounds", type=int, default=50, help="0 leaves PyTorch out")
    bench.parser.add_argument("--seeds", type=int, default=4, help="side by side")
    bench.parser.add_argument("--steps", type=int, default=5, help="of a9a, side by side")
    options = bench.parse(argv)
    has_torch = options.torch_rounds > 0 and installed("torch")
    for name in options.cases:
        data, kind = name.split()
        if data == "a9a":
            case = a9a(kind, options.agents, options.rounds, options.steps)
        else:
            case = housing(kind, options.graph)
        result = case.plans[0]
        about = {
            "case": name,
            "agents": result.agents,
            "batch_size": result.config.sampler.batch_size,
        }
        slow = None
        if data == "a9a" and has_torch:
            slow = in_torch(result, case.task, options.torch_rounds)
            bench.row(algorithm="torch", **about, lanes=1, rounds_per_second=1 / slow)
        for plans, seeds in ((1, 1), (len(case.plans), options.seeds)):
            parts = measured(case, plans, seeds, options.repeats)
            took = parts.pop("")
            minimum = sum(parts.values())
            row = about | {"lanes": plans * seeds, "rounds_per_second": 1e3 / took}
            row |= {"milliseconds": took, "floor_milliseconds": minimum}
            row |= {f"{part}_milliseconds": value for part, value in parts.items()}
            row |= {"times_torch": 1e3 * slow / took} if slow else {}
            bench.row(algorithm="dpjax", **row, times_floor=took / minimum)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
