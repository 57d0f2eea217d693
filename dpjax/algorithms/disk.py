"""DiSK: a simplified Kalman filter behind the noise, and gradients a little ahead of the model."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Transmission
from dpjax.protocols import Emission, MethodTerms, Models, PublicState, Round, Updates

__all__ = ["DiSK"]

# Below it float32 cannot distinguish c from 1 - c, or a model from the one ahead of it.
_SMALLEST = 1e-4


class _FilterMemory(NamedTuple):
    """An agent's memory, a function of messages alone.

    Attributes:
        optimizer: The optimizer's state.
        estimate: g_{t-1}, the filtered gradient.
        before: x_{t-1}.
    """

    optimizer: optax.OptState
    estimate: Updates
    before: Models


@dataclass(frozen=True, kw_only=True)
class DiSK(DSGD):
    """D-SGD with DiSK at every agent; with one agent it is the published central method.

    With d_t = x_t - x_{t-1} and c = (1 - kappa) / (kappa gamma), clipped example by example,

        v_t = sum of clip(c grad f(x_t + gamma d_t) + (1 - c) grad f(x_t)) + noise, over the divisor
        g_t = (1 - w) g_{t-1} + w v_t,    g_0 = v_0,    x_{t+1} = W^K (x_t + opt(g_t))

    Guarantee: none by itself; it is the plan's, and that of `DSGD` with the same config. The clip
    comes after the combination, so that a record's term has a norm of at most C for every c. The
    memory (g, x_{t-1}, the optimizer's state) follows from messages. A record enters a round only
    through the batch that drew it and through earlier messages. Given these messages, a round is
    that of D-SGD: one noisy clipped sum at fixed points. So Poisson batches amplify as they do
    there (composition holds for rounds chosen by earlier outputs), and `samplers.Poisson` is
    compatible.

    The two public codes agree in c and differ in the rest. The authors' code filters by w = kappa,
    as the paper does, under the given noise. The code in Opacus (research/disk_optimizer) filters
    by w = 1 - kappa with the same c, and divides the noise multiplier by sqrt(c^2 + (1 - c)^2). It
    also clips after the combination. So its noise exceeds what its guarantee needs for 0 < c < 1,
    and is too small for other c. Here both have the plan's noise. The authors' code also normalises
    the filtered gradient in runs without privacy, which is not done here. The paper has no value
    for g_{-1}: both codes start from v_0. An optimizer that uses the noise variance
    (``Chain(..., uses_noise=True)``) is refused: the plan knows the variance of v, and that of g is
    smaller.

    Attributes:
        kappa: The filter's gain, in (0, 1).
        gamma: Distance ahead of the model, in steps. None is (1 - kappa) / kappa, where c is 1 and
            the gradient at the model vanishes, which halves the work.
        weights: "paper" has w = kappa, as the authors' code; "opacus" has w = 1 - kappa.

    Raises:
        ValueError: For a gain outside [1e-4, 1), a gamma outside [1e-4, 1e4], or other weights.

    Reference:
        Zhang et al. 2024, DiSK: differentially private optimizer with simplified Kalman filter for
        noise reduction (arXiv 2410.03883).

    Example:
        >>> from dpjax.algorithms.disk import DiSK
        >>> round(DiSK(kappa=0.7, gamma=0.5).ahead, 3), DiSK(kappa=0.7, gamma=None).ahead
        (0.857, 1.0)
    """

    kappa: float = 0.7
    gamma: float | None = 0.5
    weights: Literal["paper", "opacus"] = "paper"

    terms = MethodTerms()

    def __post_init__(self) -> None:
        """Check the parameters of the filter."""
        super().__post_init__()
        _validate.fields(self, _validate.single_precision, "kappa", minimum=_SMALLEST, maximum=1e37)
        if self.kappa >= 1:
            raise ValueError(f"kappa is {self.kappa}; give a number below 1, or the method DSGD()")
        if self.gamma is not None:
            limits = dict(minimum=_SMALLEST, maximum=1 / _SMALLEST)
            _validate.fields(self, _validate.single_precision, "gamma", **limits)
        _validate.one_of("weights", self.weights, ("paper", "opacus"))

    @property
    def ahead(self) -> float:
        """The weight c of the gradient ahead of the model."""
        return 1.0 if self.gamma is None else (1 - self.kappa) / (self.kappa * self.gamma)

    @property
    def gain(self) -> float:
        """The filter's weight w of the new gradient."""
        return self.kappa if self.weights == "paper" else 1 - self.kappa

    def start(self, ctx: Round, models: Models) -> _FilterMemory:
        """The optimizer's state, before any filtered gradient or step."""
        return _FilterMemory(ctx.optimizer.init(models), optax.tree.zeros_like(models), models)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The combinations of gradients are private."""
        gamma = (1 - self.kappa) / self.kappa if self.gamma is None else self.gamma
        models, memory = public_state
        c = self.ahead
        moved = jax.tree.map(lambda x, old: x + gamma * (x - old), models, memory.before)
        # c is 1, so that the gradient at the model has weight 0 and is left out.
        if self.gamma is None:
            answer = ctx.query(moved, ctx.batch)
        else:
            points = jax.tree.map(lambda *pair: jnp.stack(pair, axis=1), models, moved)
            # One clip for the combination: two clipped gradients would add up to a norm of 2 C.
            answer = ctx.query.points((1 - c, c))(points, ctx.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The updated models; the agent keeps its memory for the next round."""
        before, memory = public_state
        estimate = jax.tree.map(
            # Round 0 has no estimate to filter with: g_0 = v_0, as in both public codes.
            lambda old, new: jnp.where(ctx.round == 0, new, old + self.gain * (new - old)),
            memory.estimate,
            ctx.mean(noisy),
        )
        # The filter is behind the noise, so the estimate costs no privacy.
        models, state = ctx.step(before, estimate, memory.optimizer)
        return models, _FilterMemory(state, estimate, before)
