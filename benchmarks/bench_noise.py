"""Speed of correlated noise alone, by route, against its floors measured in the same process.

Noise for n agents of d entries is added to zeros inside one jitted scan over all T rounds. Routes
(`dpjax.transforms.rounds`): ``none``, fresh noise; ``recursion``, a C of a few bands; ``moving``,
its inverse; ``blocked``, a full C (optimal for prefix sums). Each as a simulation draws it, and
with ``, release`` as a release does: 64 bits a normal, float64, rounded to a grid;
``times_simulation`` is its time over the simulation's.

Floors, each jitted on its own for one seed; several seeds may at best take as long each:

- ``normals``: drawing the standard normals [n, d], in a scan; beside it, as ``jax_normals``, by
  `jax.random.normal`, which hashes once for each number.
- ``laplaces`` and ``jax_laplaces``: the same of Laplace variables; no floor of any route.
- ``colour``: a block of rounds as one product of rows of C^-1 [block, T] with all normals.
- ``trapezoid``: the same without the zeros above the diagonal, a product a block of the width it
  needs; a lower floor than ``colour``.
- ``agents``: the product of the factor over agents [n, n] with [n, d], in a scan.

Times are a round and seed, the least of repeated runs that take turns, compilation excluded: other
work on the machine must not raise a floor and flatter the ratio. ``times_floor`` divides by
normals + colour, ``times_tight_floor`` by normals + trapezoid + agents; where no block is coloured
both leave that out. ``state_bytes`` is what a seed keeps between rounds and ``temporary_bytes``
what the compiled scan of all seeds allocates beside its arguments and results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, turns
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.transforms import noise, rounds, variates

HIGHEST = jax.lax.Precision.HIGHEST
BANDS = 4
RELEASE = ", release"
GRID = 2.0**-8
DRAWS = ("normals", "jax_normals", "laplaces", "jax_laplaces")


def strategies(length: int) -> dict[str, np.ndarray | None]:
    """A strategy for each route."""
    banded = np.tril(np.triu(np.full((length, length), 0.5 / BANDS), -BANDS), -1) + np.eye(length)
    complete = temporal.prefix_sum(Participation(length, 1, length))
    results = {"recursion": banded, "moving": np.linalg.inv(banded), "blocked": complete}
    for name, matrix in results.items():
        kind = rounds.route(matrix, length).kind
        if kind != name:
            raise ValueError(f"--rounds is {length}: {name} takes the route {kind}; give more")
    return {"none": None, **results}


def key_of(seed: Any) -> Any:
    """A seed's noise key."""
    return jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed)


def whole(
    factor: Any,
    strategy: np.ndarray | None,
    length: int,
    d: int,
    seeds: int,
    grid: float | None = None,
) -> Any:
    """All rounds of all seeds: a jitted function of the keys, giving the sum over rounds."""
    n = len(factor)
    zeros = jnp.zeros((n, d), jnp.float32)

    def make(key: Any) -> Any:
        return noise.correlated(factor, key=key, rounds=length, strategy=strategy, grid=grid)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        state, total = carry
        # The counter is shared by the seeds, as in a run, so that blocks start in all at once.
        axes = jax.tree.map(lambda _: 0, state)._replace(round=None)

        def one(state: Any) -> Any:
            return make(state.key).update(zeros, state)

        updates, state = jax.vmap(one, in_axes=(axes,), out_axes=(0, axes))(state)
        return (state, total + updates), None

    @jax.jit
    def run(keys: Any) -> Any:
        start = jax.vmap(lambda key: make(key).init(zeros))(keys)._replace(round=jnp.int32(0))
        total = jnp.zeros((seeds, n, d), jnp.float32)
        return jax.lax.scan(step, (start, total), None, length=length)[0][1]

    return run


def floors(factor: Any, strategy: np.ndarray, d: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Each floor of one seed, with the rounds it counts for."""
    length = len(strategy)
    n = len(factor)
    block = rounds.BLOCK
    colours = jnp.asarray(np.tril(np.linalg.inv(strategy)), jnp.float32)
    drawn = jax.random.normal(jax.random.key(1), (length, n * d), jnp.float32)
    models = jnp.zeros((n, d), jnp.float32)
    weights = jnp.asarray(factor, jnp.float32)
    key = key_of(0)

    def drawing(draw: Any) -> Any:
        def body(total: Any, t: Any) -> Any:
            return total + draw(jax.random.fold_in(key, t), (n, d), jnp.float32), None

        return jax.jit(lambda total: jax.lax.scan(body, total, jnp.arange(length))[0])

    @jax.jit
    def agents(models: Any) -> Any:
        def body(models: Any, _: None) -> Any:
            return jnp.matmul(weights, models, precision=HIGHEST), None

        return jax.lax.scan(body, models, None, length=length)[0]

    @jax.jit
    def product(rows: Any, drawn: Any) -> Any:
        return jnp.matmul(rows, drawn, precision=HIGHEST)

    # Whole blocks, sliced beforehand: the floor is the products alone, one after the other.
    starts = range(0, length - length % block, block)
    parts = [(colours[t : t + block, : t + block], drawn[: t + block]) for t in starts]

    def trapezoid() -> None:
        for rows, part in parts:
            jax.block_until_ready(product(rows, part))

    return {
        "normals": (functools.partial(drawing(variates.normals), models), length),
        "jax_normals": (functools.partial(drawing(jax.random.normal), models), length),
        "laplaces": (functools.partial(drawing(variates.laplaces), models), length),
        "jax_laplaces": (functools.partial(drawing(jax.random.laplace), models), length),
        "colour": (lambda: product(colours[-block:], drawn), block),
        "trapezoid": (trapezoid, len(parts) * block),
        "agents": (lambda: agents(models), length),
    }


def least(calls: dict[str, tuple[Callable[[], Any], int]], repeats: int) -> dict[str, float]:
    """Least seconds of each call, over its count."""
    took = turns({name: call for name, (call, _) in calls.items()}, repeats)
    return {name: took[name].least / count for name, (_, count) in calls.items()}


def measure(n: int, d: int, length: int, seeds: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row a route."""
    # Any full factor: what it holds changes no time.
    factor = np.random.default_rng(0).normal(size=(n, n)).astype(np.float32)
    result = strategies(length)
    keys = jax.vmap(key_of)(jnp.arange(seeds))
    blocked = result["blocked"]
    assert blocked is not None
    calls = floors(factor, blocked, d)
    temporary = {}
    runs = [(name, item, grid) for name, item in result.items() for grid in (None, GRID)]
    for name, strategy, grid in runs:
        name += RELEASE if grid else ""
        compiled = whole(factor, strategy, length, d, seeds, grid).lower(keys).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = (functools.partial(compiled, keys), length * seeds)
    took = least(calls, repeats)
    rows = []
    for plain, strategy, grid in runs:
        name = plain + (RELEASE if grid else "")
        blocks = plain == "blocked"
        loose = took["normals"] + (took["colour"] if blocks else 0)
        tight = took["normals"] + took["agents"] + (took["trapezoid"] if blocks else 0)
        row = {"algorithm": name, "agents": n, "entries": d}
        row |= {"rounds": length, "seeds": seeds, "block": rounds.BLOCK if blocks else 1}
        row |= {"milliseconds": 1e3 * took[name], "rounds_per_second": 1 / took[name]}
        row |= {"times_floor": took[name] / loose, "times_tight_floor": took[name] / tight}
        row |= {
            f"{part}_milliseconds": 1e3 * took[part]
            for part in (*DRAWS, "colour", "trapezoid", "agents")
        }
        row["times_simulation"] = took[name] / took[plain]
        link = noise.correlated(
            np.eye(n), key=key_of(0), rounds=length, strategy=strategy, grid=grid
        )
        past = jax.eval_shape(link.init, jnp.zeros((n, d), jnp.float32)).past
        row["state_bytes"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(past))
        rows.append(row | {"temporary_bytes": temporary[name]})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=5)
    bench.parser.add_argument("--agents", type=int, default=148)
    bench.parser.add_argument("--entries", type=int, default=641, help="parameters d of an agent")
    bench.parser.add_argument("--rounds", type=int, default=380)
    bench.parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = bench.parse(argv)
    for seeds in options.seeds:
        sizes = options.agents, options.entries, options.rounds
        for row in measure(*sizes, seeds, options.repeats):
            bench.row(**row)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
