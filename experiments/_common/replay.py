"""Sensitivity as it is met: a rule is run, and its messages replayed on a neighbouring problem.

A rule says what every agent would send (before its noise) and what it makes of the noisy messages
of a round. `moved` runs it on one problem, keeps the noisy messages, runs it again on the other
with these messages in place of its own, and compares what would have been sent. That is what
sensitivity means; the largest move over pairs of problems and messages is bounded in
`_common.moves`, and one pair alone is no guarantee.

`DescentRule` is the paper's gradient descent with its two choices: an agent's own state in the
average, and the point of its gradient, each noisy or true. Methods of the package are replayed by
`dpjax.engine.trace.empirical_sensitivity`.

`dpjax.accounting.replay.measured` needs no rule: it takes messages that were recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float

from dpjax import _validate

__all__ = ["DescentRule", "Replayable", "moved"]

Gradient = Callable[[np.ndarray], np.ndarray]
"""[n, p] points to [n, p] gradients, one agent's cost a row."""

State = tuple[np.ndarray, ...]


class Replayable(Protocol):
    """What agents send, and what they make of it; states are tuples of arrays."""

    def first(self, gradient: Gradient) -> State:
        """Return the state before the first message."""

    def sent(self, state: State) -> np.ndarray:
        """Return [n, P, p]: the P variables that each agent sends, before the noise."""

    def after(self, state: State, step: int, shown: np.ndarray, gradient: Gradient) -> State:
        """Return the state after a round whose noisy messages are ``shown``, [n, P, p]."""


def moved(
    rule: Replayable, gradient: Gradient, neighbour: Gradient, noise: Any
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
        >>> from _common import replay
        >>> rule = replay.DescentRule(np.ones((1, 1)), [0.5, 0.25, 0.125], start=np.zeros((1, 1)))
        >>> found = replay.moved(rule, lambda x: x, lambda x: x + 1, np.zeros((3, 1, 1, 1)))
        >>> found[:, 0, 0].tolist()
        [0.0, 0.5, 0.25]
    """
    noise = _validate.finite_array("noise", noise, ndim=4)
    one, other = rule.first(gradient), rule.first(neighbour)
    found = []
    for k, added in enumerate(noise):
        here, there = rule.sent(one), rule.sent(other)
        if here.shape != added.shape:
            raise ValueError(
                f"noise has shape {noise.shape}; give [T, {', '.join(map(str, here.shape))}]"
            )
        found.append(np.abs(here - there).sum(axis=-1))
        shown = here + added
        one, other = rule.after(one, k, shown, gradient), rule.after(other, k, shown, neighbour)
    return np.stack(found)


@dataclass(frozen=True, eq=False)
class DescentRule:
    """Private decentralised gradient descent, x+ = W z - alpha grad F(z), and its variants.

    Attributes:
        mixing: [n, n] W.
        step_sizes: [T] alpha_k.
        start: [n, p] x(0).
        own: Which state of its own an agent averages: "noisy", (45), or "true", (47).
        point: Where it takes its gradient: at the "noisy" state, (45), or at the "true" one, (48).

    Reference:
        Xie, Liu and Chai, proof of Proposition 1.

    Example:
        >>> import numpy as np
        >>> from _common import replay
        >>> mixing, steps, start = np.full((2, 2), 0.5), [1.0, 1.0, 1.0], np.zeros((2, 1))
        >>> rule = replay.DescentRule(mixing, steps, start, own="true")
        >>> shift, noise = np.array([[1.0], [0.0]]), np.zeros((3, 2, 1, 1))
        >>> found = replay.moved(rule, lambda x: 0 * x, lambda x: 0 * x + shift, noise)
        >>> found[:, :, 0].tolist()
        [[0.0, 0.0], [1.0, 0.0], [1.5, 0.0]]
    """

    mixing: Any
    step_sizes: Any
    start: Any
    own: Literal["noisy", "true"] = "noisy"
    point: Literal["noisy", "true"] = "noisy"

    def __post_init__(self) -> None:
        """Refuse choices that there are not."""
        _validate.one_of("own", self.own, ("noisy", "true"))
        _validate.one_of("point", self.point, ("noisy", "true"))

    def first(self, gradient: Gradient) -> State:
        """The public start."""
        return (np.array(self.start, np.float64),)

    def sent(self, state: State) -> np.ndarray:
        """The models."""
        return state[0][:, None]

    def after(self, state: State, step: int, shown: np.ndarray, gradient: Gradient) -> State:
        """A round."""
        (x,), z = state, shown[:, 0]
        w = np.asarray(self.mixing, np.float64)
        mixed = w @ z
        if self.own == "true":
            mixed = mixed + np.diag(w)[:, None] * (x - z)
        at = z if self.point == "noisy" else x
        return (mixed - self.step_sizes[step] * gradient(at),)
