"""The attacker of a linear algorithm as a Kalman filter, in square-root form.

    state      s_t+1 = F s_t + Gamma g_t + Sigma w_t        s_0 = 0 (public), w_t ~ N(0, I)
    observed   y_t   = H s_t + J g_t + D w_t

g_t [n] are the agents' gradients of round t in one coordinate. A change of the gradients moves
the whitened innovations; its Gaussian-DP loss is the norm of that move. The recursion costs
O(s^3) a round where the dense pseudo-inverse costs O((n T)^3) in all.

Forward, the error's factor P^1/2 by QR; backward, a triangle that holds what all later rounds see
of the state error. Between them they give every round's whitened response to unit gradients, and
its inner products with the responses b, 2 b, ... rounds before.

A rank cutoff is a privacy parameter: a direction of the innovations that is dropped lowers the
loss. The covariance is therefore never formed, only its factor [H P^1/2, D]; every row of it is
brought to units of its own noise, or of that noise's rounding where this is more, so that no
scale of a message, a state or an agent decides. Where the singular values leave no clear gap the
result says so (`Energies.ambiguous`, `Energies.hidden`); callers then decide ranks exactly
(`dpjax.accounting.dense.confirmed`) or state the loss of a strictly larger view.

Rounding is estimated, not bounded: to first order, and errors of different rounds and rows add up
as if they were independent. That no loss comes out too small is tested against exact arithmetic
on random views (tests/accounting/test_scales.py), and not proven.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from dpjax import _validate
from dpjax._numerics import double_precision, one_lapack_thread
from dpjax.accounting.arrays import Flags, Indices, Matrix, Numbers, Vector
from dpjax.accounting.rounding import UNIT
from dpjax.mechanism.participation import Participation

__all__ = ["pattern_sums"]

# Singular values above this, of rows in units of their own noise, are certainly there.
CERTAIN = 1e-6
# Those below this may be rounding alone; between the two it is open.
DROPPED = 1e-9
# Rounding that a row may carry in units of its own noise; where it is more, it is the unit.
_SHARP = 1e-11
# Relative rounding of the whitened innovations beyond which a loss is open.
_EXACT = 1e-9
TRACE = 1e-300
_LEAST = 1e-150  # Its square is no zero.
# A response of this share of its terms where no noise is: the loss is infinite.
LEAK = 1e-6
# Relative rounding of a loss from which on it is stated.
_SHOWN = 1e-9
# Largest state for which one thread is faster.
_SMALL = 400
# Bytes of working memory.
_LARGEST = 6 * 2**30

_Periodic = Float[Any, "p i j"]
_Products = Float[np.ndarray, "t k n"]


class Model(NamedTuple):
    """A linear-Gaussian model; every array is constant or has a leading axis, its period.

    Attributes:
        transition: [P, s, s] F.
        gradient: [P, s, n] Gamma.
        noise: [P, s, q] Sigma.
        state_output: [P, m, s] H.
        gradient_output: [P, m, n] J.
        noise_output: [P, m, q] D.
    """

    transition: _Periodic
    gradient: _Periodic
    noise: _Periodic
    state_output: _Periodic
    gradient_output: _Periodic
    noise_output: _Periodic

    def at(self, t: int | Array) -> "Model":
        """Matrices of round t, without the period."""
        return Model(*(part[t % part.shape[0]] for part in self))

    @classmethod
    def of(cls, *parts: ArrayLike) -> "Model":
        """Check six matrices, each [.., ..] or with a leading period.

        Raises:
            ValueError: Naming the matrix whose shape or entries do not fit.
        """
        names = ("F", "Gamma", "Sigma", "H", "J", "D")
        arrays = []
        for name, part in zip(names, parts, strict=True):
            array = np.asarray(part)
            if array.size:
                array = _validate.finite_array(name, part)
            if array.ndim not in (2, 3):
                raise ValueError(f"{name} has shape {array.shape}; give a matrix, or [P, ., .]")
            arrays.append(np.array(array, float, ndmin=3))
        s = arrays[0].shape[2]
        n = arrays[1].shape[2]
        q = arrays[2].shape[2]
        m = arrays[3].shape[1]
        shapes = ((s, s), (s, n), (s, q), (m, s), (m, n), (m, q))
        for name, array, shape in zip(names, arrays, shapes, strict=True):
            if array.shape[1:] != shape:
                raise ValueError(
                    f"{name} has shape {array.shape[1:]}, the others ask for {shape} (state {s}, "
                    f"agents {n}, noise {q}, observed {m}); give matrices that fit"
                )
        return cls(*arrays)


ModelMaker: TypeAlias = Callable[[], Model]


class _Step(NamedTuple):
    """One round of the filter.

    Attributes:
        closed: [s, s] F - K H, how the state error goes on.
        gain: [s, m] K times the inverse of `whiten`, by whitened innovation.
        whiten: [m, m] S^-1/2, rows of zeros where there is no noise.
        bare: [m, m] combinations without noise, else rows of zeros.
        rate: Relative rounding of the whitened innovations.
    """

    closed: Array
    gain: Array
    whiten: Array
    bare: Array
    rate: Array


class _Doubt(NamedTuple):
    """What a round leaves open.

    Attributes:
        ambiguous: True where a singular value or its rounding leaves the loss open.
        rank: Directions kept.
        hidden: True where a combination of noisy rows counts as one without noise.
    """

    ambiguous: Array
    rank: Array
    hidden: Array


_Swept = tuple[Array, Array, Array, _Doubt]
_Arrays = tuple[Array, Array]


def _norms(rows: Array) -> Array:
    """Norms of rows that neither vanish nor overflow where the entries do not."""
    largest = abs(rows).max(axis=1, initial=0.0)
    unit = jnp.where(largest > 0, largest, 1.0)
    norms = unit * jnp.sqrt(((rows / unit[:, None]) ** 2).sum(axis=1))
    # A product, which keeps nan.
    return norms * (largest > 0).astype(norms.dtype)


def _filter_step(model: Model, carry: _Arrays, t: Array) -> tuple[_Arrays, tuple[_Step, _Doubt]]:
    """One round: the error's factor, and an estimate of the rounding of its rows.

    The estimate is of first order, and takes the errors that meet in a row for independent.
    """
    root, rounding = carry
    here = model.at(t)
    observed = jnp.concatenate([here.state_output @ root, here.noise_output], axis=1)
    moved = jnp.concatenate([here.transition @ root, here.noise], axis=1)
    width = _norms(root)
    norms = _norms(observed)
    blur = abs(here.state_output) @ (rounding + UNIT * width) + UNIT * norms
    # A row without any noise is told from one whose noise is rounding.
    silent = (norms == 0) & (blur == 0)
    unit = jnp.where(silent, 1.0, jnp.maximum(norms, blur / _SHARP))
    scaled = observed / unit[:, None]
    short = observed.shape[0] - observed.shape[1]
    if short > 0:
        # So that U below is square.
        columns = ((0, 0), (0, short))
        scaled = jnp.pad(scaled, columns)
        moved = jnp.pad(moved, columns)
    u, values, v = jnp.linalg.svd(scaled, full_matrices=False)
    nonzero = values > DROPPED
    smallest = jnp.where(nonzero, values, values[0]).min()
    relative_blur = (blur / unit).max()
    uncertain = nonzero.any() & (smallest < CERTAIN)
    ambiguous = uncertain | (relative_blur > _EXACT * smallest)
    rank = nonzero.sum()
    hidden = rank + silent.sum() < len(values)
    v = jnp.where(nonzero[:, None], v, 0.0)
    # Projected twice: the rest is orthogonal to the innovations to rounding.
    gain = moved @ v.T
    rest = moved - gain @ v
    again = rest @ v.T
    rest = rest - again @ v
    gain = gain + again
    # R' is not unique in sign, which nothing depends on.
    root = jnp.linalg.qr(rest.T, mode="r").T
    inverse = jnp.where(nonzero, 1.0 / jnp.where(nonzero, values, 1.0), 0.0)
    whiten = inverse[:, None] * u.T / unit
    closed = here.transition - gain @ (whiten @ here.state_output)
    combinations = jnp.where(nonzero[:, None], 0.0, u.T) / unit
    silent_rows = jnp.diag(silent.astype(unit.dtype))
    bare = jnp.where(hidden, combinations, silent_rows)
    fresh = abs(here.transition) @ width + _norms(here.noise) + _norms(gain * inverse)
    # Added as independent: sizes alone would grow without bound where the filter forgets.
    rounding = jnp.sqrt(closed**2 @ rounding**2) + 4 * UNIT * fresh
    doubt = _Doubt(ambiguous, rank, hidden)
    rate = 8 * UNIT + jnp.where(rank > 0, relative_blur / smallest, 0)
    return (root, rounding), (_Step(closed, gain, whiten, bare, rate), doubt)


def _tail_step(closed: Array, tail: Array, observed: Array) -> Array:
    """Factor of what rounds from t on hold of the state error before round t."""
    return jnp.linalg.qr(jnp.concatenate([observed, tail @ closed]), mode="r")


def _response(here: Model, step: _Step, tail: Array) -> _Arrays:
    """Whitened response [m + s, n] to unit gradients of the round, and the error after it."""
    direct = step.whiten @ here.gradient_output
    entering = here.gradient - step.gain @ direct
    return jnp.concatenate([direct, tail @ entering]), entering


def _blurred(here: Model, step: _Step, tail: Array, error: Array, entering: Array) -> _Arrays:
    """Rounding [s] of the columns of the tail before a round, and [n] of the round's responses.

    A response may be a difference of far larger terms: what counts is the size of these.
    """
    sizes = Model(*map(abs, here))
    whiten, gain, later = map(abs, (step.whiten, step.gain, tail))
    reached = whiten @ sizes.gradient_output
    from_state = whiten @ sizes.state_output
    terms = _norms(reached.T) + _norms((later @ (sizes.gradient + gain @ reached)).T)
    response = step.rate * terms + error @ abs(entering)
    moved = sizes.transition + gain @ from_state
    # Added as independent, as above.
    carried = jnp.sqrt(error**2 @ step.closed**2)
    blur = step.rate * (_norms(from_state.T) + _norms((later @ moved).T))
    # Compared so that nan stays: compilers may drop it from a maximum.
    response = jnp.where(response < _LEAST, _LEAST, response)
    return carried + blur, jnp.where(terms == 0, 0.0, response)


class _Silence(NamedTuple):
    """What later rounds see without noise of the state error before a round.

    Attributes:
        tail: [s, s] its factor.
        terms: [s] sum of the sizes of all terms that it is made of, cancelled or not.
    """

    tail: Array
    terms: Array


def _silence(
    here: Model, step: _Step, silence: _Silence, entering: Array, hidden: Array
) -> tuple[_Silence, Array]:
    """One round backwards, and the response without noise over what its terms add up to."""
    sizes = Model(*map(abs, here))
    whiten, gain, bare = map(abs, (step.whiten, step.gain, step.bare))
    reached = whiten @ sizes.gradient_output
    direct = abs(step.bare @ here.gradient_output)
    terms = bare @ sizes.gradient_output
    # A hidden combination holds traces of rows that it has nothing to do with.
    terms = jnp.where(hidden, jnp.maximum(terms, reached.max(0)), terms)
    after = jnp.where(hidden, 0.0, abs(silence.tail @ entering).max(0))
    later = silence.terms @ (sizes.gradient + gain @ reached)
    responses = jnp.vstack([direct, after])
    sums = jnp.vstack([terms, later])
    share = responses / jnp.where(sums > 0, sums, 1.0)
    leak = jnp.where(sums == 0, 0.0, jnp.where(share < TRACE, TRACE, share))
    leak = jnp.where(jnp.isnan(leak), jnp.inf, leak).max(0)
    moved = sizes.transition + gain @ (whiten @ sizes.state_output)
    tail = _tail_step(step.closed, silence.tail, step.bare @ here.state_output)
    size_terms = (bare @ sizes.state_output).sum(0) + silence.terms @ moved
    return _Silence(tail, size_terms), leak


def _sweep(model: Model, rounds: int, keep: bool) -> tuple[_Swept, Any]:
    """Forward filter, backward factors; own energies, the rounding of their roots and leaks, and
    what lagged energies need.
    """
    size, n = model.gradient.shape[1:]
    times = jnp.arange(rounds)
    nothing = jnp.zeros((size, size))
    silent_terms = jnp.zeros(size)
    start = nothing, silent_terms
    _, (steps, doubts) = jax.lax.scan(functools.partial(_filter_step, model), start, times)
    hidden = doubts.hidden.any()

    def backwards(carry: Any, item: tuple[_Step, Array]) -> Any:
        tail, silence, error = carry
        step, t = item
        here = model.at(t)
        response, entering = _response(here, step, tail)
        # Nothing is seen without noise, as a rule, and nothing follows from it.
        seen_terms = abs(jnp.hstack([here.state_output, here.gradient_output]))
        silent = abs(step.bare) @ seen_terms
        shows = (silent != 0).any() | (silence.terms != 0).any() | hidden
        silence, leak = jax.lax.cond(
            shows,
            lambda: _silence(here, step, silence, entering, hidden),
            lambda: (silence, jnp.zeros(n)),
        )
        error, blur = _blurred(here, step, tail, error, entering)
        new_tail = _tail_step(step.closed, tail, step.whiten @ here.state_output)
        # Lagged energies alone need the factors, which take s^2 numbers a round.
        stored = tail if keep else jnp.zeros((0, 0))
        energy = (response**2).sum(0)
        return (new_tail, silence, error), (energy, blur, leak, stored)

    # A triangle of s rows holds any number of rounds.
    last = nothing, _Silence(nothing, silent_terms), silent_terms
    _, (diagonal, blurs, leaks, tails) = jax.lax.scan(backwards, last, (steps, times), reverse=True)
    doubt = _Doubt(doubts.ambiguous.any(), doubts.rank, hidden)
    return (diagonal, blurs, leaks.max(0), doubt), (steps, tails) if keep else None


def _lagged(
    model: Model, steps: _Step, tails: Array, windows: Array, epochs: int, separation: int
) -> Array:
    """Inner products [T, k - 1, n] of every round with rounds b, 2 b, ... before it."""
    rounds, size = tails.shape[:2]
    n = model.gradient.shape[-1]

    def of_class(first: Array) -> Array:
        """Rounds first, first + b, ..., each with its k - 1 predecessors."""

        def visit(carry: Array, j: Array) -> _Arrays:
            t = jnp.minimum(first + j * separation, rounds - 1)
            step = jax.tree.map(lambda leaf: leaf[t], steps)
            here = model.at(t)
            tail = tails[t]
            response, entering = _response(here, step, tail)
            later = jnp.concatenate([step.whiten @ here.state_output, tail @ step.closed])
            # Columns of the carry: error before round t of gradients in t - b, t - 2 b, ...
            products = jnp.einsum("jon,on->jn", jnp.einsum("os,jsn->jon", later, carry), response)
            # On to round t + b: the newest gradient enters, the oldest leaves.
            window = windows[jnp.minimum(t, windows.shape[0] - 1)]
            older = jnp.einsum("sr,jrn->jsn", window @ step.closed, carry[:-1])
            return jnp.concatenate([(window @ entering)[None], older]), products

        start = jnp.zeros((epochs - 1, size, n))
        return jax.lax.scan(visit, start, jnp.arange(-(-rounds // separation)))[1]

    products = jax.lax.map(of_class, jnp.arange(separation))  # [b, J, k - 1, n]
    return jnp.swapaxes(products, 0, 1).reshape(-1, epochs - 1, n)[:rounds]


def _windows(closed: Array, length: int) -> Array:
    """Products of ``length`` consecutive matrices, by doubling: entry t is A_t+length .. A_t+1."""
    rounds, size = closed.shape[:2]

    def behind(stack: Array, shift: int) -> Array:
        """Entry t + shift; the last one past the end, where nothing is read."""
        return stack[jnp.minimum(jnp.arange(rounds) + shift, rounds - 1)]

    identity = jnp.eye(size)
    power = jnp.concatenate([closed[1:], identity[None]])
    span = 1
    result = jnp.broadcast_to(identity, (rounds, size, size))
    done = 0
    while length:
        if length & 1:
            result = behind(power, done) @ result
            done = done + span
        length >>= 1
        if length:
            power = behind(power, span) @ power
            span = 2 * span
    return result


@functools.partial(jax.jit, static_argnames=("rounds", "epochs", "separation"))
def _sweeps(model: Model, rounds: int, epochs: int, separation: int) -> _Swept:
    """Values, rounding, leaks and doubts of a model."""
    (values, blur, leak, doubt), rest = _sweep(model, rounds, epochs > 1)
    values = values[:, None]
    if epochs > 1:
        steps, tails = rest
        skipped = _windows(steps.closed, separation - 1)
        others = _lagged(model, steps, tails, skipped, epochs, separation)
        values = jnp.concatenate([values, others], axis=1)
    return values, blur, leak, doubt


class Energies(NamedTuple):
    """What an attacker's innovations hold of unit gradients.

    Attributes:
        values: [T, k, n] inner products of the responses to unit gradients of agent u in rounds
            t and t - j b (0 where there is none), by (t, j, u).
        leak: [n] largest response of agent u where there is no noise, over what its terms add up
            to: 0 where there are none, at least `LEAK` where it is certain, open in between.
        ambiguous: True where a singular value is neither rounding nor certainly there, or rounding
            is too large.
        rank: [T] directions of every round that carry noise; None where nothing is hidden.
        hidden: True where a combination of noisy rows was taken for one without noise, which
            rounding alone cannot tell.
        rounding: [T, k, n] how far ``values`` are from those of exact arithmetic; None where they
            are exact.
        condition: Largest ratio of kept singular values, of rows in units of their own noise;
            the filter does not say it.
    """

    values: _Products
    leak: Vector
    ambiguous: bool
    rank: Indices | None = None
    hidden: bool = False
    rounding: _Products | None = None
    condition: float = 1.0


def whitened_energies(model: Model, participation: Participation) -> Energies:
    """Inner products of the whitened responses to unit gradients.

    Args:
        model: What the attacker does not know, and what it sees.
        participation: Which rounds go together.

    Returns:
        The energies; `pattern_sums` makes the sensitivity of them.

    Raises:
        ValueError: For a model whose working memory would exceed 6 GiB.

    Reference:
        Kalman filter in array form; the recursion replaces the pseudo-inverse of "Unified Privacy
        Guarantees for Decentralized Learning via Matrix Factorization", eq. (8).
    """
    rounds, epochs, separation = dataclasses.astuple(participation)
    s, n = model.gradient.shape[1:]
    m = model.state_output.shape[1]
    numbers = rounds * (s * s + s * m + 2 * m * m) + 8 * (s + m) * (s + n)
    numbers += n * (4 * epochs * (s + m) + 2 * rounds * epochs)
    if epochs > 1:
        # Tails, windows, and two more while these are made.
        numbers += rounds * s * s * (1 if separation == 1 else 4)
    filter_text = f"a filter of {s} states, {m} observed rows and {n} agents"
    _validate.memory("rounds", rounds, filter_text, numbers, maximum=_LARGEST)
    one_thread = jax.default_backend() == "cpu" and s <= _SMALL
    with double_precision(), one_lapack_thread() if one_thread else contextlib.nullcontext():
        parts = Model(*(jnp.asarray(part, jnp.float64) for part in model))
        values, blur, leak, doubt = jax.tree.map(
            np.asarray, _sweeps(parts, rounds, epochs, separation)
        )
    margin = rounding(values, blur, participation)
    hidden = bool(doubt.hidden)
    rank = doubt.rank if hidden else None
    return Energies(values, leak, bool(doubt.ambiguous), rank, hidden, margin)


def rounding(
    values: _Products,
    blur: Matrix,
    participation: Participation,
) -> _Products:
    """Return how far inner products are from those of the exact responses.

    Args:
        values: [T, k, n] inner products.
        blur: [T, n] rounding of each response, in its norm.
        participation: The one they were made for.

    Returns:
        [T, k, n] by the inequality of Cauchy and Schwarz.
    """
    norms = np.sqrt(values[:, 0])
    margin = np.zeros_like(values)
    for lag in range(participation.epochs):
        step = lag * participation.separation
        late = slice(step, None)
        early = slice(None, len(blur) - step)
        of_late = blur[late] * (norms[early] + blur[early])
        margin[late, lag] = of_late + norms[late] * blur[early]
    return margin


def pattern_sums(values: _Products, participation: Participation) -> Vector:
    """Largest sum over a pattern of |inner products|, a bound on the squared sensitivity.

    Exact where they are non-negative, and for one participation.

    Args:
        values: [T, k, n] from `whitened_energies`.
        participation: The one they were made for.

    Returns:
        [n] squared bound of each agent at clip 1 and noise 1.

    Example:
        >>> import numpy as np
        >>> from dpjax.accounting import kalman
        >>> from dpjax.mechanism.participation import Participation
        >>> values = np.array([[[1.0]], [[0.5]], [[2.0]]])  # three rounds, one lag, one agent
        >>> kalman.pattern_sums(values, Participation(3, 1, 3)).tolist()
        [2.0]
    """
    return _largest(abs(values), participation)


def _largest(values: _Products, participation: Participation) -> Numbers:
    """Largest sum over a pattern's pairs of rounds."""
    weights = np.where(np.arange(participation.epochs) == 0, 1.0, 2.0)[:, None]
    # Of the j-th appearance only the lags up to j lie in the pattern.
    partial = (values * weights).cumsum(axis=1)
    sums = partial[participation.patterns, np.arange(participation.epochs)[None]].sum(axis=1)
    return np.asarray(sums.max(axis=0))


def squares(energies_: Energies, participation: Participation) -> tuple[Vector, Flags]:
    """Squared sensitivities with all that rounding may have hidden.

    Args:
        energies_: From `whitened_energies`.
        participation: The one they were made for.

    Returns:
        [n] `pattern_sums`, never below those of exact arithmetic, and [n] True where rounding is
        more than `_SHOWN` of a loss, or where entries below 0 leave open how much of the sum of
        sizes gradients can reach.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rounding = 0.0 if energies_.rounding is None else energies_.rounding
        bounds = pattern_sums(abs(energies_.values) + rounding, participation)
        return bounds, bounds > _largest(energies_.values, participation) * (1 + _SHOWN) ** 2


def clear(energies_: Energies) -> Flags:
    """Return which agents' energies are exact.

    Args:
        energies_: From `whitened_energies`.

    Returns:
        [n] True where no singular value is open and no response without noise may be rounding.
    """
    return ((energies_.leak == 0) | (energies_.leak >= LEAK)) & (
        not (energies_.ambiguous or energies_.hidden)
    )
