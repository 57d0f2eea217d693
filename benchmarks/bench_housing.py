"""Speed of private training with noise correlated over rounds, against its measured floors.

California housing on a social network (148 agents, a network of 64 hidden units, batches of 6, 380
rounds), as in experiments/mafalda_housing.py. Floors, each a jitted scan on its own:

- ``normals``: drawing one round's standard normals [n, d].
- ``colour``: the noise of a chunk of rounds as one product with the rows of C^-1, per round.
- ``gossip``: one product [n, n] x [n, d].
- ``gradients``: every agent's mean gradient on a fixed batch, no clipping, nothing gathered.

A run is complete: batches, clipping, noise, gossip. One seed's round of one design counts one;
medians of repeated runs, compilation and the measurement of losses excluded.
"""

from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from _timing import Bench, timed
from dpjax.data import load, partition, split
from dpjax.engine.run import run
from dpjax.models.mlp import MLP
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.topology import graphs, mixing
from dpjax.transforms import variates as draw

EPOCHS, SEPARATION = 20, 19
ROUNDS = EPOCHS * SEPARATION
CHUNK = 32
DESIGNS = ("non_private", "independent", "mafalda")


def task(graph: str) -> tuple[problem.Problem, np.ndarray]:
    """The problem with a small evaluation set, and its mixing matrix."""
    make = {"facebook_ego": graphs.facebook_ego, "florentine": graphs.florentine}
    matrix = mixing.uniform_neighbors(make[graph]())
    data = load.load("housing")
    x, _ = split.standardise(data.x_train, data.x_train)
    few = x[:8], data.y_train[:8]
    model = MLP(hidden=(64,), outputs=None, activation="relu")
    shards = partition.iid(16_512, len(matrix), 0)
    train = x[:16_512], data.y_train[:16_512]
    return problem.supervised(model, "squared", train, few, shards), matrix


def make_plan(design: str, matrix: np.ndarray, counts: np.ndarray) -> plan.Plan:
    """The plan of a design at mu about 1."""
    config = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(epsilon=5.0, delta=1e-6),
        protect=protect.Protect("zero_out_record", clip_norm=1.0),
        sampler=samplers.Cyclic(EPOCHS, SEPARATION, -(-int(counts.max()) // SEPARATION)),
        optimizer=optimizers.Sgd(0.1), rounds=ROUNDS,
    )  # fmt: skip
    return plan.make(config.using(noise.named(design)), matrix)


def floors(made: problem.Problem, matrix: np.ndarray, batch: int, repeats: int) -> dict[str, float]:
    """Seconds a round of each part on its own."""
    n = len(matrix)
    params = jax.vmap(lambda key: made.init(key))(jax.random.split(jax.random.key(0), n))
    flat, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(lambda leaf: leaf[0], params))
    d = flat.size
    models = jnp.zeros((n, d))
    weights = jnp.asarray(matrix, jnp.float32)
    rows = np.asarray(made.partition.indices)[:, :batch]
    x, y = jnp.asarray(np.asarray(made.x)[rows]), jnp.asarray(np.asarray(made.y)[rows])
    key = jax.random.key(0, impl="threefry2x32")
    strategy = jnp.asarray(np.random.default_rng(0).normal(size=(CHUNK, ROUNDS)), jnp.float32)
    highest = jax.lax.Precision.HIGHEST

    def loss(vector: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jax.vmap(made.loss, in_axes=(None, 0, 0))(unravel(vector), x, y))

    @jax.jit
    def normals(total: Any) -> Any:
        def body(total: Any, t: Any) -> Any:
            return total + draw.normals(jax.random.fold_in(key, t), (n, d), jnp.float32), None

        return jax.lax.scan(body, total, jnp.arange(ROUNDS))[0]

    @jax.jit
    def colour(drawn: Any) -> Any:
        return jnp.matmul(strategy, drawn, precision=highest)

    @jax.jit
    def gossip(models: Any) -> Any:
        def body(models: Any, _: None) -> Any:
            return jnp.matmul(weights, models, precision=highest), None

        return jax.lax.scan(body, models, None, length=ROUNDS)[0]

    @jax.jit
    def gradients(models: Any) -> Any:
        def body(models: Any, _: None) -> Any:
            return models - 0.1 * jax.vmap(jax.grad(loss))(models, x, y), None

        return jax.lax.scan(body, models, None, length=ROUNDS)[0]

    drawn = jnp.ones((ROUNDS, n * d))
    calls = {
        "normals": (lambda: normals(models), ROUNDS),
        "colour": (lambda: colour(drawn), CHUNK),
        "gossip": (lambda: gossip(models), ROUNDS),
        "gradients": (lambda: gradients(models), ROUNDS),
    }
    return {name: timed(call, repeats).median / count for name, (call, count) in calls.items()}


def training(plans: list[plan.Plan], made: problem.Problem, seeds: int, repeats: int) -> float:
    """Seconds a round of complete runs."""
    timing = timed(
        lambda: run(plans, made, seeds=range(seeds), eval_every=ROUNDS),
        repeats,
        clock=lambda result: result.seconds,
    )
    return timing.median / (ROUNDS * seeds * len(plans))


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument(
        "--graph", default="facebook_ego", choices=("facebook_ego", "florentine")
    )
    bench.parser.add_argument("--seeds", type=int, nargs="+", default=[1, 4])
    options = bench.parse(argv)
    made, matrix = task(options.graph)
    parts: dict[str, tuple[str, ...]] = {
        "non_private": ("gossip", "gradients"),
        "independent": ("normals", "gossip", "gradients"),
        "mafalda": ("normals", "colour", "gossip", "gradients"),
    }
    for design in DESIGNS:
        one = make_plan(design, matrix, made.partition.counts)
        for lanes in options.seeds:
            floor = floors(made, matrix, one.config.sampler.batch_size, options.repeats)
            below = sum(floor[part] for part in parts[design])
            took = training([one], made, lanes, options.repeats)
            row = {"algorithm": design, "graph": options.graph, "agents": len(matrix)}
            row |= {"seeds": lanes, "steps_per_second": 1 / took, "milliseconds": 1e3 * took}
            row |= {"floor_milliseconds": 1e3 * below, "times_floor": took / below}
            row |= {f"{part}_milliseconds": 1e3 * value for part, value in floor.items()}
            bench.row(**row)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
