"""Training at a server: agents send clipped gradients, and the server steps by their sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax._numerics import Integer
from dpjax.algorithms import sketches
from dpjax.algorithms.exchange import Server, Sum, Transition
from dpjax.protocols import (
    Aggregator,
    Carry,
    Emission,
    Memory,
    Message,
    Method,
    MethodTerms,
    Models,
    PublicState,
    Round,
    Updates,
)
from dpjax.transforms.lowpass import SHARES
from dpjax.transforms.sketch import flat

__all__ = ["Federated", "dome"]

_PLAIN = Sum()


class _ServerMemory(NamedTuple):
    """The server's memory, a function of sums and public keys, which clients can replay.

    Attributes:
        optimizer: The optimizer's state, of one model.
        sketch: State of the sketch; empty without one.
        centre: Running mean of gradients m, like one model; empty without one.
        opened: Number of opened sums.
    """

    optimizer: optax.OptState
    sketch: Memory
    centre: Updates
    opened: Integer


@dataclass(frozen=True)
class Federated(Method):
    """x <- x + opt(A q + m): one model at a server, which all agents know.

        client    s = clip(A' (g - m))               g its gradient, A the sketch, m the centre
        server    q = noisy sum of s / present       A and m of this round, both public

    Without a sketch A is the identity, and without a centre m is 0. An agent is a cohort slot;
    with `dpjax.learning.samplers.Clients` clients take turns in it. The server keeps the rest:
    optimizer, sketch and centre follow from sums, so that clients can replay them from the sum of
    every round. A round whose sum was not opened (present = 0) changes nothing. An
    optimizer that uses the noise's variance (``Chain(..., uses_noise=True)``, as
    `dpjax.contrib.optimizers.scale_by_adam` does) receives that of every coordinate, for the
    clients that answered.

    Guarantee: none by itself; it is the plan's. Models depend on noisy sums alone, with noise in
    shares (`dpjax.plans.noise.SumShares`), or on messages with enough noise each
    (`dpjax.plans.noise.Independent`). The clip comes after the sketch, which may lengthen a
    gradient. So the term of one unit has norm C at most for all A and m, and these depend on
    earlier rounds through noise alone.

    Attributes:
        aggregate: Computes the server's sum; `Sum` shows every message.
        sketch: Compresses gradients, from `dpjax.algorithms.sketches`; None sends them unchanged.
        local_steps: Number K of local steps of every client. It sends the mean of their gradients,
            (x_0 - x_K) / (K local_step_size).
        local_step_size: Size of a local step.
        centre: Decay of the running mean m, below 1; 0 is no centre. The mean is corrected for its
            start at 0, as Adam's first moment is, which it equals at the same decay.

    Raises:
        ValueError: For an unknown aggregate or sketch, or a decay out of range.

    Reference:
        McMahan et al. (2017), FedSGD and, with local steps, FedAvg; with noise, McMahan et al.
        (2018), Learning differentially private recurrent language models, Algorithm 1; with an
        optimizer at the server, Reddi et al. (2021); with a learned sketch and a centre, Nicolas et
        al., Algorithm 1 (`dome`).

    Example:
        >>> from dpjax.algorithms.exchange import Trusted
        >>> from dpjax.algorithms.federated import Federated
        >>> Federated(Trusted(dropouts=1)).exchange.aggregate.min_survivors(10)
        9
    """

    aggregate: Aggregator = Sum()
    sketch: sketches.LinearSketch | None = None
    centre: float = 0.0
    local_steps: int = 1
    local_step_size: float = 1.0

    stochastic = "rows"
    terms = MethodTerms(
        payload="sum",
        noisy_means="sums",
        why=(
            "its agents know one model, and hide what they send in the sum: give "
            "noise=dp.noise.SumShares(), or noise.Independent() or PrefixSum() where single "
            "messages are seen"
        ),
    )

    def __post_init__(self) -> None:
        """Check the parts of the method."""
        if isinstance(self.aggregate, type) or not isinstance(self.aggregate, Aggregator):
            raise _validate.refusal(
                "aggregate",
                self.aggregate,
                "give algorithms.exchange.Sum(), Trusted(), or one of your own that inherits "
                "protocols.Aggregator",
            )
        if self.sketch is not None:
            sketches.check_sketch(self.sketch)
        if not 0 <= _validate.number("centre", self.centre) < 1:
            raise ValueError(f"centre is {self.centre!r}; give a decay from 0 to below 1")
        _validate.fields(self, _validate.integer, "local_steps")
        limits = dict(minimum=1e-30, maximum=1e30)
        _validate.fields(self, _validate.single_precision, "local_step_size", **limits)

    @property
    def exchange(self) -> Server:
        """A sum at the server."""
        return Server(self.aggregate)

    @property
    def sketches_gradients(self) -> bool:
        """Whether there is a sketch."""
        return self.sketch is not None

    @property
    def min_entries(self) -> int:
        """The fewest entries of a model, which the sketch needs."""
        return 1 if self.sketch is None else self.sketch.min_entries

    def start(self, ctx: Round, models: Models) -> _ServerMemory:
        """The server's optimizer for one model, the sketch's start, and a centre of 0."""
        model = _first(models)
        sketch = ()
        if self.sketch is not None:
            vector, _ = flat(model)
            sketch = self.sketch.start(ctx.key, vector.size, vector.dtype)
        centre = optax.tree.zeros_like(model) if self.centre else ()
        return _ServerMemory(ctx.optimizer.init(_stacked(model)), sketch, centre, jnp.int32(0))

    def payload(self, models: Models) -> Updates:
        """One gradient for each cohort slot, or one k-vector."""
        if self.sketch is None:
            return models
        leaves = jax.tree.leaves(models)
        return jnp.zeros((len(leaves[0]), self.sketch.k), jnp.result_type(*leaves))

    def emit(self, ctx: Round, public_state: PublicState) -> Emission:
        """The encoded gradients are private."""
        query = ctx.query
        # One step needs no loop: it is the gradient itself.
        if self.local_steps > 1:
            query = query.local_steps(self.local_steps, self.local_step_size)
        answer = query(public_state.models, ctx.batch, self._encoder(public_state.memory))
        return Emission(answer.total, metrics=answer.metrics)

    def absorb(
        self, ctx: Round, public_state: PublicState, carry: Carry, received: Message
    ) -> Transition:
        """The server's step for all cohort slots; none where no sum was opened."""
        total, present = received
        models, memory = public_state
        model = _first(models)
        mean = ctx.mean(total, present)
        gradient = self._decoded(memory, mean, model)
        variance = self._known_variance(ctx, memory, present, model)
        server = _stacked(model)
        # Where no sum was opened, all of these stay as they were.
        _, sketch, centre, opened = memory
        updates, optimizer = ctx.optimizer.update(
            _stacked(gradient), memory.optimizer, server, **variance
        )
        if self.sketch is not None:
            sketch = self.sketch.learn(sketch, flat(gradient)[0], ctx.key, mean)
        if self.centre:
            # Not by optax's moment, which rounds otherwise: learned sketches magnify a last bit.
            decay = self.centre
            centre = jax.tree.map(
                lambda old, new: decay * old + (1 - decay) * new, centre, gradient
            )
        new_memory = _ServerMemory(optimizer, sketch, centre, opened + 1)
        new = optax.apply_updates(server, updates), new_memory
        server, memory = optax.tree.where(present > 0, new, (server, memory))
        slots = jax.tree.map(lambda x, row: jnp.broadcast_to(row, x.shape), models, server)
        return slots, memory

    def released(self, public_state: PublicState) -> Models:
        """The model: a function of sums."""
        return public_state.models

    def _encoder(self, memory: _ServerMemory) -> Callable[[Updates], Updates] | None:
        """The map of one gradient before the clip."""
        if self.sketch is None and not self.centre:
            return None
        # Both follow from earlier sums, so that the clipped term has a norm of at most C.
        centre = self._centre(memory)
        projection = None if self.sketch is None else self.sketch.projection(memory.sketch)

        def encode(gradient: Updates) -> Updates:
            if centre is not None:
                gradient = optax.tree.sub(gradient, centre)
            return gradient if projection is None else projection.encode(flat(gradient)[0])

        return encode

    def _decoded(self, memory: _ServerMemory, mean: Updates, model: Models) -> Updates:
        """A q + m, like one model."""
        if self.sketch is not None:
            _, back = flat(model)
            mean = back(self.sketch.projection(memory.sketch).decode(mean))
        centre = self._centre(memory)
        return mean if centre is None else jax.tree.map(jnp.add, mean, centre)

    def _centre(self, memory: _ServerMemory) -> Models | None:
        """The running mean, corrected for its start; 0 before the first sum."""
        if not self.centre:
            return None
        weight = 1 - jnp.float32(self.centre) ** memory.opened.astype(jnp.float32)
        # Adam's correction of a mean that began at 0; before the first sum nothing is divided.
        share = 1 / jnp.where(memory.opened > 0, weight, 1)
        return jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), memory.centre)

    def _known_variance(
        self, ctx: Round, memory: _ServerMemory, present: Integer, model: Models
    ) -> dict[str, Updates]:
        """The variance of the noise in every coordinate, for an optimizer that uses it."""
        if SHARES not in ctx.arrays:
            return {}
        # The variance of one client's share of the noise, over the clients that answered.
        share = jnp.mean(ctx.arrays[SHARES])
        present = jnp.maximum(present, 1)
        if self.sketch is None:
            return {"noise_variance": (share / present)[None]}
        _, back = flat(model)
        return {"noise_variance": _stacked(back(self.sketch.noise(memory.sketch, share, present)))}


def dome(k: int, aggregate: Aggregator = _PLAIN, **options: Any) -> Federated:
    """Return DOME: a learned sketch of k columns, and gradients less their running mean.

    With a ``Chain`` of `dpjax.contrib.optimizers.scale_by_adam` as the optimizer it is the
    paper's Algorithm 1, corrected: t begins at 1, and the second moment is corrected by
    (a^2 / B) diag(S_t S_t') for the B present clients. ``as_published=True`` takes the paper's
    lines.

    Args:
        k: Columns of the sketch.
        aggregate: Computes the server's sum.
        options: Of `dpjax.algorithms.sketches.Learned`.

    Raises:
        ValueError: For options out of range.

    Reference:
        Nicolas et al., Algorithm 1, with beta_1 = .9 for the mean.

    Example:
        >>> from dpjax.algorithms.federated import dome
        >>> dome(16).sketch.k, dome(16).centre
        (16, 0.9)
    """
    return Federated(aggregate, sketches.Learned(k, **options), centre=0.9)


def _first(models: Models) -> Models:
    """The model that all cohort slots share, without their axis."""
    return jax.tree.map(lambda leaf: leaf[0], models)


def _stacked(model: Models) -> Models:
    """A model with an axis of agents of one."""
    return jax.tree.map(lambda leaf: leaf[None], model)
