"""What turns noisy means into updates: post-processing, and the only place of step sizes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dpjax import _validate
from dpjax.mechanism.strategy import Strategy, inverse_of
from dpjax.protocols import Arrays, Memory, Models, Optimizer, Updates
from dpjax.transforms.lowpass import LAGS, SHARES, NoiseVariance, passed

__all__ = ["Chain", "Sgd"]

_Transformation: TypeAlias = optax.GradientTransformation
_Scale: TypeAlias = Array | None
"""The variance of the noise at an agent, or at all; None where none is asked for."""

# Steps outside these would vanish or overflow in float32.
_SMALLEST = 1e-37
_LARGEST = 1e37
_SCALE = "noise_variance"
_PROFILE = "noise_profile"
NOISE_ARRAYS = (_SCALE, _PROFILE, SHARES)
"""Arrays by which an optimizer knows the noise."""


@dataclass(frozen=True)
class Sgd:
    """Steps of -eta times the noisy mean.

    Attributes:
        step_size: Step size eta, of the first round when it decays; the largest of a list.
        decay: "constant"; "sqrt" for eta / sqrt(t), t = 1, 2, ...; a ratio q in (0, 1) for
            eta q^(t-1); or multiples of eta, one a round, from 0 to 1, the largest 1.

    Example:
        >>> from dpjax.plans.optimizers import Sgd
        >>> Sgd(0.1, decay=0.5).relative(3).tolist()
        [1.0, 0.5, 0.25]
        >>> Sgd(0.1, decay="sqrt").relative(4).round(3)
        array([1.   , 0.707, 0.577, 0.5  ])
    """

    step_size: float
    decay: Literal["constant", "sqrt"] | float | tuple[float, ...] = "constant"

    def __post_init__(self) -> None:
        """Refuse a step that float32 cannot take."""
        _validate.assign(self, step_size=_plain_step(self.step_size))
        decay = self.decay
        if isinstance(decay, str):
            _validate.one_of("decay", decay, ("constant", "sqrt"))
            return
        remedy = "give 'constant', 'sqrt', a ratio in (0, 1), or multiples up to 1, one a round"
        steps = _validate.numbers("decay", decay)
        if steps is not None and (max(steps) != 1 or min(steps) < 0):
            raise _validate.refusal("decay", decay, remedy)
        _validate.assign(self, decay=steps or _validate.probability("decay", decay, remedy=remedy))

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of more rounds than there are step sizes, or of fewer.

        Args:
            rounds: Rounds of the run.

        Raises:
            ValueError: For another number.
        """
        if isinstance(self.decay, tuple) and len(self.decay) != rounds:
            raise ValueError(
                f"decay has {_validate.counted(len(self.decay), 'step size')} for "
                f"{_validate.counted(rounds, 'round')}; give one a round"
            )

    @property
    def first(self) -> float:
        """Step size eta, for records: the first round's, or the largest of a list."""
        return self.step_size

    def shared(self) -> "Sgd":
        """The part without what `arrays` holds: what plans of one run share."""
        return Sgd(1.0, self.decay)

    def arrays(self) -> Arrays:
        """The step size, which may differ between plans of one run."""
        return {"step_size": np.array(self.step_size, np.float32)}

    def chain(self, arrays: Arrays) -> _Transformation:
        """The transformation, its step size from the arrays."""
        step = arrays["step_size"]
        decay = self.decay
        if decay == "constant":
            return optax.scale(-step)
        if decay == "sqrt":
            return optax.scale_by_schedule(
                lambda count: -step / jnp.sqrt(count.astype(step.dtype) + 1.0)
            )
        if isinstance(decay, tuple):
            steps = jnp.asarray(decay, step.dtype)
            return optax.scale_by_schedule(lambda t: -step * steps[jnp.minimum(t, len(decay) - 1)])
        return optax.scale_by_schedule(lambda count: -step * _power(decay, count, step.dtype))

    def relative(self, rounds: int) -> np.ndarray:
        """Step sizes over eta, [T]; the last one stays where there are no more."""
        number = np.arange(rounds)
        if isinstance(self.decay, str):
            steps = np.ones(rounds)
            return steps / np.sqrt(number + 1) if self.decay == "sqrt" else steps
        if isinstance(self.decay, tuple):
            return np.asarray(self.decay)[np.minimum(number, len(self.decay) - 1)]
        return self.decay**number


def _power(ratio: float, count: Array, dtype: DTypeLike) -> Array:
    """ratio^count within three roundings: digits of the count look up powers made in float64."""
    # A power in float32 would lose a digit of the exponent for every digit of the count.
    digits = []
    places = np.arange(256, dtype=np.float64)
    for position in range(4):
        table = jnp.asarray(ratio ** (places * 256.0**position), dtype)
        digits.append(table[(count >> (8 * position)) & 255])
    return digits[0] * digits[1] * digits[2] * digits[3]


@dataclass(frozen=True)
class Chain:
    """An optax optimizer: ``Chain(optax.adam, 0.01)``, ``Chain(my_chain, step_size=0.05)``.

    Any whose updates are a function of the noisy means, of what it keeps and of the model. Those
    that ask for more, for the loss or its function as line searches do, are refused: no noise was
    added to that.

    Post-processing of what was made private: it costs nothing, whatever it keeps. Every agent has
    its own, which sees that agent's model and updates alone: a norm over all leaves is a norm of
    one agent's, a matrix is a matrix.

    Attributes:
        make: ``make(step_size) -> _Transformation``, which must be a function of its
            arguments alone; the step size is traced, so that plans of one run can differ in it.
        step_size: A number, or an optax schedule of the round, which starts at no less than 0.
        uses_noise: True for ``make(step_size, noise)``, where ``noise`` is the variance of the
            noise in a coordinate of the agent's noisy mean,
            `dpjax.transforms.lowpass.NoiseVariance`: the plan's, public, and 0 without noise. At a
            server it is `dpjax.transforms.lowpass.passed`, since it follows from who was there.

    Raises:
        ValueError: For what is no such function or step, when it is made and not in the run.

    Example:
        >>> import optax
        >>> from dpjax.plans.optimizers import Chain
        >>> Chain(optax.adam, step_size=0.01).first
        0.01
        >>> from dpjax.contrib.optimizers import scale_by_adam
        >>> def adam(step_size, noise):
        ...     return optax.chain(scale_by_adam(noise), optax.scale_by_learning_rate(step_size))
        >>> Chain(adam, step_size=0.01, uses_noise=True).uses_noise
        True
    """

    make: Callable[..., _Transformation]
    step_size: float | optax.Schedule
    uses_noise: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no optimizer, and a step that float32 cannot take."""
        _validate.flag("uses_noise", self.uses_noise)
        first = _step(self.step_size, 0) if self._scheduled else _plain_step(self.step_size)
        if not self._scheduled:
            _validate.assign(self, step_size=first)
        model = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
        try:
            _, state = jax.eval_shape(self._updated, model, self.arrays())
        except Exception as error:
            raise ValueError(
                f"make is {_validate.shown(self.make)}, which makes no optimizer: "
                f"{_validate.said(error)}. Give a function of the step size, which is traced, that "
                "returns an optax chain of functions of updates, state and parameters alone, for "
                "parameters of any tree. Masks and labels are functions of the parameters, as in "
                "mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)"
            ) from error
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
            raise ValueError(
                f"make is {_validate.shown(self.make)}, which keeps a random key, as "
                "optax.add_noise and noisy_sgd do; leave it out: such noise is the same at all "
                "agents, and no guarantee counts it. What protects is Config(noise=...)"
            )

    def _updated(self, model: Models, arrays: Arrays) -> tuple[Updates, Memory]:
        """Updates of one model, which stands for its gradient, too."""
        step = self.step_size if self._scheduled else arrays["step_size"]
        link = self.make(step, *[NoiseVariance(jnp.ones(()))] * self.uses_noise)
        return link.update(model, link.init(model), model)

    @property
    def _scheduled(self) -> bool:
        return callable(self.step_size)

    @property
    def first(self) -> float:
        """Step size of the first round, for records."""
        return _step(self.step_size, 0) if callable(self.step_size) else self.step_size

    def shared(self) -> "Chain":
        """The part without what `arrays` holds: what plans of one run share."""
        if self._scheduled:
            return self
        # Not made anew: it was tried when it was made, and plans ask for this often.
        duplicate = copy.copy(self)
        _validate.assign(duplicate, step_size=1.0)
        return duplicate

    def arrays(self) -> Arrays:
        """The step size, where it is a number."""
        return {} if self._scheduled else {"step_size": np.array(self.step_size, np.float32)}

    def chain(self, arrays: Arrays) -> _Transformation:
        """The transformation of every agent by itself, step size and noise from the arrays."""
        step = self.step_size if self._scheduled else arrays["step_size"]
        if not self.uses_noise:
            return _each(lambda _: self.make(step), None)
        if SHARES in arrays:
            return _each(lambda _: self.make(step, passed), None)
        # Plans without noise have no such arrays.
        profile = arrays.get(_PROFILE)
        profile = None if profile is None else profile.reshape(-1, LAGS)

        def of_agent(scale: _Scale) -> _Transformation:
            # Without noise the variance is 0.
            return self.make(step, NoiseVariance(0.0 if scale is None else scale, profile))

        return _each(of_agent, arrays.get(_SCALE))

    def relative(self, rounds: int) -> np.ndarray:
        """Step sizes over the first one, [T]: those of a schedule.

        Raises:
            ValueError: For a schedule with a step that is no finite number.
        """
        if not self._scheduled:
            return np.ones(rounds)
        steps = np.asarray([_step(self.step_size, t) for t in range(rounds)])
        return steps / steps[0] if steps[0] else np.ones(rounds)


def _plain_step(value: object) -> float:
    return _validate.single_precision("step_size", value, _SMALLEST, _LARGEST)


def _step(schedule: optax.Schedule, round: int) -> float:
    """The step size of a schedule in a round, refused where a run cannot take it."""
    name = f"step_size({round})"
    remedy = "give a schedule of finite steps, the first at least 0"
    try:
        value = schedule(round)
    except Exception as error:
        raise ValueError(f"{name} fails: {_validate.said(error)}; {remedy}") from error
    step = _validate.number(name, value, remedy=remedy)
    # Later ones may fall below zero by rounding.
    if abs(step) > _LARGEST or (round == 0 and step < 0):
        raise _validate.refusal(name, value, f"{remedy} and at most {_LARGEST:g}")
    return step


def _each(of_agent: Callable[[_Scale], _Transformation], scales: _Scale) -> _Transformation:
    """A transformation of one model as one of agent-stacked models, its state stacked too.

    Args:
        of_agent: From the scale of an agent's noise to its transformation.
        scales: Those of all agents, [n]; None where there are none.
    """

    def over_agents(function: Callable[..., Memory], *trees: Memory) -> Memory:
        if jax.tree.leaves(trees)[0].shape[0] > 1:
            return jax.vmap(function)(*trees)
        # One agent is no batch: branches stay branches.
        result = function(*jax.tree.map(lambda leaf: leaf[0], trees))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    def init(models: Models) -> Memory:
        return over_agents(lambda scale, model: of_agent(scale).init(model), scales, models)

    def update(
        updates: Updates, state: Memory, params: Models = None, **extra: Memory
    ) -> tuple[Updates, Memory]:
        def of_one(
            scale: _Scale, updates: Updates, state: Memory, params: Models, extra: Arrays
        ) -> tuple[Updates, Memory]:
            link = optax.with_extra_args_support(of_agent(scale))
            return link.update(updates, state, params, **extra)

        return over_agents(of_one, scales, updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init, update)


def rows_of(arrays: Arrays, agents: Sequence[int]) -> Arrays:
    """The arrays of some agents' optimizers: those that differ between agents are cut.

    Args:
        arrays: One plan's, by name.
        agents: Numbers of the agents.
    """
    # The profile over rounds is the same for all agents.
    cut = dict(arrays)
    if _SCALE in arrays:
        cut[_SCALE] = arrays[_SCALE][np.asarray(agents)]
    return cut


def noise_arrays(
    optimizer: Optimizer,
    factor: Float[np.ndarray, "n q"] | None,
    strategy: Strategy | None,
    divisor: float,
    *,
    in_sums: bool,
) -> Arrays:
    """The noise's variance, float32 by name, for an optimizer that uses it.

    Args:
        optimizer: The optimizer; nothing for those that use none.
        factor: Map of a round's fresh normals to the agents' noisy sums; None where no one map says
            it, which no such optimizer joins.
        strategy: C over rounds; None is the identity, as it is in sums.
        divisor: What sums are divided by.
        in_sums: Whether the optimizer is given means over agents, and the variance with each.
    """
    if not getattr(optimizer, "uses_noise", False):
        return {}
    assert factor is not None
    # Of independent normals the variances add up: row sums of F's squares.
    squares = np.square(factor.astype(np.float64))
    sums = squares if squares.ndim == 1 else squares.sum(axis=1)
    variances = (sums / divisor**2).astype(np.float32)
    if in_sums:
        assert strategy is None
        return {SHARES: variances}
    if strategy is None:
        return {_SCALE: variances}
    # Covariances of rounds t and t - lag, rows of C^-1 times each other.
    inverse = inverse_of(strategy)
    profile = np.zeros((len(inverse), LAGS))
    for lag in range(min(LAGS, len(inverse))):
        profile[lag:, lag] = np.einsum("ts,ts->t", inverse[lag:], inverse[: len(inverse) - lag])
    # Flat: an array of three axes is one over agents.
    return {_SCALE: variances, _PROFILE: profile.ravel().astype(np.float32)}
