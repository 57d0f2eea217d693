"""What every mechanism really costs, by record and replay: python benchmarks/audit_mechanisms.py

Every method is run with every noise design, by its own round, on two neighbouring data sets with
the same noise: gradients above the clip norm that point the worst way, in every round that the
sampler allows. All that the attacker sees and knows is recorded over many seeds. How far the two
runs are apart, whitened by the covariance of what was recorded, is what the best linear test finds
(`dpjax.contrib.replay`); where noise is not Gaussian, likelihood ratios with the scales
that were recorded. ``stated`` is the plan's.

- ``audit`` rows: ``ratio`` is measured over stated, with a 95 % interval; ``tested`` what one event
  on fresh seeds shows over stated, a lower bound at 95 % (not with ``--quick``). ``broken`` is a
  copy with a fault that the audit must find, ``flagged`` whether it did.
- ``refused`` rows: what does not go together, and the plan's reason.

``--quick`` takes every method with every noise design, every design with every attacker, and every
sampler with every relation, once each. Else every relation is tried with its natural sampler, and
with every sampler for D-SGD and `Federated` against outsiders and aggregators; ``--all`` tries
every sampler with every method. ``--page`` measures nothing: it writes docs/artifact/audit.md, its
data files and its figure from the record.
"""

import copy
import csv
import dataclasses
import functools
import io
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from _audit import (
    AGENTS,
    DELTA,
    EPSILON,
    NETWORK,
    NOISES,
    RECORD,
    ROOT,
    ROUNDS,
    SAMPLERS,
    SITES,
    TURNING,
    Found,
    flagged,
    problem,
    separated,
)
from _timing import Bench
from dpjax.accounting import gdp
from dpjax.algorithms import (
    average,
    disk,
    dsgd,
    exchange,
    federated,
    methods,
    pairs,
    pmlf,
    random_weights,
    tracking,
    zip_dl,
)
from dpjax.contrib import references, relays, replay
from dpjax.contrib.trace import trace
from dpjax.engine import keys
from dpjax.learning import samplers
from dpjax.learning.problem import Problem
from dpjax.plans import (
    links,
    noise,
    optimizers,
    plan,
    protect,
    scheduled,
    sums,
)
from dpjax.protocols import Draw, Privatizer
from dpjax.results import plots, records
from dpjax.transforms import noise as transforms_noise
from dpjax.transforms import variates

COALITION = (0, 3)
PAGE = ROOT / "docs" / "artifact" / "audit.md"
DATA = PAGE.parent / "data"
"""Tables of the page, a file each."""
FIGURE = ROOT / "docs" / "figures" / "audit.svg"

_MISSING = exchange.Trusted(dropouts=1, missing=(3,))
_RELAYED = federated.Federated(relays.Relayed(relays.spanning(NETWORK)))

METHODS: dict[str, tuple[Any, ...]] = {
    "DSGD": (dsgd.DSGD(),),
    "DiSK": (disk.DiSK(),),
    "PMLF": (pmlf.PMLF(),),
    "Average": (average.Average(dsgd.DSGD()),),
    "ZipDL": (zip_dl.ZipDL(),),
    "Federated": (_RELAYED, federated.Federated(_MISSING)),
    "Tracking": (tracking.Tracking(beta=1.0),),
    "DPOP": (tracking.DPOP(),),
    "DGD": (tracking.DGD(),),
    "GradientTracking": (pairs.GradientTracking(),),
    "PPDOAGT": (pairs.PPDOAGT(),),
    "EXTRA": (references.EXTRA(),),
    "NIDS": (references.NIDS(),),
    "CorrelatedRandomness": (random_weights.CorrelatedRandomness(),),
    "Encrypted": (random_weights.Encrypted(),),
    "EncryptedOnLinks": (random_weights.Encrypted().on(NETWORK),),
}
"""What is audited of each method: the first that goes with the other parts."""
EVERY = "every"
_HINTS = get_type_hints(protect.Protect)
RELATIONS = get_args(_HINTS["relation"])
_stacked = vars(keys)["seed_keys"]  # Keys of all seeds; `keys.derive` is of one.
ATTACKERS = tuple((who, name) for name in ("any", "view") for who in get_args(_HINTS["attacker"]))


class Cell(NamedTuple):
    """Parts that are tried together, by their names in the registry."""

    method: str
    noise: str
    sampler: str
    attacker: str
    gradients: str
    relation: str


def rows(part: str) -> list[str]:
    """Names of all that is tried: "methods", "noises" that runs have, or "samplers"."""
    named = {
        "methods": list(METHODS),
        "noises": list(noise.DESIGNS),
        "samplers": list(SAMPLERS),
    }
    return named[part]


def method_terms() -> dict[str, Any]:
    """Terms of the registry's methods, by name; of one that has its base's, the base's alone."""
    kinds = [kind for kind in vars(methods).values() if isinstance(kind, type)]
    return {kind.__name__: kind.terms for kind in kinds if "terms" in vars(kind)}


def missing() -> list[str]:
    """Parts of the registries that have no audit, or no broken copy."""
    absent = [name for name in method_terms() if name not in METHODS]
    audits = {"noises": NOISES, "samplers": SAMPLERS}
    absent += [
        name for part, reference in audits.items() for name in rows(part) if name not in reference
    ]
    combined = [name for name, terms in method_terms().items() if terms.payload != "bare"]
    entries = [*combined, *rows("noises"), *rows("samplers")]
    return absent + [f"{name}, a broken copy" for name in entries if name not in BROKEN]


def planned(cell: Cell) -> tuple[Any, str]:
    """The plan of a cell and "", or None and why it is refused: of the last parts tried."""
    row = noise.DESIGNS[cell.noise].terms
    accountant = "gdp" if row.loss == "gaussian" else row.loss
    dealt = SAMPLERS[cell.sampler]
    if cell.method in TURNING and cell.sampler == "Random":
        dealt = ((samplers.Random(1), (2, 2, 2, 2)),)
    parts = itertools.product(METHODS[cell.method], NOISES[cell.noise], dealt)
    why = ""
    for method, part, (sampler, counts) in parts:
        try:
            config = plan.Config(
                method=method, noise=part, sampler=sampler, rounds=ROUNDS,
                optimizer=optimizers.Sgd(0.5),
                budget=protect.Budget(EPSILON, 0.0 if row.loss == "pure" else DELTA, accountant),  # type: ignore
                protect=protect.Protect(
                    cell.relation, 1.0, attacker=cell.attacker, gradients=cell.gradients,  # type: ignore
                    nodes=COALITION if cell.attacker == "coalition" else None,
                    norm="l1" if row.loss == "pure" else "l2",
                ),
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", scheduled.LostNoiseWarning)
                training_plan = plan.make(config, NETWORK, counts=counts)
        except ValueError as error:
            why = why or str(error)
            continue
        return training_plan, ""
    return None, why


def cells(expected: Callable[[Cell], bool]) -> Iterator[tuple[Cell, Any, str]]:
    """Cells that are wanted: those that are joined with a plan, those refused with the reason.

    A method and a design whose payloads differ are one refused cell; so are those of an
    attacker whom a design defends against under no relation.
    """
    for name, label in itertools.product(rows("methods"), rows("noises")):
        theirs = noise.DESIGNS[label].terms
        if METHODS[name][0].terms.payload not in theirs.payloads:
            result, why = planned(
                Cell(name, label, "Random", *theirs.attackers[0], "replace_agent")
            )
            assert result is None, f"{name} joins {label}, of another payload"
            yield Cell(name, label, *[EVERY] * 4), None, why
            continue
        for attacker, gradients in ATTACKERS:
            yield from _of_attacker(Cell(name, label, EVERY, attacker, gradients, EVERY), expected)


def _of_attacker(cell: Cell, expected: Callable[[Cell], bool]) -> Iterator[tuple[Cell, Any, str]]:
    """All relations and samplers: none where each relation is refused with its natural sampler."""
    natural = {relation: cell._replace(relation=relation) for relation in RELATIONS}
    for relation, item in natural.items():
        sampler = "Clients" if relation.endswith("client") else "Random"
        natural[relation] = item._replace(sampler=sampler)
    if not any(expected(value) for value in natural.values()):
        return
    first = {case: planned(case) for case in natural.values()}
    if all(outcome is None for outcome, _ in first.values()):
        yield cell, None, next(iter(first.values()))[1]
        return
    for item, (result, why) in first.items():
        if result is None or expected(item):
            yield item, result, why
        for sampler in rows("samplers"):
            other = item._replace(sampler=sampler)
            if other != item and expected(other):
                yield other, *planned(other)


# What is run: losses are linear, so that a record is its gradient.


class Recorded(NamedTuple):
    """What was recorded of S runs of T rounds, [S, T, rows, numbers]; ``noise`` is what was added.

    Whole numbers stay whole: the noise is then what was sent, by each.
    """

    messages: np.ndarray
    private: np.ndarray
    noise: np.ndarray


def _read(passed: Any) -> Any:
    return passed.message, passed.private, passed.noisy


def recorded(outcome: Any, task: Problem, seeds: range) -> Recorded:
    """Run a plan and record it."""
    batches = TURNING.get(type(outcome.config.method).__name__, 0)

    def public(value: Any, purpose: str, phase: int = 0) -> Any:
        return _stacked((batches,) * len(value) if purpose == "batches" else value, purpose, phase)

    # Batches are public: the same ones in all runs, for the covariance is of the noise.
    with mock.patch.object(keys, "seed_keys", public):
        result = trace(outcome, task, seeds=seeds, read=_read)

    def flat(tree: Any) -> np.ndarray:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        count = leaves[0].shape[2] if len({leaf.shape[2] for leaf in leaves}) == 1 else 1
        leaves = [leaf.reshape(*leaf.shape[:2], count, -1) for leaf in leaves]
        together = np.concatenate(leaves, axis=-1)
        return together if together.dtype == np.uint32 else together.astype(np.float64)

    message, private, noisy = map(flat, result)
    complete = noisy.dtype == np.uint32
    return Recorded(message, private, noisy if complete else noisy - private)


def seen(result: Any, record: Recorded, nodes: tuple[int, ...], seeds: range) -> np.ndarray:
    """All that the plan's attacker sees and knows, [S, ...]; ``nodes`` are those that attack."""
    config = result.config
    messages = record.messages
    if config.integer_encoded:
        # A colluder's message is taken off the sum, modulo 2^32; the signs of rotations are public.
        total = messages.reshape(*messages.shape[:2], -1)
        for agent in range(config.noise.colluders):
            total = total - record.noise[:, :, agent]
        return total.astype(np.int32).reshape(len(messages), -1)
    parts = [messages]
    if nodes:
        reference: Any = list(nodes)
        links_ = getattr(result.method, "sender", None)
        if links_ is not None:
            reference = np.flatnonzero(np.isin(links_, nodes))
        if config.protect.gradients == "view":
            reach = (NETWORK[list(nodes)] != 0).any(axis=0)
            if links_ is not None:
                reach = np.isin(result.method.receiver, nodes)
            reach[reference] = True
            parts = [messages[:, :, reach]]
        parts.append(record.noise[:, :, reference])
        if isinstance(config.noise, links.PairKeys):
            parts.append(_secrets(nodes, seeds))
    if getattr(config.noise, "colluders", 0) and config.protect.attacker == "aggregator":
        parts.append(record.noise[:, :, : config.noise.colluders])
    return np.concatenate([part.reshape(len(messages), -1) for part in parts], axis=1)


def _secrets(nodes: tuple[int, ...], seeds: range) -> np.ndarray:
    """Normals of the links of some nodes, which these know, [S, T, links, numbers]."""
    mine = np.isin(np.argwhere(np.triu(NETWORK, 1)), nodes).any(axis=1)
    return _of_links(seeds.start, seeds.stop)[:, :, mine]


@functools.lru_cache(maxsize=4)
def _of_links(start: int, stop: int) -> np.ndarray:
    number = len(np.argwhere(np.triu(NETWORK, 1)))

    @jax.jit
    @jax.vmap
    def of_seed(key: Any) -> Any:
        _, shared = transforms_noise.simulated_keys(key, AGENTS, number)

        def draw(t: Any, link: Any, leaf: Any) -> Any:
            subkey = jax.random.fold_in(jax.random.fold_in(shared[link], t), leaf)
            return variates.normals(subkey, (1, 1), jnp.float32)[0, 0]

        grid = jnp.meshgrid(jnp.arange(ROUNDS), jnp.arange(number), jnp.arange(2), indexing="ij")
        function = jax.vmap(draw)(*(axis.ravel() for axis in grid))
        return function.reshape(grid[0].shape)

    return np.asarray(of_seed(_stacked(tuple(range(start, stop)), "noise")))


def stated(result: Any) -> tuple[str, float]:
    """The loss that a plan states, and what it is: mu, epsilon, or the mu of a rho."""
    guarantee = result.guarantee
    if guarantee.mu is not None:
        return "mu", guarantee.mu
    if result.config.budget.accountant == "zcdp":
        return "mu of rho", math.sqrt(2 * guarantee.other_loss.rho)
    return "epsilon", guarantee.epsilon


def victims(result: Any) -> list[int]:
    """Agents whose data the attacker may be after: they are in the sum, and do not attack."""
    part = result.config.noise
    away = set(result.config.protect.nodes or ())
    if _summed(result):
        away |= {*_MISSING.missing, *range(part.colluders)}
    return [agent for agent in range(AGENTS) if agent not in away]


def audited(
    outcome: Any, seeds: range, *, after: Any = None, reference: Any = None, test: bool = False
) -> tuple[Found, int]:
    """Measure a plan.

    Args:
        outcome: A plan, or a broken copy.
        seeds: Of the runs.
        after: Victims that are tried; None is all of them.
        reference: The plan whose statement is audited; None is ``outcome``.
        test: Whether to confirm by one event on fresh seeds.

    Returns:
        The worst of all victims and attackers, and its victim.
    """
    unit, expected = stated(outcome if reference is None else reference)
    who = outcome.config.protect.attacker
    tried = []
    plain = recorded(outcome, problem(outcome), seeds)
    for victim in victims(outcome) if after is None else after:
        attackers: list[tuple[int, ...]] = [()]
        if who == "node":
            attackers = [(node,) for node in range(AGENTS) if node != victim]
        elif who == "coalition":
            attackers = [outcome.config.protect.nodes]
        changed = recorded(outcome, problem(outcome, victim), seeds)
        tried += [(victim, nodes, [plain, changed]) for nodes in attackers]
    start = 0
    if len(tried) > 1:
        # The worst is chosen by other seeds than those that it is measured on.
        start = len(seeds) // 4
        tried.sort(
            key=lambda value: _measured(outcome, value[2], value[1], seeds[:start], False).measured
        )
    victim, nodes, pair = tried[-1]
    result = _measured(outcome, pair, nodes, seeds[start:], test)
    return result._replace(unit=unit, stated=expected), victim


def _measured(outcome: Any, pair: list[Recorded], nodes: Any, seeds: range, test: bool) -> Found:
    first = len(pair[0].messages) - len(seeds) if seeds.start else 0
    pair = [Recorded(*(part[first : first + len(seeds)] for part in item)) for item in pair]
    if outcome.config.sampler.amplification() is not None:
        return _sampled(outcome, pair)
    if isinstance(outcome.config.noise, scheduled.ScheduledLaplace):
        return _pure(pair)
    one, other = (seen(outcome, record, nodes, seeds) for record in pair)
    result = replay.measured(one, other)
    tested = separated(one, other) if test and np.isfinite(result.mu) else None
    return Found("mu", 0.0, *result, tested)


def _pure(pair: list[Recorded]) -> Found:
    """Laplace noise: how far it must move for the other's messages, in units of its scale.

    Messages are a + B noise, B from the record. Every |move| / scale is the largest logarithm of a
    likelihood ratio of one variable, and all of them are met together.
    """
    first, other = pair
    d = (other.messages - first.messages).mean(axis=0).ravel()
    drawn = first.noise.reshape(len(first.noise), -1)
    scale = np.abs(drawn).mean(axis=0)
    live = scale > 1e-30
    units = drawn[:, live] / scale[live]
    messages = first.messages.reshape(len(drawn), -1)
    units = units - units.mean(axis=0)
    messages = messages - messages.mean(axis=0)
    response = np.linalg.pinv(units.T @ units, 1e-9, hermitian=True) @ (units.T @ messages)
    moves = np.linalg.pinv(response.T, 1e-6) @ d
    if np.linalg.norm(response.T @ moves - d) > 1e-3 * np.linalg.norm(d):
        return Found("epsilon", 0.0, math.inf, math.inf, math.inf)
    epsilon = float(np.abs(moves).sum())
    # |noise| / scale is exponential: its mean over S seeds is a gamma variable over S.
    low, high = (stats.gamma.ppf(share, len(drawn)) / len(drawn) for share in (0.025, 0.975))
    return Found("epsilon", 0.0, epsilon, epsilon * low, epsilon * high)


def _sampled(result: Any, pair: list[Recorded]) -> Found:
    """Batches by coin flips: rates and moves as recorded, composed by dp_accounting."""
    first, other = pair
    difference = first.private - other.private
    drawn = (np.abs(difference).max(axis=(2, 3)) > 1e-6).astype(float)
    if result.config.sampler.key_of == "run":
        return _binned(drawn, first.messages - other.messages, other.messages)
    turns = np.flatnonzero(drawn.mean(axis=0) > 0)
    count = int(drawn[:, turns].sum())
    trials = len(drawn) * len(turns)
    rate = stats.binomtest(count, trials).proportion_ci(0.95, "exact")
    d = (first.messages - other.messages).reshape(len(drawn), -1)
    moves = np.linalg.lstsq(drawn[:, turns], d, rcond=None)[0]
    plain = other.messages.reshape(len(drawn), -1)
    each = [replay.measured(plain, plain + move) for move in moves]
    mus = np.sqrt(np.mean(np.square(each), axis=0))
    shares = count / trials, rate.low, rate.high
    losses = [_composed(*item, len(turns)) for item in zip(shares, mus, strict=True)]
    return Found("epsilon", 0.0, *losses)


def _binned(drawn: np.ndarray, apart: np.ndarray, plain: np.ndarray) -> Found:
    """One bin of two, the same in every cycle: how far each moves all messages, and their mixture.

    The mixture is that of orthogonal moves. Noise over rounds joins them, and loses more.

    Args:
        drawn: [S, T] whether the record took part.
        apart: [S, ...] how far it moved the messages.
        plain: [S, ...] messages without it.
    """
    bins, of_run = np.unique(drawn, axis=0, return_inverse=True)
    messages = plain.reshape(len(plain), -1)
    moves = [apart[of_run == number].mean(axis=0).ravel() for number in range(len(bins))]
    measures = [replay.measured(messages, messages + move) for move in moves]
    mus = np.sqrt(np.mean(np.square(measures), axis=0))
    return Found("epsilon", 0.0, *(_mixed(len(bins), float(mu)) for mu in mus))


def _mixed(bins: int, mu: float) -> float:
    """Epsilon at delta of the mean of likelihood ratios exp(mu g - mu^2 / 2), one for each bin.

    Of two, the one is integrated and the other one's calls and puts have a closed form.
    """
    if bins == 1 or not np.isfinite(mu):
        return float(gdp.epsilon(mu, DELTA))
    assert bins == 2
    normals = np.linspace(-10, 10 + mu, 20_001)
    weights = stats.norm.pdf(normals) * (normals[1] - normals[0])
    half = np.exp(mu * normals - mu**2 / 2) / 2

    def call(strikes: np.ndarray) -> np.ndarray:
        """E (L / 2 - strike)_+ of the other one."""
        paid = np.maximum(strikes, 1e-300)
        distance = np.log(0.5 / paid) / mu
        above = stats.norm.cdf(distance + mu / 2) / 2 - paid * stats.norm.cdf(distance - mu / 2)
        return np.where(strikes > 0, above, 0.5 - strikes)

    def excess(epsilon: float) -> float:
        present = weights @ call(math.exp(epsilon) - half)
        strikes = math.exp(-epsilon) - half
        # A put is a call, less what it is of.
        absent = math.exp(epsilon) * (weights @ (call(strikes) - 0.5 + strikes))
        return max(present, absent) - DELTA

    return float(optimize.brentq(excess, 0.0, float(gdp.epsilon(mu, DELTA)) + 1e-6))


def _composed(rate: float, mu: float, rounds: int) -> float:
    """Epsilon at delta of rounds that move by so many deviations, the record in each by a coin."""
    if not np.isfinite(mu):
        return math.inf
    from dp_accounting.pld import privacy_loss_distribution as pld

    distribution = pld.from_gaussian_mechanism(
        1 / mu, sampling_prob=rate, value_discretization_interval=4e-3
    )
    return float(distribution.self_compose(rounds).get_epsilon_for_delta(DELTA))


# Broken copies: a plan whose run is not what its audit was of.


def _with(result: Any, parts: dict[str, Any] | None = None, **arrays: Any) -> Any:
    """A copy of a plan with other arrays, or parts by name, which nothing audits."""
    other = copy.copy(result)
    other.__dict__.update(parts or {}, arrays={**result.arrays, **arrays})
    return other


def _protecting(result: Any, **fields: Any) -> Any:
    """A copy of a plan that clips otherwise than it says."""
    target = copy.copy(result.target)
    config = copy.copy(result.config)
    changed = copy.copy(result.config.protect)
    changed.__dict__.update(fields)
    config.__dict__["protect"] = changed
    target.__dict__["config"] = config
    return _with(result, {"target": target, "privatizer": result.privatizer})


def _scaled(result: Any, key: float) -> Any:
    names = [name for name in ("factor", "noise_scale", "noise_scales") if name in result.arrays]
    if not names:
        return None
    return _with(result, **{name: result.arrays[name] * np.float32(key) for name in names})


@dataclasses.dataclass(frozen=True)
class _Again(Privatizer):
    """A privatizer whose every round has the noise of the first."""

    inner: Any

    def transformation(self, arrays: Any, key: Any) -> Any:
        link = self.inner.transformation(arrays, key)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return link.update(updates, state, params)[0], state

        return link._replace(update=update)


@dataclasses.dataclass(frozen=True)
class _Alike(Privatizer):
    """A privatizer that gives all agents the first one's noise."""

    inner: Any

    def transformation(self, arrays: Any, key: Any) -> Any:
        link = self.inner.transformation(arrays, key)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            zeros = jax.tree.map(jnp.zeros_like, updates)
            drawn, state = link.update(zeros, state, params)
            noisy = jax.tree.map(lambda leaf, added: leaf + added[:1], updates, drawn)
            return noisy, state

        return link._replace(update=update)


def _noisy(result: Any, wrap: Any) -> Any:
    return _with(result, {"privatizer": wrap(result.privatizer)})


def _over_messages(inner: Any) -> Any:
    return dataclasses.replace(inner, options=(*inner.options[:-1], "messages"))


def _again(result: Any) -> Any:
    """Every round has the first one's noise: seen where what is protected is not in all rounds."""
    return None if result.config.pattern.epochs == ROUNDS else _noisy(result, _Again)


def _unclipped(result: Any) -> Any:
    if result.config.integer_encoded:
        return None  # Longer vectors than the limit count as zero.
    return _protecting(result, clip_norm=math.inf)


def _of_absent(result: Any) -> Any:
    part = result.config.noise
    if isinstance(part, noise.SumShares):
        return _scaled(result, math.sqrt(part.cohort(AGENTS).honest / AGENTS))
    rounds, code = result.privatizer.options
    reduced = dataclasses.replace(code, variance=code.variance * 2 // AGENTS)
    return _noisy(result, lambda inner: dataclasses.replace(inner, options=(rounds, reduced)))


def _redrawn(draw: Callable[[Any, Draw], Draw], why: Any = None) -> Callable[[Any], Any]:
    """Broken copies of samplers: other records than these drew."""

    def broken(result: Any) -> Any:
        if result.config.protect.unit == "agent":
            return None
        if why is not None and not why(result):
            return None
        return _with(result, {"sampler": _Redrawn(result.sampler, draw)})

    return broken


@dataclasses.dataclass(frozen=True)
class _Redrawn:
    """A sampler whose batches are something else than those of the one inside."""

    inner: Any
    other: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self, counts: Any, agents: Any = None) -> None:
        """Everything passes."""

    def draw(self, key: Any, round: Any, counts: Any) -> Draw:
        """The other batch."""
        return self.other(self.inner.draw(key, round, counts))


def _first(drawn: Draw) -> Draw:
    return Draw(jnp.zeros_like(drawn.rows), drawn.padding)


def _unpadded(drawn: Draw) -> Draw:
    return Draw(drawn.rows, jnp.zeros_like(drawn.padding))


def _of_next(result: Any) -> Any:
    scales = result.arrays["noise_scales"]
    return _with(result, noise_scales=np.append(scales[1:], scales[-1] * np.float32(0.8)))


def _twice(result: Any) -> Any:
    return _with(result, step_size=result.arrays["step_size"] * np.float32(2))


def _often(result: Any) -> Any:
    sampler = dataclasses.replace(result.sampler, expected=1.5 * result.config.sampler.expected)
    return _with(result, {"sampler": sampler})


def _of_zero_out(result: Any) -> Any:
    zeroed = result.config.protect.relation.startswith("zero_out")
    return None if zeroed else _scaled(result, 0.5)


def _together(made: Any) -> Any:
    sampler = dataclasses.replace(made.sampler, bins=1)
    return _with(made, {"sampler": sampler})


def _summed(result: Any) -> bool:
    return isinstance(result.config.noise, noise.SumShares | sums.Discrete)


_QUIET = ("noise is 0.8 of what it should be", lambda result: _scaled(result, 0.8))
BROKEN: dict[str, tuple[str, Callable[[Any], Any]]] = dict.fromkeys(noise.DESIGNS, _QUIET) | {
    "DSGD": ("every round has the noise of the first", _again),
    "DiSK": ("nothing is clipped", _unclipped),
    "PMLF": ("nothing is clipped", _unclipped),
    "Average": ("nothing is clipped", _unclipped),
    "ZipDL": ("steps are twice as long", _twice),
    "Federated": (
        "all agents have one key",
        lambda result: None if _summed(result) else _noisy(result, _Alike),
    ),
    "Tracking": ("steps are twice as long", _twice),
    "DPOP": ("nothing is clipped", _unclipped),
    "DGD": ("steps are twice as long", _twice),
    "GradientTracking": ("nothing is clipped", _unclipped),
    "PPDOAGT": ("steps are twice as long", _twice),
    "pairwise": ("all agents have one key", lambda result: _noisy(result, _Alike)),
    "whisper": ("all agents have one key", lambda result: _noisy(result, _Alike)),
    "polynomial": ("all agents have one key", lambda result: _noisy(result, _Alike)),
    "whisper_horizon": ("the factor 2 of replacement is left out", _of_zero_out),
    "prefix_sum": ("the factor 2 of replacement is left out", _of_zero_out),
    "spacetime": ("all agents have one key", lambda result: _noisy(result, _Alike)),
    "banded_inverse": ("the factor 2 of replacement is left out", _of_zero_out),
    "laplace": (
        "clipped in L2, not in L1",
        lambda result: _protecting(result, norm="l2"),
    ),
    "normal": ("every scale is that of the next round", _of_next),
    "aggregate": ("who is absent or colludes is counted on", _of_absent),
    "discrete": ("who is absent or colludes is counted on", _of_absent),
    "zip_dl": (
        "own copies have no noise",
        lambda result: _noisy(result, _over_messages),
    ),
    "Random": (
        "a record is drawn twice",
        _redrawn(_first, lambda result: result.config.sampler.batch_size > 1),
    ),
    "Full": (
        "padding counts as the first record",
        _redrawn(_unpadded, lambda result: max(result.counts) > 1),
    ),
    "Cyclic": ("a record is in every round", _redrawn(_first)),
    "Clients": ("a client is in every round", _redrawn(_first)),
    "Poisson": ("records are drawn half as often again", _often),
    "BallsInBins": ("a record is in all bins", _together),
}
"""A fault of every row, by its name: what it is, and the copy; None where it changes nothing."""


class Broken(NamedTuple):
    """A broken copy of a plan.

    Attributes:
        of: Name of the row whose fault it is; "" for noise that is scaled down.
        fault: What is wrong.
        plan: The copy.
    """

    of: str
    fault: str
    plan: Any


def broken(result: Any, names: list[str]) -> Broken:
    """The first fault of these rows that changes anything."""
    for name in names:
        fault, copied = BROKEN[name]
        if (plan_ := copied(result)) is not None:
            return Broken(name, fault, plan_)
    if (scaled := _scaled(result, 0.8)) is None:  # Whole numbers.
        return broken(result, [result.config.noise.label])
    return Broken("", "noise is 0.8 of what it should be", scaled)


def goals(cell: Cell) -> set[tuple[str, ...]]:
    """What a quick audit wants to have tried, as far as a cell has it."""
    return {
        (cell.method, cell.noise),
        (cell.noise, cell.attacker, cell.gradients),
        (cell.sampler, cell.relation),
        *((name, name) for name in (cell.method, cell.noise, cell.sampler)),
    }


def row(
    cell: Cell, outcome: Any, seeds: int, faults: list[str], *, test: bool = False
) -> dict[str, Any]:
    """The row of a cell that is joined, with the first of these rows' faults that it can have.

    A bound that is loose may hide a small fault: then with the next one.
    """
    if outcome.config.integer_encoded:
        seeds //= 2  # Whole numbers take long to draw.
    result, victim = audited(outcome, range(seeds), test=test)
    while True:
        copied = broken(outcome, faults)
        invalid, _ = audited(copied.plan, range(seeds), after=[victim], reference=outcome)
        faults = faults[faults.index(copied.of) + 1 :] if copied.of in faults else []
        if flagged(invalid) or not faults:
            break
    options: dict[str, Any] = {**cell._asdict(), "unit": result.unit, "stated": result.stated}
    options["measured"] = float(result.measured)
    for name, value in zip(("ratio", "low", "high"), result[2:5], strict=True):
        options[name] = float(value / result.stated)
    if result.tested is not None:
        options["tested"] = result.tested / result.stated
    options |= {"finding": flagged(result), "fault": copied.fault, "fault_of": copied.of}
    options["flagged"] = flagged(invalid)
    options["broken_ratio"] = float(min(invalid.measured / invalid.stated, 1e9))
    return options


# The page, its data files and its figure.


SHOWN = (
    "noise is 0.8 of what it should be",
    "the factor 2 of replacement is left out",
    "all agents have one key",
    "a record is drawn twice",
    "clipped in L2, not in L1",
)
"""Faults that the page itself shows."""
COLOURS = ("#0072B2", "#D55E00")
"""Of the code and of its broken copies: Okabe and Ito's, which colour-blind readers tell apart."""
_INFINITE = 400.0


def tables(rows: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """Headers and lines of the data files by name, from the rows of a record."""
    audits = _of(rows, "audit")
    refused = _of(rows, "refused")
    parts = ("method", "noise", "attacker", "gradients")
    ratios = ("least measured / stated", "largest", "its 95 % interval from", "to")
    return {
        "audit": [
            (*parts, "combinations", "stated", *ratios, "faults found"),
            *(
                (*map(_title, key), len(group), _stated(group), *_range(group), _flags(group))
                for key, group in _grouped(audits, *parts)
            ),
        ],
        "audit_samplers": [
            ("sampler", "relation", "combinations", *ratios, "faults found"),
            *(
                (*key, len(group), *_range(group), _flags(group))
                for key, group in _grouped(audits, "sampler", "relation")
            ),
        ],
        "audit_faults": [
            ("part", "fault", "combinations", "measured / stated"),
            *(
                (_title(name) or "all", fault, len(group), _broken(group))
                for (name, fault), group in _grouped(audits, "fault_of", "fault")
            ),
        ],
        "audit_refused": [
            ("attacker (* with gradients='view')", "refused noise", "of methods"),
            *_refusals(refused),
        ],
        "audit_reasons": [
            ("part", "reason of the plan"),
            *(("; ".join(map(_title, names)), why) for why, names in _reasons(refused).items()),
        ],
    }


def _of(rows: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [item for item in rows if item["what"] == what]


def _title(name: str) -> str:
    """A design's name in tables; other parts are known by their class."""
    return noise.DESIGNS[name].look.label if name in noise.DESIGNS else name


def _refusals(refused: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Attackers, the designs that each of some methods does not join for them, the methods."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name in rows("methods"):
        mine = [e for e in refused if e["method"] == name and e["relation"] == EVERY]
        never = {e["noise"] for e in mine if e["attacker"] == EVERY}
        others = set(rows("noises")) - never
        by_design: dict[str, list[str]] = {}
        for (attacker, gradients), group in _grouped(mine, "attacker", "gradients"):
            designs = {e["noise"] for e in group}
            if attacker != EVERY and designs == others:
                reported = "all others"
            else:
                reported = _names(designs)
            who = attacker + ("*" if gradients == "view" else "")
            by_design.setdefault(reported, []).append(who)
        for designs_, attackers in by_design.items():
            lines.setdefault((", ".join(attackers), designs_), []).append(name)
    return [(*key, ", ".join(methods)) for key, methods in lines.items()]


def _reasons(refused: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Whom a reason is given for, a method or a design, by the reason that the registry has today.

    A record says which part refused; its words may name modules that have moved since.
    """
    results: dict[str, list[str]] = {}
    for case in refused:
        refusal = case["why"]
        refuses = " that is known: " in refusal or " does not join: " in refusal
        if not refuses or case["relation"] != EVERY:
            continue
        if ", which method " in refusal:
            name = case["method"]
            reason = METHODS[name][0].terms.why
        else:
            name = case["noise"]
            reason = noise.DESIGNS[name].terms.why
        names = results.setdefault(reason, [])
        if name not in names:
            names.append(name)
    return results


def marked(rows: list[dict[str, Any]], command: str) -> dict[str, str]:
    """What the page has between its marks, by their names."""
    audits = _of(rows, "audit")
    minimum, maximum, low, high = _range(audits)
    by_fault = {fault: group for (fault,), group in _grouped(audits, "fault")}
    return {
        "summary": _markdown(
            ("combinations", "measured / stated", "95 % interval of the largest", "faults found"),
            [(len(audits), f"{minimum} to {maximum}", f"{low} to {high}", _flags(audits))],
        ),
        "faults": _markdown(
            ("fault", "measured / stated"),
            [(fault, _broken(by_fault[fault])) for fault in SHOWN],
        ),
        "sites": _of_sites(records.read(SITES).to_dict("records")),
        "command": "```bash\n" + command.replace(" --output", " \\\n    --output") + "\n```",
    }


def _of_sites(rows: list[dict[str, Any]]) -> str:
    """What was measured of real sites, a line a design."""
    header = ("noise", "sampler", "outsider", "95 % interval", "neighbour", "faults found")
    lines = []
    for (name, sampler), group in _grouped(rows, "noise", "sampler"):
        outsider, neighbour = (item for item in group if not item["fault"])
        faulty = [item for item in group if item["fault"]]
        interval = f"{outsider['low']:.3f} to {outsider['high']:.3f}"
        numbers = (f"{outsider['ratio']:.3f}", interval, f"{neighbour['ratio']:.3f}")
        found = sum(item["flagged"] is True for item in faulty)
        lines.append((_title(name), sampler, *numbers, f"{found} of {len(faulty)}"))
    return _markdown(header, lines)


def files(stored: list[dict[str, Any]], command: str, page: str) -> dict[Path, str]:
    """The page with what belongs between its marks, and its data files, by path."""
    for name, text in marked(stored, command).items():
        head, mark, rest = page.partition(f"<!-- {name} -->\n")
        assert mark, f"the page has no mark {name}"
        page = f"{head}{mark}\n{text}\n\n{''.join(rest.partition('<!-- end -->')[1:])}"
    results = {PAGE: page}
    for name, lines in tables(stored).items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        results[DATA / f"{name}.csv"] = text.getvalue()
    return results


def points(rows: list[dict[str, Any]]) -> dict[tuple[str, bool], list[float]]:
    """Measured epsilons by noise design, of the code and (True) of its broken copies.

    They are at the plans' delta. Those that differ by less than a hundredth are one.
    """
    results: dict[tuple[str, bool], set[float]] = {}
    for item in _of(rows, "audit"):
        for fault, name in ((False, "ratio"), (True, "broken_ratio")):
            loss = item["stated"] * item[name]
            if loss >= item["stated"] * 1e9:
                measured = math.inf
            elif item["unit"] == "epsilon":
                measured = loss
            else:
                measured = float(gdp.epsilon(loss, DELTA))
            results.setdefault((item["noise"], fault), set()).add(round(measured, 2))
    return {key: sorted(values) for key, values in results.items()}


def figure(rows: list[dict[str, Any]]) -> Any:
    """Measured epsilon of every combination and of its broken copy, a line a design."""
    measured = points(rows)
    names = list(dict.fromkeys(name for name, _ in measured))
    sheet, (ax,) = plots.figure()
    sheet.set_size_inches(6.4, 5.0)
    with plots.style():
        for fault, marker, offset, label in (
            (False, "o", -0.17, "the code"),
            (True, "x", 0.17, "a copy with a fault"),
        ):
            places = [
                (min(epsilon, _INFINITE), line + offset)
                for line, name in enumerate(names)
                for epsilon in measured[name, fault]
            ]
            ax.plot(*zip(*places, strict=True), marker, color=COLOURS[fault], label=label,
                    markersize=3.5, markerfacecolor="none", markeredgewidth=0.9)  # fmt: skip
        ax.axvline(EPSILON, color="#333333", linestyle=":", linewidth=1.1, label="stated")
        ax.set_xscale("log")
        ticks = [4, 8, 16, 32, 64, 128]
        ax.set_xticks([*ticks, _INFINITE], [*map(str, ticks), "infinite"])
        ax.set_xticks([], minor=True)
        ax.set_yticks(range(len(names)), [_title(name) for name in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel("measured epsilon")
    count = len(_of(rows, "audit"))
    plots.finish(sheet, note=(
        f"{count} combinations of method, noise, sampler, attacker and relation, each with a copy "
        f"that has a fault. Stated epsilon {EPSILON:g}, delta 1e-5 (Laplace noise: 0). "
        "Marks of a line that coincide are drawn once."
    ))  # fmt: skip
    return sheet


def _grouped(rows: list[dict[str, Any]], *columns: str) -> Any:
    results: dict[Any, list[Any]] = {}
    for item in rows:
        results.setdefault(tuple(item[column] for column in columns), []).append(item)
    return results.items()


def _stated(group: list[dict[str, Any]]) -> str:
    unit = {"mu of rho": "mu"}.get(group[0]["unit"], group[0]["unit"])
    return f"{unit} {group[0]['stated']:.2f}"


def _range(group: list[dict[str, Any]]) -> tuple[str, ...]:
    """The least ratio, the largest, and the interval of the largest."""
    maximum = max(group, key=lambda value: value["ratio"])
    numbers = [min(case["ratio"] for case in group)]
    numbers += [maximum[name] for name in ("ratio", "low", "high")]
    return tuple(f"{number:.3f}" for number in numbers)


def _broken(group: list[dict[str, Any]]) -> str:
    """What was measured of broken copies, over what is stated."""
    finite = [item["broken_ratio"] for item in group if item["broken_ratio"] < 1e9]
    words = ["infinite"] if len(finite) < len(group) else []
    return ", ".join([*([f"{min(finite):.2f} or more"] if finite else []), *words])


def _flags(group: list[dict[str, Any]]) -> str:
    return f"{sum(item['flagged'] for item in group)} of {len(group)}"


def _names(value: Any) -> str:
    names = set(value)
    entries = rows("noises")
    if len(names) == len(entries):
        return "all"
    few = [name for name in entries if name in names]
    if len(names) > len(entries) / 2:
        left = [_title(name) for name in entries if name not in names]
        return f"all but {'; '.join(left)}"
    return "; ".join(map(_title, few))


def _markdown(header: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    entries = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in entries)


def _compile_fast() -> None:
    """Compile with few optimisations: most of the time of small runs is LLVM's."""
    if version("jaxlib").startswith("0.10."):  # Other releases need not know the flag.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()
    jax.config.update("jax_disable_most_optimizations", True)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--quick", action="store_true", help="fewer cells and seeds")
    bench.parser.add_argument("--seeds", type=int, help="runs of a cell")
    bench.parser.add_argument("--all", action="store_true", help="every sampler with every method")
    bench.parser.add_argument("--page", action="store_true", help="write the page, data and figure")
    options = bench.parse(argv)
    if options.page:
        about = records.read_metadata(RECORD)
        stored = records.read(RECORD).to_dict("records")
        page = PAGE.read_text(encoding="utf-8")
        for path, text in files(stored, about["command"], page).items():
            path.write_text(text, encoding="utf-8")
        return int(plots.save(figure(stored), FIGURE) != FIGURE)
    seeds = options.seeds or (4_096 if options.quick else 10_000)
    if options.quick:
        _compile_fast()
    if absent := missing():
        raise SystemExit(f"no audit of {', '.join(absent)}; add it to {__file__}")
    done: set[tuple[str, ...]] = set()
    display: set[str] = set()

    def wanted(cell: Cell) -> bool:
        if options.quick:
            return not goals(cell) <= done
        natural = "Clients" if cell.relation.endswith("client") else "Random"
        single = cell.method in ("DSGD", "Federated") and cell.attacker in (
            "outsider",
            "aggregator",
        )
        return options.all or cell.sampler == natural or single

    for cell, result, why in cells(wanted):
        if result is None:
            bench.row(what="refused", **cell._asdict(), why=why)
            continue
        done |= goals(cell)
        turn = len(bench.rows) % 3
        names = [cell.noise, cell.method, cell.sampler]
        names = names[turn:] + names[:turn]
        names.sort(key=lambda name: name in display)
        if options.quick and names[0] in display:
            names = []  # What is scaled alone runs without another compilation.
        entries = row(cell, result, seeds, names, test=not options.quick)
        display.add(entries["fault_of"])
        bench.row(what="audit", **entries)
    audits = [item for item in bench.rows if item["what"] == "audit"]
    findings = [audit for audit in audits if audit["finding"] or not audit["flagged"]]
    print(f"{len(audits)} audits, {len(findings)} of them findings")
    return bench.finish() or bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
