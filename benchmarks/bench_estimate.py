"""What `dp.estimate` says of a run, against the run's own peak memory and time.

Five runs of different kinds on random data, each of 5 to 20 seconds on two cores. Estimate and run
have a fresh process each, so that neither finds what the other has compiled or allocated. Memory is
the process's largest resident size; time is that of the one call, `dp.run`, compilation included.
With --repeats N every run is estimated and done N times; the row of a repeat compares these two.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np

import dpjax as dp
from _timing import Bench, peak, timed
from dpjax.algorithms.exchange import Trusted
from dpjax.models.cnn import SmallCNN
from dpjax.models.linear import Linear


def task(agents: int, value: int, shape: tuple[int, ...], model: Any, loss: str) -> Any:
    """A problem of random records: so many an agent, of a shape."""
    random = np.random.default_rng(0)
    classes = np.arange(10) if loss == "cross_entropy" else np.array([-1, 1])
    count = agents * value

    def records(number: int) -> Any:
        y = random.choice(classes, number)
        return random.normal(size=(number, *shape)).astype(np.float32), y

    shards = dp.partition.iid(count, agents, 0)
    return dp.supervised(model, loss, records(count), records(512), shards)


def ring(agents: int) -> Any:
    """A ring's mixing matrix."""
    return dp.mixing.metropolis_hastings(dp.graphs.ring(agents))


def config(relation: str, rounds: int, sampler: Any, **parts: Any) -> Any:
    """What the five have in common."""
    protect = dp.Protect(relation, clip_norm=0.1, attacker=parts.pop("attacker", "outsider"))
    return dp.Config(
        protect=protect, rounds=rounds, sampler=sampler, budget=dp.Budget(10.0, 1e-5),
        optimizer=dp.optimizers.Sgd(0.01), **parts,
    )  # fmt: skip


def agents() -> tuple[Any, Any, int]:
    """D-SGD, whose agents are protected: 20 of them, ten seeds side by side."""
    result = config("replace_agent", 6_000, dp.samplers.Random(128), noise=dp.noise.Whisper())
    return dp.make_plan(result, ring(20)), task(20, 1_000, (123,), Linear(), "logistic"), 10


def records() -> tuple[Any, Any, int]:
    """D-SGD, whose records are clipped one by one."""
    result = config("replace_record", 8_000, dp.samplers.Random(128), noise=dp.noise.Independent())
    return dp.make_plan(result, ring(20)), task(20, 1_000, (123,), Linear(), "logistic"), 2


def network() -> tuple[Any, Any, int]:
    """A convolutional network per record."""
    result = config("replace_record", 20, dp.samplers.Random(64), noise=dp.noise.Independent())
    shape = (28, 28, 1)
    return dp.make_plan(result, ring(4)), task(4, 512, shape, SmallCNN(), "cross_entropy"), 1


def dome() -> tuple[Any, Any, int]:
    """A server with a learned sketch: two seeds of a convolutional network."""
    result = config(
        "zero_out_record", 32, dp.samplers.Cyclic(2, 16, 16), noise=dp.noise.SumShares(),
        method=dp.methods.dome(64, Trusted()), attacker="aggregator",
    )  # fmt: skip
    weights = dp.mixing.metropolis_hastings(dp.graphs.complete(4))
    return dp.make_plan(result, weights), task(4, 256, (28, 28, 1), SmallCNN(), "cross_entropy"), 2


def over_rounds() -> tuple[Any, Any, int]:
    """Noise correlated over all rounds, which are kept."""
    result = config(
        "replace_record", 640, dp.samplers.Cyclic(10, 64, 8), noise=dp.noise.PrefixSum()
    )
    return dp.make_plan(result, ring(10)), task(10, 512, (4_000,), Linear(), "logistic"), 2


CASES = {case.__name__: case for case in (agents, records, network, dome, over_rounds)}


def one(name: str, kind: str) -> dict[str, Any]:
    """Bytes and seconds of one case in this process: estimated, or done."""
    plan, problem, seeds = CASES[name]()
    call = dp.estimate if kind == "estimate" else dp.run
    timing = timed(lambda: call(plan, problem, seeds=range(seeds)), 0)
    if kind == "estimate":
        expected = timing.result
        return {
            "memory": expected.memory, "seconds": expected.seconds, "held": expected.in_use,
            "added": expected.added, "setup_seconds": expected.setup_seconds,
            "took": timing.first,
        }  # fmt: skip
    rounds = timing.result.seconds
    return {"memory": peak(), "seconds": timing.first, "rounds_seconds": rounds}


def in_process(name: str, kind: str) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--one", name, kind]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = bench.parse(argv)
    if options.one:
        print(json.dumps(one(*options.one)))
        return 0
    for name in options.cases:
        for _ in range(options.repeats):
            expected = in_process(name, "estimate")
            true = in_process(name, "run")
            bench.row(
                case=name, memory_mib=true["memory"] / 2**20,
                estimated_mib=expected["memory"] / 2**20,
                memory_ratio=expected["memory"] / true["memory"],
                seconds=true["seconds"], estimated_seconds=expected["seconds"],
                seconds_ratio=expected["seconds"] / true["seconds"],
                setup_seconds=expected["setup_seconds"], rounds_seconds=true["rounds_seconds"],
                estimating_seconds=expected["took"], held_mib=expected["held"] / 2**20,
                added_mib=expected["added"] / 2**20,
            )  # fmt: skip
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
