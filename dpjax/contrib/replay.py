"""Sensitivity as it is met: a rule is run, and its messages replayed on a neighbouring problem.

A rule says what every agent would send (before its noise) and what it makes of the noisy messages
of a round. `moved` runs it on one problem, keeps the noisy messages, runs it again on the other
with these messages in place of its own, and compares what would have been sent. That is what
sensitivity means; the largest move over pairs of problems and messages is bounded in
`dpjax.contrib.moves`, and one pair alone is no guarantee.

`DescentRule` is the paper's gradient descent with its two choices: an agent's own state in the
average, and the point of its gradient, each noisy or true. Methods of the package are replayed by
`dpjax.contrib.trace.empirical_sensitivity`.

`measured` needs no rule: it takes the messages of two runs with the same noise, from whatever code
made them, and says how well the best linear test tells the two data sets apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float
from scipy import special

from dpjax import _validate

__all__ = ["DescentRule", "Measured", "Replayable", "measured", "moved"]

_Gradient = Callable[[np.ndarray], np.ndarray]
"""[n, p] points to [n, p] gradients, one agent's cost a row."""

_State = tuple[np.ndarray, ...]

# Messages are float32: what is smaller than these is their rounding.
_BARE = 1e-5
_LEFT = 1e-3
_FLAT = 1e-9


class Replayable(Protocol):
    """What agents send, and what they make of it; states are tuples of arrays."""

    def first(self, gradient: _Gradient) -> _State:
        """Return the state before the first message."""

    def sent(self, state: _State) -> np.ndarray:
        """Return [n, P, p]: the P variables that each agent sends, before the noise."""

    def after(self, state: _State, step: int, noisy: np.ndarray, gradient: _Gradient) -> _State:
        """Return the state after a round whose noisy messages are ``shown``, [n, P, p]."""


def moved(
    rule: Replayable, gradient: _Gradient, neighbour: _Gradient, noise: Any
) -> Float[np.ndarray, "T n P"]:
    """Return the L1 move of every agent's every message, the messages before it replayed.

    Args:
        rule: What agents do.
        gradient: Gradients of the problem on which the messages are recorded.
        neighbour: Those of the other problem.
        noise: [T, n, P, p] what was added to the messages.

    Returns:
        [T, n, P] of messages 1 to T; 0 for agents that the change does not reach.

    Raises:
        ValueError: For noise that does not fit the rule's messages.

    Reference:
        Xie, Liu and Chai, Definition 3.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import replay
        >>> rule = replay.DescentRule(np.ones((1, 1)), [0.5, 0.25, 0.125], start=np.zeros((1, 1)))
        >>> distance = replay.moved(rule, lambda x: x, lambda x: x + 1, np.zeros((3, 1, 1, 1)))
        >>> distance[:, 0, 0].tolist()
        [0.0, 0.5, 0.25]
    """
    noise = _validate.finite_array("noise", noise, ndim=4)
    state = rule.first(gradient)
    other = rule.first(neighbour)
    distances = []
    for k, added in enumerate(noise):
        messages = rule.sent(state)
        neighbours = rule.sent(other)
        if messages.shape != added.shape:
            raise ValueError(
                f"noise has shape {noise.shape}; give [T, {', '.join(map(str, messages.shape))}]"
            )
        distances.append(np.abs(messages - neighbours).sum(axis=-1))
        noisy = messages + added
        state = rule.after(state, k, noisy, gradient)
        other = rule.after(other, k, noisy, neighbour)
    return np.stack(distances)


@dataclass(frozen=True, eq=False)
class DescentRule:
    """Private decentralised gradient descent, x+ = W z - alpha grad F(z), and its variants.

    Attributes:
        mixing: [n, n] W.
        step_sizes: [T] alpha_k.
        start: [n, p] x(0).
        own_state: Which state of its own an agent averages: "noisy", (45), or "true", (47).
        point: Where it takes its gradient: at the "noisy" state, (45), or at the "true" one, (48).

    Reference:
        Xie, Liu and Chai, proof of Proposition 1.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import replay
        >>> mixing, steps, start = np.full((2, 2), 0.5), [1.0, 1.0, 1.0], np.zeros((2, 1))
        >>> rule = replay.DescentRule(mixing, steps, start, own_state="true")
        >>> shift, noise = np.array([[1.0], [0.0]]), np.zeros((3, 2, 1, 1))
        >>> distance = replay.moved(rule, lambda x: 0 * x, lambda x: 0 * x + shift, noise)
        >>> distance[:, :, 0].tolist()
        [[0.0, 0.0], [1.0, 0.0], [1.5, 0.0]]
    """

    mixing: Any
    step_sizes: Any
    start: Any
    own_state: Literal["noisy", "true"] = "noisy"
    point: Literal["noisy", "true"] = "noisy"

    def __post_init__(self) -> None:
        """Refuse choices that there are not."""
        _validate.one_of("own_state", self.own_state, ("noisy", "true"))
        _validate.one_of("point", self.point, ("noisy", "true"))

    def first(self, gradient: _Gradient) -> _State:
        """The public start."""
        return (np.array(self.start, np.float64),)

    def sent(self, state: _State) -> np.ndarray:
        """The models."""
        return state[0][:, None]

    def after(self, state: _State, step: int, noisy: np.ndarray, gradient: _Gradient) -> _State:
        """A round."""
        (x,) = state
        z = noisy[:, 0]
        w = np.asarray(self.mixing, np.float64)
        mixed = w @ z
        if self.own_state == "true":
            mixed = mixed + np.diag(w)[:, None] * (x - z)
        evaluated = z if self.point == "noisy" else x
        return (mixed - self.step_sizes[step] * gradient(evaluated),)


class Measured(NamedTuple):
    """The loss of one pair of neighbours, measured.

    Attributes:
        mu: How far apart the two data sets are, in standard deviations of the best linear test.
        low: Lower end of the interval for it.
        high: Upper end.

    Example:
        >>> from dpjax.contrib.replay import Measured
        >>> Measured(mu=0.5, low=0.49, high=0.51).low
        0.49
    """

    mu: float
    low: float
    high: float


def _flat(name: str, messages: Any) -> np.ndarray:
    """A row of numbers for each run."""
    array = _validate.finite_array(name, messages)
    return array.reshape(len(array), -1).astype(np.float64)


def measured(messages: Any, neighbours: Any, *, confidence: float = 0.95) -> Measured:
    """Return the Gaussian-DP mu of one pair of neighbours, from messages that were recorded.

    Both runs of a seed have the same noise, so that their messages differ by what the data move
    alone, d. With S the covariance of the messages over seeds, mu^2 = d' S^-1 d: the whitened
    difference, the best linear test, and the best test of all for Gaussian noise whose size does
    not depend on the data. Where d leads out of what the noise reaches, mu is infinite.

    Guarantee: none. It is a lower bound on the loss, of this pair and this attacker: another pair
    may lose more. The interval is exact for Gaussian messages that are independent over seeds:
    d' S^-1 d is then mu^2 over a chi-square variable (Muirhead, Theorem 3.2.12).

    Args:
        messages: [S, ...] all that the attacker sees and knows, one run a seed, noise included.
        neighbours: [S, ...] the same of the neighbouring data, with the same noise.
        confidence: Of the interval.

    Returns:
        The loss and its interval.

    Raises:
        ValueError: For fewer runs than four times the numbers of one, arrays of other shapes, or
            differences that depend on the noise by more than a fiftieth: gradients that react to
            noise need replayed messages (`dpjax.contrib.trace.empirical_sensitivity`).

    Reference:
        Dong, Roth and Su (2022), Gaussian differential privacy, for mu.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import replay
        >>> noise = np.random.default_rng(0).normal(size=(20_000, 2))
        >>> distance = replay.measured(2 * noise, 2 * noise + [1.0, 0.0])
        >>> distance.low < 0.5 < distance.high, round(distance.mu, 2)
        (True, 0.5)
    """
    share = _validate.probability("confidence", confidence)
    trial = _flat("messages", messages)
    other = _flat("neighbours", neighbours)
    runs, size = trial.shape
    if other.shape != trial.shape:
        raise ValueError(
            f"neighbours has {other.shape} numbers, messages {trial.shape}; record the same runs"
        )
    if runs < 4 * size:
        raise ValueError(
            f"messages has {runs} runs of {size} numbers; give {4 * size} runs at least"
        )
    differences = other - trial
    d = differences.mean(axis=0)
    if np.sqrt(((differences - d) ** 2).sum(axis=1).mean()) > 0.02 * np.linalg.norm(d):
        raise ValueError(
            "neighbours differs from messages by amounts that depend on the noise; give gradients "
            "that do not react to it, or replay the messages (contrib.trace.empirical_sensitivity)"
        )
    if not d.any():
        return Measured(0.0, 0.0, 0.0)
    centred = trial - trial.mean(axis=0)
    spread = centred.std(axis=0)
    # Entries in units of their own noise; those that have none are told apart at once.
    bare = spread <= _BARE * (np.abs(trial).max(axis=0) + np.abs(d))
    if (np.abs(d[bare]) > _BARE * np.abs(d).max()).any():
        return Measured(np.inf, np.inf, np.inf)
    scaled = centred[:, ~bare] / spread[~bare]
    d = d[~bare] / spread[~bare]
    values, vectors = np.linalg.eigh(scaled.T @ scaled / runs)
    strong = values > _FLAT * values[-1]
    along = vectors.T @ d
    if np.linalg.norm(along[~strong]) > _LEFT * np.linalg.norm(d):
        return Measured(np.inf, np.inf, np.inf)
    signal = along[strong] ** 2 / values[strong]
    squared = float(np.sum(signal)) / runs
    # What is left of the runs, after as many means were taken, measures the variance.
    free = runs - strong.sum()
    tails = np.array([0.5, (1 - share) / 2, (1 + share) / 2])
    mu, low, high = np.sqrt(squared * 2 * special.gammaincinv(free / 2, tails))
    return Measured(float(mu), float(low), float(high))
