"""Training speed: dpjax against a PyTorch loop over agents, and against a bare floor.

The same logistic regression in one run on one machine: n agents, per-agent mini-batches,
per-sample gradients clipped and noised (record unit) or the agent's mean gradient (agent unit).

- ``torch``: the usual script: a Python loop over agents, per-sample gradients by torch.func.vmap,
  clipping, correlated noise by a Cholesky factor, gossip by a matrix product.
- ``floor``: the same rounds as a bare jitted scan of gradients and one gossip product, on batches
  fixed beforehand: no sampling, no noise, no clipping, no metrics.
- ``dpjax``: the full run, alone (one seed, one plan) and with seeds and step sizes vmapped.

One seed's round of one plan counts one. Reports medians of repeated runs, compilation excluded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, timed
from dpjax.data import load, partition
from dpjax.engine.run import run
from dpjax.models.linear import Linear
from dpjax.plans import noise, optimizers, plan, problem, protect, samplers
from dpjax.topology import graphs, mixing


def torch_rounds_per_second(
    made: plan.Plan, task: problem.Problem, unit: str, rounds: int
) -> float:
    """Rounds per second of the loop over agents in PyTorch."""
    import torch

    config = made.config
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
    return rounds / timed(lambda: many(rounds), 0).first


def floor_rounds_per_second(
    made: plan.Plan, task: problem.Problem, rounds: int, repeats: int, lanes: int
) -> float:
    """Rounds per second of bare gradients and gossip, ``lanes`` models side by side."""
    n, step_size = made.agents, made.config.optimizer.first
    rows = np.asarray(task.partition.indices)[:, : made.config.sampler.batch_size]
    x, y = jnp.asarray(np.asarray(task.x)[rows]), jnp.asarray(np.asarray(task.y)[rows])
    matrix = jnp.asarray(made.mixing, jnp.float32)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-y * (x @ params)))

    @jax.jit
    def scan(models: Any, x: Any, y: Any) -> Any:
        def body(models: Any, _: None) -> Any:
            one = jax.vmap(jax.grad(loss))
            gradients = jax.vmap(one, in_axes=(0, None, None))(models, x, y)
            return jnp.matmul(matrix, models - step_size * gradients), None

        return jax.lax.scan(body, models, None, length=rounds)[0]

    models = jnp.zeros((lanes, n, x.shape[-1]))
    return lanes * rounds / timed(lambda: scan(models, x, y), repeats).median


def dpjax_rounds_per_second(
    plans: list[plan.Plan], task: problem.Problem, seeds: int, repeats: int
) -> float:
    """Rounds per second of full runs; the first call compiles and is not counted."""
    rounds = plans[0].config.rounds
    timing = timed(
        lambda: run(plans, task, seeds=range(seeds), eval_every=rounds),
        repeats,
        clock=lambda result: result.seconds,
    )
    return len(plans) * seeds * rounds / timing.median


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--dataset", default="a9a")
    bench.parser.add_argument("--agents", type=int, default=20)
    bench.parser.add_argument("--rounds", type=int, default=1000)
    bench.parser.add_argument("--torch-rounds", type=int, default=50, help="0 leaves PyTorch out")
    bench.parser.add_argument("--seeds", type=int, default=10)
    bench.parser.add_argument("--steps", type=int, default=5)
    options = bench.parse(argv)

    data = load.load(options.dataset)
    graph = graphs.erdos_renyi(options.agents, 0.5, 0)
    matrix = mixing.metropolis_hastings(graph)
    shards = partition.dirichlet(data.y_train, options.agents, 10.0, 0, minimum=128)
    train, test = (data.x_train, data.y_train), (data.x_train[:256], data.y_train[:256])
    task = problem.supervised(Linear(), "logistic", train, test, shards)
    for relation in ("replace_agent", "replace_record"):
        plans = [
            plan.make(
                plan.Config(
                    noise=noise.Whisper(), budget=protect.Budget(10.0, 1e-5),
                    protect=protect.Protect(relation, clip_norm=0.1),
                    sampler=samplers.Random(128), optimizer=optimizers.Sgd(0.01 * (1 + k)),
                    rounds=options.rounds,
                ),
                matrix,
            )
            for k in range(options.steps)
        ]  # fmt: skip
        unit = plans[0].config.protect.unit
        lanes = options.steps * options.seeds

        def add(name: str, lanes: int, rate: float, unit: str = unit) -> None:
            row = {"algorithm": name, "unit": unit, "lanes": lanes, "dataset": options.dataset}
            row |= {"agents": options.agents, "batch_size": 128}
            bench.row(**row, rounds_per_second=rate)

        if options.torch_rounds:
            add("torch", 1, torch_rounds_per_second(plans[0], task, unit, options.torch_rounds))
        floor = floor_rounds_per_second
        add("floor", 1, floor(plans[0], task, options.rounds, options.repeats, 1))
        add("dpjax", 1, dpjax_rounds_per_second(plans[:1], task, 1, options.repeats))
        add("floor", lanes, floor(plans[0], task, options.rounds // 10, options.repeats, lanes))
        add("dpjax", lanes, dpjax_rounds_per_second(plans, task, options.seeds, options.repeats))
    rates = {
        (row["unit"], row["algorithm"], row["lanes"]): row["rounds_per_second"]
        for row in bench.rows
    }
    for row in bench.rows:
        row["times_floor"] = row["rounds_per_second"] / rates[row["unit"], "floor", row["lanes"]]
        if options.torch_rounds:
            row["times_torch"] = row["rounds_per_second"] / rates[row["unit"], "torch", 1]
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
