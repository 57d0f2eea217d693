"""Rounds of many agents: speed and memory of sparse gossip against a bare floor.

Quadratics on four random rings laid over each other (degree 8), one model [d] an agent: D-SGD with
independent noise, the agent unit, batches of one record. A process for each number of agents n.

- ``seconds``: one round of a full run, the first call's compilation excluded.
- ``floor``: to read and write models, messages and noise once, plus drawing n d normals.
- ``ratio``: seconds over floor; ``agent_us``: microseconds for an agent and a round.
- ``peak``: largest resident size of the process in bytes, of which libraries take about 400 MB;
  ``models``: what the run added to the process, in units of n d float32.
- ``plan``: seconds of `plan.make` from a sparse mixing matrix.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from _timing import Bench, forget_peak, peak, timed
from dpjax.data.partition import Partition
from dpjax.engine.run import run
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.transforms import variates

DEGREE = 8


def rings(n: int) -> scipy.sparse.csr_array:
    """The mean over an agent and its two neighbours on each of the random rings."""
    rng, matrix = np.random.default_rng(0), scipy.sparse.eye_array(n, format="csr")
    for _ in range(DEGREE // 2):
        ring = rng.permutation(n)
        pairs = np.ones(n), (ring, np.roll(ring, 1))
        links = scipy.sparse.csr_array(pairs, shape=(n, n))
        matrix = matrix + links + links.T
    return matrix.tocsr() / (DEGREE + 1)


def quadratics(n: int, d: int) -> problem.Problem:
    """(w - x_i u)^2 / 2 around a target of each agent's own, on a line: data are one number."""
    line = np.linspace(-1, 1, d).astype(np.float32)
    x = np.random.default_rng(0).standard_normal((n, 1)).astype(np.float32)
    own = Partition(np.arange(n, dtype=np.int32)[:, None], np.ones(n, np.int32))
    return problem.Problem(
        init=lambda key: jnp.zeros(d),
        loss=lambda w, x, y: 0.5 * jnp.sum(jnp.square(w - x * line)),
        metrics=lambda models, evaluation: {"mean": jnp.mean(models)},
        x=x, y=np.zeros(n, np.float32), partition=own, evaluation=(),
    )  # fmt: skip


def floor(n: int, d: int, repeats: int) -> float:
    """Seconds of three copies of [n, d] and of n d normals."""
    key, array = jax.random.key(0, impl="threefry2x32"), jnp.ones((n, d))
    move = jax.jit(lambda x: x + 1)
    copy = timed(lambda: move(array), repeats).least
    draw = jax.jit(lambda key: variates.normals(key, (n, d), jnp.float32))
    return 3 * copy + timed(lambda: draw(key), repeats).least


def measured(n: int, d: int, rounds: int, repeats: int) -> dict[str, Any]:
    """One row."""
    matrix = rings(n)
    config = plan.Config(
        noise=noise.Independent(), budget=protect.Budget(8.0, 1e-7), rounds=rounds,
        protect=protect.Protect("replace_agent", clip_norm=1.0), sampler=samplers.Random(1),
        optimizer=optimizers.Sgd(0.1),
    )  # fmt: skip
    planning = timed(lambda: plan.make(config, matrix), 0)
    made, planned, task = planning.result, planning.first, quadratics(n, d)

    before = forget_peak()

    def once() -> float:
        return run(made, task, seeds=[0], eval_every=rounds).seconds / rounds

    seconds = timed(once, repeats, clock=float).median
    most, least = peak(), floor(n, d, repeats)
    return {
        "agents": n, "parameters": d, "degree": DEGREE, "rounds": rounds, "seconds": seconds,
        "floor": least, "ratio": seconds / least, "agent_us": seconds / n * 1e6, "peak": most,
        "models": (most - before) / (4 * n * d), "plan": planned,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--agents", type=int, nargs="+", default=[1000, 10_000, 100_000])
    bench.parser.add_argument("--parameters", type=int, default=1000)
    bench.parser.add_argument("--rounds", type=int, default=10)
    options = bench.parse(argv)
    if options.one:
        n, d, rounds = map(int, options.one)
        print(json.dumps(measured(n, d, rounds, options.repeats)))
        return 0
    for n in options.agents:
        bench.in_own_process(n, options.parameters, options.rounds, repeats=options.repeats)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
