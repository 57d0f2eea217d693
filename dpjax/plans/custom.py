"""What a plan tries of parts of a user's own: draws of samplers and noise, and stated losses.

A custom part is its author's word. These trials are no proof: they find mistakes in a few draws,
and losses below what follows from the noise alone. Nobody loses less than an outsider who sees all
noisy sums, and what that one gains follows from the factor.
"""

import contextlib
import functools
import math
from collections import Counter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dpjax import _validate
from dpjax._numerics import THREEFRY
from dpjax.accounting import precision
from dpjax.accounting.budget import AgentLoss
from dpjax.accounting.loss import KINDS, AmplifiedLoss, Loss, draw_sensitivity
from dpjax.plans import compatibility
from dpjax.protocols import Draw

__all__ = ()

# `Target` or `Calibrated` of `dpjax.plans.calibration`, which imports this module.
_Part: TypeAlias = Any

# Records of all agents in the rounds that a key draws, and keys: two of them may well draw the same
# few records.
_RECORDS = 50_000
_KEYS = 4

_key = functools.partial(jax.random.key, impl=THREEFRY)


def check_sampler(target: _Part) -> int:
    """Refuse a sampler of a user's own that does not draw as it says, in a few rounds.

    Some keys draw for the plan's numbers of records, and for as few as a batch holds, among which
    draws with replacement meet. What passes drew distinct rows in a round, all of them there, and
    what is protected in rounds of the pattern alone; an amplified one drew other batches by other
    keys. That holds of these rounds and keys: a trial is no proof.

    Args:
        target: The config on its network.

    Returns:
        In how many of the rounds a record came, of those that came most often.

    Raises:
        ValueError: Naming the sampler, what it drew or says, and the remedy.
    """
    sampler = target.sampler
    name = f"sampler is {_validate.shown(sampler)}"
    _validate.one_of("sampler.key_of", sampler.key_of, ("round", "run"))
    draw = jax.jit(sampler.draw)
    few = np.ones(target.agents, np.int32)
    with compatibility.called(sampler, "sampler.divisor or draw"):
        _validate.positive("sampler.divisor", sampler.divisor)
        batch = jax.eval_shape(draw, _key(0), 0, few)
    if not isinstance(batch, Draw) or batch.rows.dtype.kind not in "iu":
        raise ValueError(
            f"{name}, whose draw returns {batch}; return a protocols.Draw of whole numbers"
        )
    few *= batch.rows.shape[1]
    limit = few if target.counts is None else target.counts
    probes = []
    # A sampler says itself which numbers it can draw from.
    with contextlib.suppress(ValueError):
        sampler.check(few)
        probes.append(np.minimum(few, limit))
    if target.counts is not None:
        probes.append(limit)
    most = limit.max()
    rounds = min(target.rounds, 2 + _RECORDS // (most * len(limit)))
    pattern = target.pattern
    span = pattern.epochs * pattern.separation
    # Record r is of client r mod M.
    units = pattern.separation if target.protect.unit == "client" else most
    batches = set[object]()
    times = Counter[object]()
    for counts in probes:
        # The plan's own numbers are the last.
        batches.clear()
        times.clear()
        first = dict[object, int]()
        for seed, turn in np.ndindex(_KEYS, rounds):
            number = turn if sampler.key_of == "round" else 0
            key = jax.random.fold_in(_key(seed), number)
            with compatibility.called(sampler, "sampler.draw (rows and padding alike)"):
                rows, padding = draw(key, turn, counts)
                masked = np.ma.array(rows, mask=False if padding is None else padding)
            batches.add((turn, masked.filled(-1).tobytes()))
            for agent, places in enumerate(masked):
                drawn = places.compressed().tolist()
                records = {row for row in drawn if 0 <= row < limit[agent]}
                times.update((seed, agent, row) for row in records)
                since = [
                    turn - first.setdefault((seed, agent, row % units), turn) for row in records
                ]
                off = any(gap % pattern.separation or gap >= span for gap in since)
                if off or len(records) < len(drawn):
                    raise ValueError(
                        f"{name}, which draws rows {_validate.shown(drawn)} of agent {agent} in "
                        f"round {turn}; draw distinct rows, from 0 to below {limit[agent]}, by the "
                        f"pattern {pattern}"
                    )
    if target.amplification is not None and len(batches) == rounds:
        raise ValueError(
            f"{name}, whose batches are the same by {_KEYS} keys, which amplifies nothing; draw "
            "them by the key, or return None from amplification"
        )
    return max(times.values(), default=0)


def check_amplified(target: _Part, noise: _Part, loss: Any, times: int) -> None:
    """Refuse an amplified loss of a user's own that contradicts itself, or the noise.

    Whatever hides the batches, noise over agents says how far one draw of a record moves the
    messages: s sqrt([R^-1]_ii) of agent i. Whoever knows the batches of fresh noise has mu of at
    least that times sqrt(m) where a record came m times. So both hold of any right loss, and so
    does that its epsilons fall with delta. All else is the author's word.

    Args:
        target: The config on its network.
        noise: The noise as it will run.
        loss: What the guarantee states.
        times: m, what `check_sampler` returned.

    Raises:
        ValueError: Naming the loss, what it states, and the remedy.
    """
    distance = draw_sensitivity(target, noise.strategy) * np.sqrt(noise.inverse_diagonal())
    # Columns of a strategy differ, and a record may have missed the largest.
    known = distance.min() * times**0.5 if noise.strategy is None else 0.0
    delta = target.budget.delta
    first, second, last = [loss.epsilon(share * delta) for share in (0.1, 0.5, 1.0)]
    refusals = {
        f"draw_ratios is {loss.draw_ratios}, and one draw moves messages by {distance}; give "
        "accounting.loss.draw_ratios(target, noise)": not np.all(loss.draw_ratios >= distance),
        f"unamplified is {loss.unamplified}, and {known} of a record that came {times} times; give "
        "the mu of known batches": not loss.unamplified >= known,
        f"epsilon is {first}, {second} and {last} at deltas that rise to {delta}; give finite "
        "numbers from 0 that fall": not np.inf > first >= second >= last >= 0,
        f"kind is {loss.kind!r}, as which records read another class; give it a kind of its own": (
            KINDS.get(loss.kind) is not type(loss)
        ),
        f"rounds is {loss.rounds}; give {target.rounds}": loss.rounds != target.rounds,
    }
    _validate.refuse({f"loss is {loss}, whose {why}": wrong for why, wrong in refusals.items()})


def check_noise_draws(target: _Part, noise: _Part) -> None:
    """Refuse noise of a user's own that is not what its factor says, or comes again.

    A payload of zeros gets its noise by two keys in two rounds, and again by the first key. In the
    first round its covariance over agents is that of the factor F, F F' / C[0, 0]^2 under a
    strategy C. What passes is no proof: uniform numbers of this covariance do.

    Args:
        target: The config on its network.
        noise: The noise as it will run.

    Raises:
        ValueError: Naming the noise, what it drew, and the remedy.
    """
    method = target.method
    privatizer = noise.privatizer(target)
    arrays = {"mixing": target.mixing, **noise.arrays}
    # A million numbers of all agents, in which a thousand agents still show half the scale.
    entries = method.min_entries + math.ceil(1_000_000 / target.agents)
    payload = method.payload({"w": jnp.zeros((target.agents, entries), "f4")})
    flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])

    def draw(seed: int) -> np.ndarray:
        added = optax.with_extra_args_support(privatizer.transformation(arrays, _key(seed)))
        state = added.init(payload)
        rounds = []
        for _ in range(min(2, target.rounds)):
            # A round's public key is the same for all secret ones.
            noisy, state = added.update(payload, state, key=_key(0))
            rounds.append(flat(noisy))
        return np.array(rounds)

    first, other, again = map(draw, (1, 2, 1))
    drawn = np.concatenate([first, other])
    # One program may round the same normals in two ways.
    sample = drawn[..., :2]
    repeated = np.isclose(sample[:, None], sample).all((2, 3)).sum() > len(drawn)
    # Integers code another unit.
    coded = privatizer.opened is not None
    fits = coded or drawn[0].shape == flat(payload).shape
    wrong = repeated or not (fits and np.allclose(first, again) and np.isfinite(drawn).all())
    factor = noise.factor
    # Noise on links is of no agent.
    if not (wrong or coded or factor is None) and len(first[0]) == len(factor) <= 1_000:
        wide = np.diag(factor) if factor.ndim == 1 else factor
        covariance = wide @ wide.T / (1 if noise.strategy is None else noise.strategy[0, 0] ** 2)
        size = np.sqrt(covariance.diagonal())
        gaps = np.abs(np.cov(first[0]) - covariance)
        # Of m entries an element of the sample's covariance has a deviation of sqrt(2 / m) at most,
        # in units of the agents' deviations. Nine of these are .2 at m = 4,096, which right noise
        # exceeds with a probability of 2 exp(-m (.2 - ln 1.2) / 2) < 1e-15 an element.
        wrong |= (gaps > 13 * first.shape[2] ** -0.5 * np.outer(size, size)).any()
    if wrong:
        raise ValueError(
            f"noise is {_validate.shown(target.config.noise)}, which by two keys in two rounds "
            f"draws {_validate.shown(sample[:, 0].tolist())} and so on. Draw finite noise of the "
            "payload's shape by the key and the count of rounds alone: other numbers in each round "
            "and by each key, and the same ones again. Where it states a factor F, give it the "
            "covariance F F' over agents (over C[0, 0]^2 in round 0 of a strategy C)"
        )


def check_stated_loss(target: _Part, noise: _Part, loss: Loss, spent: AgentLoss | None) -> None:
    """Refuse a loss that a custom design states below an outsider's to its own factor F.

    An outsider who sees all noisy sums gains mu_i = s sqrt(k [(F F')^-1]_ii) of agent i, and any
    attacker under gradients "any" as much of those who are not its own. Whoever sees the sum over
    agents alone gains s sqrt(k / 1' F F' 1).

    Args:
        target: The config on its network.
        noise: Noise of a user's own class, or of a design of a user's own.
        loss: What it states.
        spent: The same of every agent; None for an amplified loss.

    Raises:
        ValueError: Naming the design, the agent, both losses and the formula.
    """
    part = target.config.noise
    protect = target.protect
    factor = noise.factor
    strategy = noise.strategy
    if strategy is not None and noise.spends_evenly(target):
        raise ValueError(
            f"noise is {type(noise).__name__}, whose spends_evenly() is True beside a strategy: "
            "what t rounds of correlated noise spend is no share t / T; return strategy is None"
        )
    # Under "view" an attacker gains less, and noise without one map has no formula.
    if protect.gradients == "view" or factor is None:
        return
    moved = protect.sensitivity
    if isinstance(loss, AmplifiedLoss):
        stated = np.asarray(loss.draw_ratios)
        moved *= target.single_draw_sensitivity(strategy)
    elif spent is not None and spent.kind == "gdp":
        stated = spent.size
        moved *= np.sqrt(target.squared_sensitivity(strategy))
    else:
        return
    sum_only = getattr(part, "sum_only", False) or protect.attacker == "aggregator"
    deviations = np.broadcast_to(_deviations(factor, sum_only), target.agents)
    covered = stated * deviations
    # Attackers lose nothing to themselves.
    covered[list(protect.nodes or ())] = np.inf
    worst = int(np.argmin(covered))
    if covered[worst] >= moved:
        return
    design = type(noise if compatibility.packaged(type(part)) else part).__name__
    formula = "s sqrt(k / 1' F F' 1)" if sum_only else "s sqrt(k [(F F')^-1]_ii)"
    mu = np.broadcast_to(stated, target.agents)[worst]
    raise ValueError(
        f"noise is {design}, which states mu {mu:.4g} for agent {worst}. By its own "
        f"factor F an outsider gains {moved / deviations[worst]:.4g}: state at least {formula}, "
        "s = target.protect.sensitivity (twice the clip norm where data are replaced) and "
        "k = target.squared_sensitivity(strategy), its strategy or None"
    )


def _deviations(factor: np.ndarray, sum_only: bool) -> np.ndarray:
    """Upper bounds on the deviations of noise in what an outsider sees of agents.

    Of agent i that is message i less what the others' messages say of its noise, -P_ij / P_ii of
    message j, with P = (F F')^-1: their deviation is 1 / sqrt(P_ii). Any other combination bounds
    it, too. A factor of tables is rounded to float32, by its entries, which counts by agent. Of the
    sum over agents it is one number.

    Args:
        factor: [n, q] F, or a diagonal [n].
        sum_only: Whether it sees the sum over agents alone.

    Raises:
        ValueError: For noise that some combination of the messages has (almost) none of.
    """
    rounding = np.finfo(np.float32).eps
    wide = factor.astype(np.float64)
    if sum_only:
        matrix = np.diag(wide) if wide.ndim == 1 else wide
        lost = np.linalg.norm(np.abs(matrix).sum(axis=0))
        return np.asarray(np.linalg.norm(matrix.sum(axis=0)) + rounding * lost)
    if wide.ndim == 1:
        return np.abs(wide) * (1 + rounding)
    # Refuses a singular one, whose weights would be rounding alone.
    inverse = precision.inverse(wide @ wide.T)
    weights = inverse / np.diag(inverse)[:, None]
    deviations = np.linalg.norm(weights @ wide, axis=1)
    lost = np.linalg.norm(np.abs(weights) @ np.abs(wide), axis=1)
    return deviations + rounding * lost
