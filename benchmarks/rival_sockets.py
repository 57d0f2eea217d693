"""Rounds of D-SGD against a process for each node: NumPy, and TCP on this machine.

The same task (`_tasks`): logistic regression, a mean gradient of all records of an agent, clipped,
independent noise of the plan's scale, a step, and the mean over the neighbours' messages. ``dpjax``
is `run`; ``sockets`` is the usual peer-to-peer script (`_nodes`), in which every node sends its
model to each neighbour in every round. Both take turns. Rounds are clocked without compilation,
and from when all nodes are connected to when the last one has ended.

- ``rounds_per_second``: of the median; ``times_dpjax``: how many times as long a round takes as in
  dpjax, the median over turns.
- ``difference``: between all models of the two after as many rounds without noise, over the norm
  of dpjax's. It is the same task: above 1e-3 nothing is timed.
"""

import sys
from pathlib import Path

import _tasks
from _timing import Bench
from dpjax.learning import samplers

NODES = Path(__file__).with_name("_nodes.py")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--agents", type=int, nargs="+", default=[8, 16, 32, 64])
    bench.parser.add_argument("--parameters", type=int, default=1000)
    bench.parser.add_argument("--records", type=int, default=16, help="of an agent")
    bench.parser.add_argument("--rounds", type=int, default=200)
    options = bench.parse(argv)
    config = _tasks.config(options.rounds, samplers.Full())
    for n in options.agents:
        matrix = _tasks.rings(n)
        task = _tasks.logistic(n, options.parameters, options.records)
        command = [sys.executable, str(NODES)]
        weights = {"weights": matrix.toarray().astype("float32"), "step_size": _tasks.STEP_SIZE}
        for row in _tasks.compared(
            "sockets", command, config, matrix, task, options.repeats, **weights
        ):
            bench.row(**row)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
