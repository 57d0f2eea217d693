"""DP-PMLF: every example's gradients at the last models are averaged before the clip."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Transmission
from dpjax.protocols import Emission, MethodTerms, Models, PublicState, Round, Updates

__all__ = ["PMLF"]

# This many copies of the model are kept.
_MOST = 1_000


class _PastModels(NamedTuple):
    """An agent's memory, a function of messages alone.

    Attributes:
        optimizer: The optimizer's state, with that of the low-pass filter.
        past: x_{t-k+1}, .., x_{t-1}, leaves [n, k - 1, ...].
    """

    optimizer: optax.OptState
    past: Models


@dataclass(frozen=True, kw_only=True)
class PMLF(DSGD):
    """D-SGD with per-sample momentum; with one agent and a low-pass filter it is DP-PMLF.

        v_t = sum of clip(sum_{j<k} b_j grad f(x_{t-j})) + noise, over the divisor
        x_{t+1} = W^K (x_t + opt(v_t)),    b_j = beta^j / (1 + beta + .. + beta^(k-1))

    The filter is a link of the optimizer, as in any method:
    ``Chain(lambda step: optax.chain(lowpass(b, a), optax.sgd(step)), 0.5)``; without it this is the
    paper's ablation without filter.

    Guarantee: none by itself; it is the plan's, and that of `DSGD` with the same config. Agents
    keep no gradient over rounds. A round computes its batch's gradients at models of earlier
    messages and clips each record's weighted mean, so that its term has a norm of at most C. The
    memory follows from messages. Given these, a round is one noisy clipped sum of a fixed function
    of each record, and a record enters only rounds that drew it. So Poisson batches amplify as they
    do in D-SGD, and `samplers.Poisson` is compatible.

    A round costs k gradients for each example. The paper's sum also contains models before the
    first round, which are x_0 here as in the authors' code. This follows the paper's Algorithm 1.
    The authors' code differs: this round's model has the smallest weight, beta^(k-1), past ones
    from x_{t-k} to x_{t-2} have rising weights, and x_{t-1} has none.

    Attributes:
        length: Number of models k, with this round's; 2 to 1,000.
        beta: Ratio of a model's weight to the next one's, in (0, 1]; 1 weighs all equally.

    Raises:
        ValueError: For a length outside these, or a weight outside (0, 1].

    Reference:
        Xu et al. 2026, Enhancing DPSGD via per-sample momentum and low-pass filtering
        (arXiv 2511.08841).

    Example:
        >>> from dpjax.algorithms.pmlf import PMLF
        >>> [round(weight, 3) for weight in PMLF(length=3, beta=0.5).weights]
        [0.143, 0.286, 0.571]
    """

    length: int = 2
    beta: float = 0.1

    terms = MethodTerms(noisy_means="own")

    def __post_init__(self) -> None:
        """Check the weights."""
        super().__post_init__()
        _validate.fields(self, _validate.integer, "length", minimum=2, maximum=_MOST)
        _validate.fields(self, _validate.fraction, "beta")

    @property
    def weights(self) -> tuple[float, ...]:
        """b_{k-1}, .., b_0: the oldest model's first; their sum is 1."""
        raw = [self.beta**j for j in reversed(range(self.length))]
        return tuple(weight / sum(raw) for weight in raw)

    def start(self, ctx: Round, models: Models) -> _PastModels:
        """The optimizer's state, and the first models in place of earlier ones."""
        # x_0 stands for the models before the first round, as in the authors' code.
        past = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], self.length - 1, axis=1), models)
        return _PastModels(ctx.optimizer.init(models), past)

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The averages of gradients are private."""
        # A record's weighted mean is clipped as one, so its term has a norm of at most C.
        answer = ctx.query.points(self.weights)(_all(public_state), ctx.batch)
        return Emission(answer.total, metrics=answer.metrics)

    def send(
        self, ctx: Round, public_state: PublicState, emission: Emission, noisy: Updates
    ) -> Transmission:
        """The updated models; this round's models are added to the past ones."""
        # The oldest model goes out of the window as this round's comes in.
        before = public_state.memory.optimizer
        models, optimizer = ctx.step(public_state.models, ctx.mean(noisy), before)
        return models, _PastModels(
            optimizer, jax.tree.map(lambda leaf: leaf[:, 1:], _all(public_state))
        )


def _all(public_state: PublicState) -> Models:
    """The past models and this round's, leaves [n, k, ...]."""
    past = public_state.memory.past
    models = public_state.models
    return jax.tree.map(lambda old, new: jnp.concatenate([old, new[:, None]], axis=1), past, models)
