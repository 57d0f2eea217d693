"""Rounds of federated averaging against Flower's simulation (`flwr[simulation]`, on Ray).

The same task: logistic regression, all clients in every round, five local steps on all of a
client's records, updates clipped to one norm, Gaussian noise of one scale on their mean at the
server. ``dpjax`` is `Federated` with a trusted sum; ``flower`` is a `ClientApp`, and `FedAvg` in
`DifferentialPrivacyServerSideFixedClipping` (`_flower`). Both take turns. Rounds are clocked
without compilation, and without Flower's first one, in which Ray's processes start. Flower's
in-memory grid asks for answers every tenth of a second, which bounds its rate for small models.

Flower has an environment of its own, so that its libraries and dpjax's need not agree:

    python -m venv .venv-flower && .venv-flower/bin/pip install 'flwr[simulation]>=1.41,<2'

``--python`` names another interpreter. Where none has Flower and Ray there is no row.

- ``rounds_per_second``: of the median; ``times_dpjax``: how many times as long a round takes as in
  dpjax, the median over turns.
- ``difference``: between both models after as many rounds without noise, over the norm of dpjax's.
  It is the same task: above 1e-3 nothing is timed.
"""

import math
import subprocess
import sys
from pathlib import Path

import _tasks
from _timing import Bench
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.learning import samplers
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.topology import graphs, mixing

FLOWER = Path(__file__).with_name("_flower.py")
OWN = Path(__file__).resolve().parents[1] / ".venv-flower" / "bin" / "python"
STEPS = 5
VERSIONS = "import importlib.metadata as m; print(m.version('flwr'), m.version('ray'))"


def versions(python: str) -> list[str]:
    """Those of Flower and Ray; empty where an interpreter lacks them."""
    answer = subprocess.run([python, "-c", VERSIONS], capture_output=True, encoding="utf-8")
    return answer.stdout.split() if answer.returncode == 0 else []


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=2)
    bench.parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    bench.parser.add_argument("--parameters", type=int, default=1000)
    bench.parser.add_argument("--records", type=int, default=16, help="of a client")
    bench.parser.add_argument("--rounds", type=int, default=20)
    bench.parser.add_argument("--python", default=str(OWN if OWN.exists() else sys.executable))
    options = bench.parse(argv)
    result = versions(options.python)
    if not result:
        print("flwr[simulation] is not installed: left out (rival_flower.py --help says how to)")
        return bench.finish()
    length = STEPS * _tasks.STEP_SIZE
    config = plan.Config(
        method=Federated(Trusted(), local_steps=STEPS, local_step_size=_tasks.STEP_SIZE),
        noise=noise.SumShares(), budget=protect.Budget(8.0, 1e-7), rounds=options.rounds,
        protect=protect.Protect("replace_agent", clip_norm=_tasks.CLIP_NORM, attacker="aggregator"),
        sampler=samplers.Full(), optimizer=optimizers.Sgd(length),
    )  # fmt: skip
    for n in options.clients:
        task = _tasks.logistic(n, options.parameters, options.records)
        # The multiplier: the deviation of the sum's noise over the clip norm.
        share = math.sqrt(n) / _tasks.CLIP_NORM
        for row in _tasks.compared(
            "flower", [options.python, str(FLOWER)], config,
            mixing.metropolis_hastings(graphs.complete(n)), task, options.repeats, share,
            step_size=_tasks.STEP_SIZE, steps=STEPS,
        ):  # fmt: skip
            bench.row(**row, versions=dict(zip(("flwr", "ray"), result, strict=True)))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
