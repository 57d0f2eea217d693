"""The attacker of a linear algorithm as a Kalman filter, in square-root form.

    state      s_t+1 = F s_t + Gamma g_t + Sigma w_t        s_0 = 0 (public), w_t ~ N(0, I)
    observed   y_t   = H s_t + J g_t + D w_t

g_t [n] are the agents' gradients of round t in one coordinate. A change of the gradients moves
the whitened innovations; its Gaussian-DP loss is the norm of that move. The recursion costs
O(s^3) a round where the dense pseudo-inverse costs O((n T)^3) in all.

A rank cutoff is a privacy parameter: a direction of the innovations that is dropped lowers the
loss. The covariance is therefore never formed, only its factor [H P^1/2, D]; every row of it is
brought to units of its own noise, or of that noise's rounding where this is more, so that no
scale of a message, a state or an agent decides. Where the singular values leave no clear gap the
result says so (`Energies.ambiguous`, `Energies.hidden`); callers then decide ranks exactly
(`dpjax.accounting.exact`) or state the loss of a strictly larger view.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dpjax.accounting import kalman
from dpjax.accounting.kalman import Model
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.x64 import double_precision

__all__ = ["pattern_sums"]

LEAK = 1e-6
"""A response of this share of its terms where no noise is: the loss is infinite."""
SHOWN = 1e-9
"""Relative rounding of a loss from which on it is told."""
SMALL = 400
"""Largest state for which one thread is faster."""
LARGEST = 6 * 2**30
"""Bytes of working memory."""
TOGETHER = {"cpu": 1}
"""Most models in one vmapped pass, by backend; 64 elsewhere. A CPU's batched QR gains nothing."""


class Energies(NamedTuple):
    """What an attacker's innovations hold of unit gradients.

    Attributes:
        values: [T, k, n] inner products of the responses to unit gradients of agent u in rounds
            t and t - j b (0 where there is none), by (t, j, u).
        leak: [n] largest response of agent u where there is no noise, over what its terms add up
            to: 0 where there are none, at least `LEAK` where it is certain, open in between.
        ambiguous: True where a singular value is neither rounding nor certainly there, or rounding
            is too large.
        condition: Largest ratio of kept singular values, of rows in units of their own noise.
        rank: [T] directions of every round that carry noise; None where nothing is hidden.
        hidden: True where a combination of noisy rows was taken for one without noise, which
            rounding alone cannot tell.
        rounding: [T, k, n] how far ``values`` are from those of exact arithmetic; None where they
            are exact.
    """

    values: Float[np.ndarray, "t k n"]
    leak: Float[np.ndarray, " n"]
    ambiguous: bool
    condition: float
    rank: Int[np.ndarray, " t"] | None = None
    hidden: bool = False
    rounding: Float[np.ndarray, "t k n"] | None = None


def energies(model: Model, participation: Participation) -> Energies:
    """Inner products of the whitened responses to unit gradients.

    Args:
        model: What the attacker does not know, and what it sees.
        participation: Which rounds go together.

    Returns:
        The energies; `pattern_sums` makes the sensitivity of them.

    Raises:
        ValueError: For a model whose working memory would exceed `LARGEST` bytes; victims are
            taken in batches to keep below it.

    Reference:
        Kalman filter in array form; the recursion replaces the pseudo-inverse of "Unified Privacy
        Guarantees for Decentralized Learning via Matrix Factorization", eq. (8).
    """
    rounds, epochs = participation.rounds, participation.epochs
    n, batch = model.gradient.shape[-1], _batch(model, participation)
    with double_precision(), _threads(model):
        parts = Model(*(jnp.asarray(part, jnp.float64) for part in model))
        (own, blur, leak, doubt), rest = kalman.sweep(parts, rounds, epochs > 1)
        values = np.asarray(own)[:, None]
        if epochs > 1:
            steps, tails = rest
            windows = kalman.windows(steps.closed, participation.separation - 1)
            columns = []
            for first in range(0, n, batch):
                # Padded, so that one compilation serves all batches.
                chosen = np.minimum(np.arange(first, first + batch), n - 1)
                some = parts._replace(
                    gradient=parts.gradient[:, :, chosen],
                    gradient_seen=parts.gradient_seen[:, :, chosen],
                )
                columns.append(
                    np.asarray(
                        kalman.lagged(some, steps, tails, windows, epochs, participation.separation)
                    )
                )
            values = np.concatenate([values, np.concatenate(columns, axis=2)[:, :, :n]], axis=1)
        return _energies(values, blur, leak, doubt, participation)


def energies_of_each(models: Sequence[Model], participation: Participation) -> list[Energies]:
    """`energies` of many models, vmapped over those of equal shapes, as many as `LARGEST` holds.

    Args:
        models: State-space models.
        participation: Which rounds a record takes part in.

    Returns:
        The energies of each, in order.

    Raises:
        ValueError: As `energies`.
    """
    groups: dict[Any, list[int]] = {}
    for index, model in enumerate(models):
        groups.setdefault(tuple(part.shape for part in model), []).append(index)
    by_index: dict[int, Energies] = {}
    for members in groups.values():
        fixed, each = _numbers(models[members[0]], participation)
        whole = fixed + each * models[members[0]].gradient.shape[-1]
        together = int(min(TOGETHER.get(jax.default_backend(), 64), LARGEST / 8 // whole))
        if together < 2 or len(members) < 2:
            by_index |= {index: energies(models[index], participation) for index in members}
            continue
        for first in range(0, len(members), together):
            chosen = members[first : first + together]
            # Padded, so that one compilation serves all.
            padded = chosen + chosen[-1:] * (min(together, len(members)) - len(chosen))
            with double_precision(), _threads(models[members[0]]):
                stacked = Model(
                    *(
                        jnp.asarray(np.stack(parts), jnp.float64)
                        for parts in zip(*(models[index] for index in padded), strict=True)
                    )
                )
                arrays = kalman.each(
                    stacked, participation.rounds, participation.epochs, participation.separation
                )
                values, blur, leak, doubt = jax.tree.map(np.asarray, arrays)
            for place, index in enumerate(chosen):
                one = jax.tree.map(lambda leaf, at=place: leaf[at], doubt)
                parts_ = values[place], blur[place], leak[place], one
                by_index[index] = _energies(*parts_, participation)
    return [by_index[index] for index in range(len(models))]


def _energies(
    values: Any, blur: Any, leak: Any, doubt: Any, participation: Participation
) -> Energies:
    hidden = bool(doubt.hidden)
    rank = np.asarray(doubt.rank) if hidden else None
    ambiguous, condition = bool(doubt.ambiguous), float(doubt.condition)
    values, leak = np.asarray(values), np.asarray(leak)
    room = rounding(values, np.asarray(blur), participation)
    return Energies(values, leak, ambiguous, condition, rank, hidden, room)


def rounding(
    values: Float[np.ndarray, "t k n"],
    blur: Float[np.ndarray, "t n"],
    participation: Participation,
) -> Float[np.ndarray, "t k n"]:
    """Return how far inner products are from those of the exact responses.

    Args:
        values: [T, k, n] inner products.
        blur: [T, n] rounding of each response, in its norm.
        participation: The one they were made for.

    Returns:
        [T, k, n] by the inequality of Cauchy and Schwarz.
    """
    norms, room = np.sqrt(values[:, 0]), np.zeros_like(values)
    for lag in range(participation.epochs):
        step = lag * participation.separation
        late, early = slice(step, None), slice(None, len(blur) - step)
        room[late, lag] = blur[late] * (norms[early] + blur[early]) + norms[late] * blur[early]
    return room


@functools.cache
def _pools() -> Any:
    import scipy.linalg  # Its LAPACK is the one that JAX calls: to be found, it must be there.
    import threadpoolctl

    del scipy
    return threadpoolctl.ThreadpoolController()


def _threads(model: Model) -> Any:
    """One LAPACK thread for small states: more gain nothing, and wait for each other if busy."""
    if jax.default_backend() != "cpu" or model.gradient.shape[1] > SMALL:
        return contextlib.nullcontext()
    return _pools().limit(limits=1, user_api="blas")


def _batch(model: Model, participation: Participation) -> int:
    """Victims a pass, so that `LARGEST` holds; ValueError when not even one fits."""
    fixed, each = _numbers(model, participation)
    left = LARGEST / 8 - fixed
    if left < each:
        raise ValueError(
            f"participation has {participation.rounds} rounds, with a state of "
            f"{model.gradient.shape[1]} and {model.state_seen.shape[1]} observed rows: "
            f"{8 * (fixed + each) / 2**30:.1f} GiB; account fewer rounds, or a strategy of fewer "
            "bands"
        )
    return int(min(model.gradient.shape[-1], max(1, left // each)))


def _numbers(model: Model, participation: Participation) -> tuple[float, float]:
    """Float64 numbers of working memory: for the filter, and for each victim."""
    s, n, m = model.gradient.shape[1], model.gradient.shape[2], model.state_seen.shape[1]
    rounds, epochs = participation.rounds, participation.epochs
    fixed = rounds * (s * s + s * m + 2 * m * m) + 8 * (s + m) * (s + n)
    if epochs > 1:
        # Tails, windows, and two more while these are made.
        fixed += rounds * s * s * (1 if participation.separation == 1 else 4)
    return fixed, 4 * epochs * (s + m) + 2 * rounds * epochs


def pattern_sums(
    values: Float[np.ndarray, "t k n"], participation: Participation
) -> Float[np.ndarray, " n"]:
    """Largest sum over a pattern of |inner products|, a bound on the squared sensitivity.

    Exact where they are non-negative, and for one participation.

    Args:
        values: [T, k, n] from `energies`.
        participation: The one they were made for.

    Returns:
        [n] squared bound of each agent at clip 1 and noise 1.
    """
    absolute = np.abs(values)
    weights = np.where(np.arange(participation.epochs) == 0, 1.0, 2.0)[:, None]
    # Of the j-th appearance only the lags up to j lie in the pattern.
    partial = np.cumsum(absolute * weights, axis=1)
    rounds = participation.patterns
    sums = partial[rounds, np.arange(participation.epochs)[None]].sum(axis=1)
    return np.asarray(sums.max(axis=0))


def squares(
    of: Energies, participation: Participation
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Squared sensitivities with all that rounding may have hidden.

    Args:
        of: From `energies`.
        participation: The one they were made for.

    Returns:
        [n] `pattern_sums`, never below those of exact arithmetic, and [n] True where rounding is
        more than `SHOWN` of a loss.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        plain = pattern_sums(of.values, participation)
        if of.rounding is None:
            return plain, np.zeros(len(plain), bool)
        whole = pattern_sums(np.abs(of.values) + of.rounding, participation)
        return whole, whole > plain * (1 + SHOWN) ** 2


def clear(of: Energies) -> Bool[np.ndarray, " n"]:
    """Return which agents' energies are exact.

    Args:
        of: From `energies`.

    Returns:
        [n] True where no singular value is open and no response without noise may be rounding.
    """
    settled = (of.leak == 0) | (of.leak >= LEAK)
    return settled & (not (of.ambiguous or of.hidden))
