"""What turns noisy means into updates: post-processing, and the only place of step sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import _validate

__all__ = ["Chain", "Sgd"]

_SMALLEST, _LARGEST = 1e-37, 1e37


@dataclass(frozen=True)
class Sgd:
    """Steps of -eta times the noisy mean.

    Attributes:
        step_size: Step size eta, of the first round when it decays.
        decay: "constant", or "sqrt" for eta / sqrt(t), t = 1, 2, ...

    Example:
        >>> from dpjax.plans.optimizers import Sgd
        >>> Sgd(0.1, decay="sqrt").relative(4).round(3)
        array([1.   , 0.707, 0.577, 0.5  ])
    """

    step_size: float
    decay: Literal["constant", "sqrt"] = "constant"

    def __post_init__(self) -> None:
        """Refuse a step that float32 cannot take."""
        step = _validate.single_precision("step_size", self.step_size, _SMALLEST, _LARGEST)
        object.__setattr__(self, "step_size", step)
        _validate.one_of("decay", self.decay, ("constant", "sqrt"))

    @property
    def first(self) -> float:
        """Step size of the first round, for records."""
        return self.step_size

    def shared(self) -> "Sgd":
        """The part without what `arrays` holds: what plans of one run share."""
        return Sgd(1.0, self.decay)

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The step size, which may differ between plans of one run."""
        return {"step_size": np.array(self.step_size, np.float32)}

    def chain(self, arrays: Any) -> optax.GradientTransformation:
        """The transformation, its step size from the arrays."""
        step = arrays["step_size"]
        if self.decay == "sqrt":
            return optax.scale_by_schedule(lambda count: -step / jnp.sqrt(count + 1.0))
        return optax.scale(-step)

    def relative(self, rounds: int) -> np.ndarray:
        """Step sizes over the first one, [T]."""
        steps = np.ones(rounds)
        return steps / np.sqrt(np.arange(1, rounds + 1)) if self.decay == "sqrt" else steps


@dataclass(frozen=True)
class Chain:
    """Any optax optimizer: ``Chain(optax.adam, 0.01)``, ``Chain(my_chain, step_size=0.05)``.

    Post-processing of what was made private: it costs nothing, whatever it keeps. Every agent has
    its own, which sees that agent's model and updates alone: a norm over all leaves is a norm of
    one agent's, a matrix is a matrix.

    Attributes:
        make: ``make(step_size) -> optax.GradientTransformation``, which must be a function of its
            argument alone; the step size may be traced, so that plans of one run can differ in it.
        step_size: A number, or an optax schedule of the round.

    Example:
        >>> import optax
        >>> from dpjax.plans.optimizers import Chain
        >>> Chain(optax.adam, step_size=0.01).first
        0.01
    """

    make: Callable[[Any], optax.GradientTransformation]
    step_size: float | optax.Schedule

    def __post_init__(self) -> None:
        """Refuse what makes no optimizer, and a step that float32 cannot take."""
        if not callable(self.make):
            raise ValueError(
                f"make is {_validate.shown(self.make)}; give a function of the step size, such as "
                "optax.adam"
            )
        if not callable(self.step_size):
            step = _validate.single_precision("step_size", self.step_size, _SMALLEST, _LARGEST)
            object.__setattr__(self, "step_size", step)
        transformation = self.make(self.step_size)
        if not isinstance(transformation, optax.GradientTransformation):
            raise ValueError(
                f"make gives {type(transformation).__name__}; return an "
                "optax.GradientTransformation"
            )

    @property
    def first(self) -> float:
        """Step size of the first round, for records."""
        return float(self.step_size(0)) if callable(self.step_size) else self.step_size

    def shared(self) -> "Chain":
        """The part without what `arrays` holds: what plans of one run share."""
        return self if callable(self.step_size) else Chain(self.make, 1.0)

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The step size, where it is a number."""
        return (
            {} if callable(self.step_size) else {"step_size": np.array(self.step_size, np.float32)}
        )

    def chain(self, arrays: Any) -> optax.GradientTransformation:
        """The transformation of every agent by itself, its step size from the arrays."""
        step = self.step_size if callable(self.step_size) else arrays["step_size"]
        return _each(self.make(step))

    def relative(self, rounds: int) -> np.ndarray:
        """Step sizes over the first one, [T]: those of a schedule."""
        if not callable(self.step_size):
            return np.ones(rounds)
        steps = np.asarray([float(self.step_size(t)) for t in range(rounds)])
        return steps / steps[0] if steps[0] else np.ones(rounds)


def _each(one: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation of one model as one of agent-stacked models, its state stacked too."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.vmap(one.update)(updates, state, params)

    return optax.GradientTransformation(jax.vmap(one.init), update)
