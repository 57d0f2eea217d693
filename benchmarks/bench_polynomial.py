"""Polynomial noise on networks of many agents: its energy, its certificate, and what it costs.

D-SGD of logistic regression on random rings laid over each other (degree 8), with models of d
numbers (`_tasks`). A process for each number of agents n and each degree; degree 0 is independent
noise.

- ``plan_seconds``: of the first `plan.make`; ``seconds``: of one round of a run, the least.
- ``gap``: noise energy over a lower bound on that of all designs, less 1; ``gain``: energy of
  independent noise over that of this one, of one step or of ``--horizon`` rounds.
- ``peak``: largest resident size in bytes, of which libraries take about 400 MB.
"""

import dataclasses
import json
from typing import Any

import numpy as np

import _tasks
from _timing import Bench, peak, timed
from dpjax.engine.run import run
from dpjax.learning import samplers
from dpjax.mechanism import polynomial
from dpjax.plans import noise, plan


def energy(n: int, matrix: Any, scale: float, horizon: int) -> float:
    """Noise energy of independent noise of one scale, of all models of ``horizon`` rounds."""
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (n, 32))
    total = 0.0
    for k in range(horizon):
        signs = matrix @ signs
        total += (horizon - k) * float(np.square(signs).sum()) / signs.shape[1]
    return scale**2 * total


def measured(n: int, d: int, degree: int, horizon: int, repeats: int) -> dict[str, Any]:
    """One row's numbers."""
    matrix = _tasks.rings(n)
    task = _tasks.logistic(n, d, 1)
    rounds = max(10, horizon)
    part = noise.Polynomial(degree, horizon if horizon > 1 else None) if degree else None
    config = _tasks.config(rounds, samplers.Random(1))
    single = plan.make(config, matrix)
    config = dataclasses.replace(config, noise=part or config.noise)
    planning = timed(lambda: plan.make(config, matrix), 0)
    result = planning.result
    row = {"plan_seconds": planning.first}
    if part is not None:
        solution: polynomial.PolynomialNoise = result.noise.solution
        scale = float(single.factor[0])
        row |= {"gap": solution.gap}
        row |= {"gain": energy(n, matrix, scale, horizon) / solution.value}

    def once() -> float:
        return run(result, task, seeds=[0], eval_every=rounds).seconds / rounds

    return row | {"seconds": timed(once, repeats, clock=float).least, "peak": peak()}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--agents", type=int, nargs="+", default=[1000, 10_000, 100_000])
    bench.parser.add_argument("--degrees", type=int, nargs="+", default=[0, 3, 6, 12])
    bench.parser.add_argument("--horizon", type=int, default=1)
    bench.parser.add_argument("--parameters", type=int, default=100)
    options = bench.parse(argv)
    if options.one:
        n, d, degree, horizon = map(int, options.one)
        row = {"agents": n, "parameters": d, "polynomial": degree, "horizon": horizon}
        print(json.dumps(row | measured(n, d, degree, horizon, options.repeats)))
        return 0
    for n in options.agents:
        for degree in options.degrees:
            sizes = n, options.parameters, degree, options.horizon
            bench.in_own_process(*sizes, repeats=options.repeats)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
