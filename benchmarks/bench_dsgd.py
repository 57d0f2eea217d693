"""Training speed: full runs against a PyTorch loop over agents, and against bare floors.

- ``a9a`` cases: logistic regression, 20 agents, batches of 128, Whisper D-SGD, by unit: "agent"
  clips the agent's mean gradient, "record" every record's.
- ``housing`` cases: California housing on a social network (148 agents, a network of 64 hidden
  units, batches of 6, 380 rounds), as in experiments/mafalda_housing.py, by design.
- ``torch`` rows: the usual script: a Python loop over agents, per-sample gradients by
  torch.func.vmap, clipping, correlated noise by a factor, gossip by a matrix product. For a9a.
- ``dpjax`` rows: complete runs of one plan and seed, or of several plans and seeds side by side,
  whose number is ``lanes``. A round of one of them counts one.

Floors are milliseconds a round of one run, each a jitted scan on its own:

- ``normals``: drawing one round's standard normals [n, d].
- ``colour``: the noise of a chunk of rounds as one product with the rows of C^-1, per round.
- ``gossip``: one product [n, n] x [n, d].
- ``gradients``: every agent's mean gradient on a fixed batch, no clipping, nothing gathered.

``times_floor`` is a round over the sum of those that the case needs. Medians of repeated runs,
compilation and the measurement of losses excluded.
"""

from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from _timing import Bench, installed, timed
from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.topology import graphs, mixing
from dpjax.transforms import variates

CHUNK = 32
DESIGNS = ("non_private", "independent", "mafalda")
CASES = ("a9a agent", "a9a record", *(f"housing {design}" for design in DESIGNS))
HIGHEST = jax.lax.Precision.HIGHEST


class Case(NamedTuple):
    """Plans of several step sizes, their problem, and the floors of a round."""

    plans: list[plan.Plan]
    task: problem.Problem
    parts: tuple[str, ...]


def a9a(unit: str, agents: int, rounds: int, steps: int) -> Case:
    """Logistic regression."""
    data = load.load("a9a")
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(agents, 0.5, 0))
    shards = partition.dirichlet(data.y_train, agents, 10.0, 0, minimum=128)
    train, test = (data.x_train, data.y_train), (data.x_train[:256], data.y_train[:256])
    task = problem.supervised(Linear(), "logistic", train, test, shards)
    configs = [
        plan.Config(
            noise=noise.Whisper(), budget=protect.Budget(10.0, 1e-5), rounds=rounds,
            protect=protect.Protect(f"replace_{unit}", clip_norm=0.1),
            sampler=samplers.Random(128), optimizer=optimizers.Sgd(0.01 * (1 + k)),
        )
        for k in range(steps)
    ]  # fmt: skip
    plans = [plan.make(config, matrix) for config in configs]
    return Case(plans, task, ("normals", "gossip", "gradients"))


def housing(design: str, graph: str) -> Case:
    """A small network, at mu about 1."""
    matrix = mixing.uniform_neighbors(graphs.parse(graph))
    data, epochs, separation = load.load("housing"), 20, 19
    x, _ = split.standardise(data.x_train, data.x_train)
    shards = partition.iid(16_512, len(matrix), 0)
    model = MLP(hidden=(64,), outputs=None, activation="relu")
    train, few = (x[:16_512], data.y_train[:16_512]), (x[:8], data.y_train[:8])
    task = problem.supervised(model, "squared", train, few, shards)
    config = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(epsilon=5.0, delta=1e-6),
        protect=protect.Protect("zero_out_record", clip_norm=1.0),
        sampler=samplers.Cyclic(epochs, separation, -(-int(shards.counts.max()) // separation)),
        optimizer=optimizers.Sgd(0.1), rounds=epochs * separation,
    )  # fmt: skip
    parts = ("normals", "colour", "gossip", "gradients")
    kept = {"non_private": parts[2:], "independent": (parts[0], *parts[2:]), "mafalda": parts}
    return Case([plan.make(config.using(noise.named(design)), matrix)], task, kept[design])


def in_torch(made: plan.Plan, task: problem.Problem, rounds: int) -> float:
    """Seconds a round of the loop over agents in PyTorch."""
    import torch

    config = made.config
    unit = config.protect.unit
    n, batch = made.agents, config.sampler.batch_size
    clip_norm, step_size = config.protect.clip_norm, config.optimizer.first
    x, y = torch.tensor(np.asarray(task.x)), torch.tensor(np.asarray(task.y))
    indices = torch.tensor(np.asarray(task.partition.indices), dtype=torch.long)
    counts = np.asarray(task.partition.counts)
    matrix = torch.tensor(made.mixing, dtype=torch.float32)
    factor = torch.tensor(made.factor)
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


def floors(case: Case, rounds: int, repeats: int) -> dict[str, float]:
    """Seconds a round of each part on its own."""
    made, task = case.plans[0], case.task
    n, step = made.agents, made.config.optimizer.first
    one = task.init(jax.random.key(0))
    flat, unravel = jax.flatten_util.ravel_pytree(one)
    models = jnp.tile(flat, (n, 1))
    weights = jnp.asarray(made.mixing, jnp.float32)
    rows = np.asarray(task.partition.indices)[:, : made.config.sampler.batch_size]
    x, y = jnp.asarray(np.asarray(task.x)[rows]), jnp.asarray(np.asarray(task.y)[rows])
    key = jax.random.key(0, impl="threefry2x32")

    def loss(vector: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jax.vmap(task.loss, in_axes=(None, 0, 0))(unravel(vector), x, y))

    steps = {
        "normals": lambda models, t: (
            models + variates.normals(jax.random.fold_in(key, t), models.shape, jnp.float32)
        ),
        "gossip": lambda models, t: jnp.matmul(weights, models, precision=HIGHEST),
        "gradients": lambda models, t: models - step * jax.vmap(jax.grad(loss))(models, x, y),
    }

    def scanned(each: Any) -> Any:
        return jax.jit(
            lambda models: jax.lax.scan(
                lambda models, t: (each(models, t), None), models, jnp.arange(rounds)
            )[0]
        )

    found = {}
    for name in steps.keys() & set(case.parts):
        scan = scanned(steps[name])
        found[name] = timed(lambda scan=scan: scan(models), repeats).median / rounds
    if "colour" in case.parts:
        count = made.config.rounds
        strategy = jnp.asarray(np.random.default_rng(0).normal(size=(CHUNK, count)), jnp.float32)
        drawn = jnp.ones((count, models.size))
        product = jax.jit(lambda drawn: jnp.matmul(strategy, drawn, precision=HIGHEST))
        found["colour"] = timed(lambda: product(drawn), repeats).median / CHUNK
    return found


def training(case: Case, plans: int, seeds: int, repeats: int) -> float:
    """Seconds a round of complete runs side by side."""
    rounds = case.plans[0].config.rounds
    timing = timed(
        lambda: run(case.plans[:plans], case.task, seeds=range(seeds), eval_every=rounds),
        repeats,
        clock=lambda result: result.seconds,
    )
    return timing.median / (plans * seeds * rounds)


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
        made = case.plans[0]
        about = {"case": name, "agents": made.agents, "batch_size": made.config.sampler.batch_size}
        parts = floors(case, made.config.rounds // 2, options.repeats)
        least, slow = sum(parts.values()), None
        if data == "a9a" and has_torch:
            slow = in_torch(made, case.task, options.torch_rounds)
            bench.row(algorithm="torch", **about, lanes=1, rounds_per_second=1 / slow)
        for plans, seeds in ((1, 1), (len(case.plans), options.seeds)):
            took = training(case, plans, seeds, options.repeats)
            row = about | {"lanes": plans * seeds, "rounds_per_second": 1 / took}
            row |= {"milliseconds": 1e3 * took, "floor_milliseconds": 1e3 * least}
            row |= {f"{part}_milliseconds": 1e3 * value for part, value in parts.items()}
            row |= {"times_torch": slow / took} if slow else {}
            bench.row(algorithm="dpjax", **row, times_floor=took / least)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
