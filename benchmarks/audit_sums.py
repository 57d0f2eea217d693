"""What sums among sites really lose, by record and replay: python benchmarks/audit_sums.py

Five sites add up one round by the protocol that they are deployed with, over queues of bytes: a
canary record is in one of them, and again it is not. Every site draws its secret from the operating
system, and both runs have the same secrets, so that they differ by the canary alone.

The attacker is the site that adds up, together with those that it knows all noise of. It takes the
sum from its own part of the protocol, and subtracts the vectors of those it knows. The plan counts
on one site that may be missing and one that colludes; nobody is missing here, so the attacker is
given the noise of one more, which hides as little as the share of a site that is not there. It
does not attack the masks: vectors under masks have a proof, not an audit.

- ``measured`` is the loss mu of the best linear test (`dpjax.contrib.replay`), and ``ratio`` that
  over the mu whose zCDP is the stated one, with a 95 % interval; ``tested`` is a lower bound from
  one event on fresh runs. ``epsilon`` is that of the measured mu, below ``stated_epsilon``.
- ``fault`` names a broken copy that the audit must find, and ``flagged`` says whether it did.
"""

import contextlib
import dataclasses
import math
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import _audit as audit
from _audit_sites import entries, memory
from _local_sites import Sums, identities
from _timing import Bench
from dpjax.accounting import gdp
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.contrib import replay
from dpjax.data.partition import Partition
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import optimizers, plan, protect
from dpjax.plans.plan import Plan
from dpjax.plans.sums import Discrete
from dpjax.sites import compute
from dpjax.sites.compute import SumRounds
from dpjax.sites.noise import SiteNoise
from dpjax.sites.peers import PeerTerms
from dpjax.sites.store import KEY_BYTES
from dpjax.topology import graphs, mixing

NAMES = ("geneva", "lyon", "nice", "parma", "turin")
VICTIM = 1
ATTACKERS = (0, 2)
"""One that colludes, which adds up, and one in place of a site that is missing."""
RECORD = audit.RECORD.with_name("audit_sums.jsonl")
HALF = "each share of noise is 0.5 of what it should be"
BARE = "one site has next to no noise"
FAULTS = (HALF, BARE)
_Noisy = Callable[..., np.ndarray]


def planned() -> Plan:
    """One round, in which one site may be missing and one collude."""
    config = plan.Config(
        method=Federated(Trusted(dropouts=1)),
        noise=Discrete(size=2, dropouts=1, colluders=1, variance=2_500),
        sampler=samplers.Random(1),
        rounds=1,
        optimizer=optimizers.Sgd(0.5),
        budget=protect.Budget(audit.EPSILON, audit.DELTA, accountant="zcdp"),
        protect=protect.Protect("replace_record", clip_norm=1.0, attacker="aggregator"),
    )
    weights = mixing.metropolis_hastings(graphs.complete(len(NAMES)))
    return plan.make(config, weights, counts=(1,) * len(NAMES))


def stated(agreed: Plan) -> tuple[float, float]:
    """The loss that a plan states: epsilon, and the mu of as much zCDP."""
    loss: Any = agreed.guarantee.other_loss
    return agreed.guarantee.epsilon, math.sqrt(2 * loss.rho)


class Runs:
    """Pairs of runs, with the canary and without.

    Args:
        folder: Of identities and of runs.
    """

    def __init__(self, folder: Path) -> None:
        self.plan = planned()
        self._folder = folder
        self._identities = identities(folder, NAMES)
        self._worlds = [self._sites(None), self._sites(VICTIM)]

    def _sites(self, victim: int | None) -> list[SumRounds]:
        """The rounds of each site."""
        together = audit.problem(self.plan, victim)
        shards = Partition(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
        parts = together.init, together.loss, together.metrics
        results = []
        for number in range(len(NAMES)):
            row = slice(number, number + 1)
            own = Problem(*parts, together.x[row], together.y[row], shards, ())
            results.append(SumRounds(self.plan, own, number))
        return results

    def recorded(self, count: int) -> list[np.ndarray]:
        """What the attacker has of both worlds, [runs, K] each, in units of the clip norm."""
        worlds: list[list[np.ndarray]] = [[], []]
        for _ in range(count):
            run = secrets.token_bytes(KEY_BYTES)
            keys = [secrets.token_bytes(KEY_BYTES) for _ in NAMES]
            for world, sites in zip(worlds, self._worlds, strict=True):
                world.append(self._seen(sites, keys, run))
        return list(map(np.stack, worlds))

    def _seen(self, sites: list[SumRounds], keys: list[bytes], run: bytes) -> np.ndarray:
        """One round of all sites, and the sum of those whose noise the attacker does not know."""
        vectors = []
        for name, site, key in zip(NAMES, sites, keys, strict=True):
            site.begin([SiteNoise(key, run=run, holder=name)])
            state = site.init()
            vectors.append(site.vector(state, site.outgoing(state)))
        values = np.stack(vectors)
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            sums = Sums(PeerTerms.of(self.plan), self._identities, Path(place))
            with contextlib.closing(sums):
                opened = sums.total(sums.add_up(values))
        code = sites[0].code
        modulus = 2**code.bits
        rest = opened.astype(np.int64) - values[list(ATTACKERS)].astype(np.int64).sum(axis=0)
        centred = (rest + modulus // 2) % modulus - modulus // 2
        return centred * code.grid


def halved(noisy: _Noisy) -> _Noisy:
    """A broken copy, whose noise has a quarter of its variance."""

    def broken(code: Any, *parts: Any) -> np.ndarray:
        return noisy(dataclasses.replace(code, variance=code.variance // 4), *parts)

    return broken


def bare(noisy: _Noisy) -> _Noisy:
    """A broken copy, in which one site that the attacker does not know has the least noise."""
    done = 0

    def broken(code: Any, *parts: Any) -> np.ndarray:
        nonlocal done
        done += 1
        if (done - 1) % len(NAMES) == len(NAMES) - 1:
            code = dataclasses.replace(code, variance=4)
        return noisy(code, *parts)

    return broken


def measured(runs: Runs, worlds: list[np.ndarray], confidence: float = 0.95) -> audit.Found:
    """The loss to the attacker, of both worlds."""
    one, other = worlds
    result = replay.measured(one, one + (other - one).mean(axis=0), confidence=confidence)
    _, mu = stated(runs.plan)
    return audit.Found("mu", mu, *result, audit.separated(one, other))


def rows(count: int, folder: Path, confidence: float = 0.95) -> Iterator[dict[str, Any]]:
    """The audit of the sites as they are, and of the broken copies."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = Runs(Path(place))
        epsilon, _ = stated(runs.plan)
        for fault in ("", *FAULTS):
            with contextlib.ExitStack() as stack:
                if fault:
                    broken = {HALF: halved, BARE: bare}[fault](compute.integers.noisy)
                    stack.enter_context(mock.patch.object(compute.integers, "noisy", broken))
                found = measured(runs, runs.recorded(count), confidence)
            row = {"what": "sums", "sites": len(NAMES), "runs": count, "fault": fault}
            row |= {**entries(found), "stated_epsilon": epsilon}
            row["epsilon"] = float(gdp.epsilon(min(found.measured, 1e3), audit.DELTA))
            is_flagged = audit.flagged(found)
            yield row | ({"flagged": is_flagged} if fault else {"finding": is_flagged})


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--runs", type=int, default=512, help="of each copy")
    options = bench.parse(argv)
    for row in rows(options.runs, memory()):
        bench.row(**row)
    missed = [row for row in bench.rows if row.get("finding") or row.get("flagged") is False]
    print(f"{len(bench.rows)} audits, {len(missed)} of them findings")
    return bench.finish() or bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
