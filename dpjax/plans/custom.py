"""What a plan tries of parts of a user's own: draws of samplers and noise, and stated losses.

A custom part is its author's word. These trials are no proof: they find mistakes in a few draws,
and losses below what follows from the noise alone. Nobody loses less than an outsider who sees all
noisy sums, and what that one gains follows from the factor.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from dpjax import _validate
from dpjax._numerics import THREEFRY
from dpjax.accounting import precision
from dpjax.accounting.budget import AgentLoss
from dpjax.accounting.loss import AmplifiedLoss, Loss, draw_sensitivity
from dpjax.plans import compatibility
from dpjax.protocols import Draw

__all__ = ()

# Records of all agents in the rounds that a key draws, and most records; keys, since two of them
# may well draw the same few records.
_RECORDS = 200_000
_MOST_RECORDS = 1_000_000
_KEYS = 4


def check_sampler(target: Any) -> int:
    """Refuse a sampler of a user's own that draws otherwise than it says, in a few rounds.

    Some keys draw for the plan's numbers of records, and for as few as a batch holds, among which
    draws with replacement meet. What passes drew distinct rows in a round, all of them there, and
    what is protected in rounds of the pattern alone; an amplified one drew other batches by other
    keys. That holds of these rounds and keys: a trial is no proof. Nothing is drawn from more than
    a million records.

    Args:
        target: The config on its network.

    Returns:
        In how many of the rounds a record came, of those that came most often.

    Raises:
        ValueError: Naming the sampler, what it drew or says, and the remedy.
    """
    sampler = target.sampler
    name = f"sampler is {_validate.shown(sampler)}"
    _validate.positive("sampler.divisor", sampler.divisor)
    key = jax.random.key(0, impl=THREEFRY)
    few = np.ones(target.agents, np.int32)
    draw = jax.eval_shape(sampler.draw, key, np.int32(0), few)
    if not isinstance(draw, Draw) or draw.rows.dtype.kind != "i":
        raise ValueError(f"{name}, whose draw returns {draw}; return a Draw of whole numbers")
    few *= draw.rows.shape[1]
    limit = few if target.counts is None else target.counts
    # A number that no record has, for all that is drawn beyond them.
    beyond = limit.max()
    if beyond * len(limit) > _MOST_RECORDS:
        return 0
    few = np.minimum(few, limit)
    probes = [limit]
    # A sampler says itself which numbers it can draw from.
    try:
        sampler.check(few)
        probes.insert(0, few)
    except ValueError:
        probes = probes[target.counts is None :]
    rounds = np.arange(min(target.rounds, 2 + _RECORDS // (beyond * len(limit))))
    keys = jax.random.split(key, (_KEYS, len(rounds)))
    if sampler.key_of == "run":
        keys = jnp.broadcast_to(keys[:, :1], keys.shape)
    of_rounds = jax.vmap(sampler.draw, (0, 0, None))
    draws = jax.jit(jax.vmap(of_rounds, (0, None, None)))
    unit = target.protect.unit
    pattern = target.pattern
    most = 0
    for counts in probes:
        rows, padding = draws(keys, rounds, counts)
        padding = np.broadcast_to(False if padding is None else padding, rows.shape)
        *places, _ = present = np.nonzero(~padding)
        # Negative numbers turn into large ones.
        drawn = np.minimum(np.uint32(rows[present]), beyond)
        times = np.zeros((*rows.shape[:3], beyond + 1), int)
        np.add.at(times, (*places, drawn), 1)
        came = np.zeros_like(times)
        # Record r is of client r mod M.
        came[(*places, drawn % pattern.separation if unit == "client" else drawn)] = 1
        since = rounds[:, None, None] - came.argmax(1)[:, None]
        off = (since % pattern.separation > 0) | (since >= pattern.epochs * pattern.separation)
        faults = {
            "row {}, which has no record; draw from 0 to below counts": times
            * (np.arange(beyond + 1) >= limit[:, None]),
            "row {} twice; draw distinct rows, as each place is clipped alone": times > 1,
            f"{unit} {{}}, against its pattern {pattern}; draw by the pattern": came * off,
        }
        for text, fault in faults.items():
            for _, round, agent, number in np.argwhere(fault)[:1]:
                drew = text.format(number)
                raise ValueError(f"{name}, which draws of agent {agent} in round {round} {drew}")
        most = int(times.sum(1).max())
    if most and target.amplification is not None and (times == times[0]).all():
        raise ValueError(
            f"{name}, whose batches are the same by {_KEYS} keys, which amplifies nothing; draw "
            "them by the key, or return None from amplification"
        )
    return most


def check_amplified(target: Any, noise: Any, loss: Any, times: int) -> None:
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
    name = f"loss is {_validate.shown(loss)}"
    moved = draw_sensitivity(target, noise.strategy) * np.sqrt(noise.inverse_diagonal())
    # Columns of a strategy differ, and a record may have missed the largest.
    known = moved.min() * times**0.5 if noise.strategy is None else 0.0
    for field, least in {"draw_ratios": moved, "unamplified": known}.items():
        value = getattr(loss, field)
        if not np.all(value >= least):
            raise ValueError(
                f"{name}, whose {field} is {value}, and the noise alone gives {least}; state as "
                "much, by accounting.loss.draw_ratios"
            )
    delta = target.budget.delta
    first, second, third = [loss.epsilon(share * delta) for share in (0.1, 0.5, 1.0)]
    if loss.rounds != target.rounds or not np.inf > first >= second >= third >= 0:
        raise ValueError(
            f"{name} of {loss.rounds} rounds, with epsilons {first}, {second} and {third} at "
            f"deltas up to {delta}; state the run's {target.rounds} rounds, and numbers that fall"
        )


def check_noise(target: Any, noise: Any) -> None:
    """Refuse noise of a user's own that is not finite, or the same by other keys or in two rounds.

    A small payload of zeros gets its noise by two keys in two rounds, and again by the first key.
    What passes is no proof.

    Args:
        target: The config on its network, of a dense mixing matrix.
        noise: The noise as it will run.

    Raises:
        ValueError: Naming the noise, what it drew, and the remedy.
    """
    method = target.method
    privatizer = noise.privatizer(target)
    arrays = {"mixing": np.float32(target.mixing), **noise.arrays}
    payload = method.payload({"w": jnp.zeros((target.agents, 1 + method.min_entries), "f4")})
    public = jax.random.key(0, impl=THREEFRY)

    def draw(seed: Array) -> Array:
        key = jax.random.key(seed, impl=THREEFRY)
        link = optax.with_extra_args_support(privatizer.transformation(arrays, key))
        state = link.init(payload)
        rounds = []
        for _ in range(min(2, target.rounds)):
            noisy, state = link.update(payload, state, key=public)
            rounds.append(ravel_pytree(noisy)[0])
        return jnp.stack(rounds)

    # A function of its own is traced anew, and numbers from elsewhere than the key are others.
    trials = [np.asarray(jax.jit(lambda seed: draw(seed))(seed)) for seed in (1, 2, 1)]
    drawn = np.concatenate(trials[:2])
    faults = {
        "of another size than the payload": privatizer.opened is None
        and drawn[0].shape != ravel_pytree(payload)[0].shape,
        "that is not finite": not np.isfinite(drawn).all(),
        # One program may round the same normals in two ways.
        "that is the same by two keys, or in two rounds": (
            np.isclose(drawn[:, None], drawn).all(2).sum() > len(drawn)
        ),
        "that is another one by the same key": not np.allclose(trials[0], trials[2]),
    }
    for text, fault in faults.items():
        if fault:
            raise ValueError(
                f"noise is {_validate.shown(target.config.noise)}, which draws noise {text}; draw "
                "it by the key and the count of rounds alone"
            )


def check_stated_loss(target: Any, noise: Any, loss: Loss, spent: AgentLoss) -> None:
    """Refuse a loss that a custom design states below an outsider's to its own factor F.

    An outsider who sees all noisy sums gains mu_i = s sqrt(k [(F F')^-1]_ii) of agent i, and any
    attacker under gradients "any" as much of those who are not its own. Whoever sees the sum over
    agents alone gains s sqrt(k / 1' F F' 1).

    Args:
        target: The config on its network.
        noise: Noise of a user's own class, or of a design of a user's own.
        loss: What it states.
        spent: The same of every agent.

    Raises:
        ValueError: Naming the design, the agent, both losses and the formula.
    """
    part = target.config.noise
    protect = target.protect
    factor = noise.factor
    strategy = noise.strategy
    if strategy is not None and noise.white(target):
        raise ValueError(
            f"noise is {type(noise).__name__}, whose white() is True beside a strategy: what t "
            "rounds of correlated noise spend is no share t / T; return strategy is None"
        )
    # Under "view" an attacker gains less, and noise without one map has no formula.
    if protect.gradients == "view" or factor is None:
        return
    moved = protect.sensitivity
    if isinstance(loss, AmplifiedLoss):
        stated = np.asarray(loss.draw_ratios)
        moved *= target.single_draw_sensitivity(strategy)
    elif spent.kind == "gdp":
        stated = spent.size
        moved *= np.sqrt(target.over_rounds(strategy))
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
        "k = target.over_rounds(strategy), its strategy or None"
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
    # Refuses a singular one: its weights would be rounding alone.
    precision.inverse_diagonal(wide @ wide.T)
    sizes = np.linalg.norm(wide, axis=1)
    scaled = wide / sizes[:, None]
    # Agents of other sizes are scaled alike, so that no weight of a small one is lost.
    inverse = np.linalg.inv(scaled @ scaled.T)
    weights = inverse / np.diag(inverse)[:, None]
    deviations = np.linalg.norm(weights @ scaled, axis=1)
    lost = np.linalg.norm(np.abs(weights) @ np.abs(scaled), axis=1)
    return sizes * (deviations + rounding * lost)
