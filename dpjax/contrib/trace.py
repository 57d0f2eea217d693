"""The private values of a run by round: for attacks, audits and empirical sensitivities."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dpjax import _validate
from dpjax._programs import compiled
from dpjax.engine import arguments as arguments_
from dpjax.engine import keys
from dpjax.engine.inputs import Inputs
from dpjax.engine.step import Data, Statics
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.protocols import Arrays, Message, Models, PublicState, State, Updates

__all__ = ["Passed", "empirical_sensitivity", "trace"]


class Passed(NamedTuple):
    """One round of one run.

    Attributes:
        private: What noise was added to.
        noisy: With the noise.
        message: What went over the links, as an attacker on all of them sees it.
        before: Models and memory before the round.
        after: And after it.

    Example:
        >>> from dpjax.contrib.trace import Passed
        >>> Passed._fields
        ('private', 'noisy', 'message', 'before', 'after')
    """

    private: Any
    noisy: Any
    message: Message
    before: PublicState
    after: PublicState


_Read = Callable[[Passed], Any]


def trace(
    plan: Plan,
    problem: Problem | Sequence[Problem],
    *,
    seeds: Sequence[int],
    read: _Read,
    rounds: int | None = None,
) -> Any:
    """Run a plan and return what a function reads of every round, in one compiled call.

    The runs are those of `dpjax.engine.run.run`: the same models, batches and noise for a seed.

    Guarantee: none. The values may be private and must not be published. They serve studies of
    what an attacker learns.

    Args:
        plan: The plan, no release.
        problem: One problem, or one a seed.
        seeds: Seeds.
        read: ``read(passed) -> pytree`` of a round. Calls with the same function compile once.
        rounds: Rounds to run; None is all.

    Returns:
        What was read, leaves [S, T, ...].

    Raises:
        ValueError: For a release, a plan that does not fit the problem, a read of no arrays, or
            of more than fits in memory.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.contrib.trace import trace
        >>> config = dp.Config(
        ...     protect=dp.Protect("replace_agent", clip_norm=1.0), rounds=5,
        ...     sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.05),
        ... )
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.complete(4)))
        >>> trace(plan, dp.quadratics(4), seeds=[0], read=lambda passed: passed.message).shape
        (1, 5, 4, 2)
    """
    if not callable(read):
        raise ValueError(f"read is {_validate.shown(read)}; give a function of a Passed")
    inputs, arguments = _prepared(plan, problem, seeds, rounds)
    given = inputs.statics, read, *arguments, None
    # What is read of all rounds is held at once.
    inputs.memory.check_programs([_traced.trace(*given)], inputs.models)
    return jax.device_get(_traced(*given))


def empirical_sensitivity(
    plan: Plan,
    problem: Problem,
    neighbour: Problem,
    *,
    seeds: Sequence[int],
    rounds: int | None = None,
) -> Float[np.ndarray, "s t n p"]:
    """How far private payloads are apart on neighbouring data when all messages are replayed.

    The problem is run and recorded. The neighbour's data are then run with the recorded noisy
    payloads in place of new ones, so that an attacker sees the same messages. The distance between
    the private payloads is what the noise has to hide. It is a lower bound of the sensitivity that
    a guarantee needs, since it is that of one pair.

    Args:
        plan: The plan, with noise or without.
        problem: The problem.
        neighbour: Its neighbour, of the same shapes.
        seeds: Seeds.
        rounds: Rounds to run; None is all.

    Returns:
        Distances for every seed, round and agent, one a leaf of the payload, in the plan's norm.

    Raises:
        ValueError: For problems of other shapes or functions, or several.

    Reference:
        Xie, Liu and Chai (2025), Proposition 1, compares update rules by
        such distances.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.contrib import trace
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=2)
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> same = dp.quadratics(3)
        >>> float(trace.empirical_sensitivity(plan, same, same, seeds=[0]).max())
        0.0
    """
    arguments_.check_tasks([problem, neighbour], (0, 1))
    inputs, arguments = _prepared(plan, problem, seeds, rounds)
    noisy = _traced(inputs.statics, _payloads, *arguments, None).noisy
    # Both by one program: another would round in other places.
    recorded = _traced(inputs.statics, _payloads, *arguments, noisy)
    inputs, arguments = _prepared(plan, neighbour, seeds, rounds)
    replayed = _traced(inputs.statics, _payloads, *arguments, noisy)
    power = 1 if plan.config.protect.norm == "l1" else 2

    def distance(x: Array, y: Array) -> Array:
        gaps = jnp.abs(x - y).reshape(*x.shape[:3], -1)
        return jnp.sum(gaps**power, axis=-1) ** (1 / power)

    leaves = jax.tree.leaves(jax.tree.map(distance, recorded.private, replayed.private))
    return np.stack([np.asarray(leaf) for leaf in leaves], axis=-1)


def _payloads(passed: Passed) -> Passed:
    return Passed(passed.private, passed.noisy, (), PublicState((), ()), PublicState((), ()))


def _prepared(plan: Any, problem: Any, seeds: Any, rounds: Any) -> tuple[Inputs, tuple[Any, ...]]:
    """The inputs, and the arguments of the traced program: the number of rounds, arrays, keys."""
    plans, problems, seeds = arguments_.check_run(plan, problem, seeds)
    if len(plans) != 1:
        raise ValueError(f"plan is {len(plans)} plans; give one")
    if plans[0].config.release:
        raise ValueError("plan is a release, whose noise stays secret; give a simulation")
    length = plans[0].config.rounds
    if rounds is not None:
        length = _validate.integer("rounds", rounds, maximum=length)
    inputs = Inputs.of(plans, problems, seeds)
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)
    start = jax.tree.map(lambda leaf: leaf[:, 0], inputs.start(None, 1))
    noise_keys = keys.seed_keys(seeds, "noise")
    return inputs, (length, arrays, inputs.data, start, inputs.batch_keys, noise_keys)


@compiled(static=3)
def _traced(
    statics: Statics, read: _Read, length: int, arrays: Arrays, data: Data, models: Models,
    batch_keys: Any, noise_keys: Any, sent: Any,
) -> Any:  # fmt: skip
    """What is read of every round, [S, T, ...]; ``sent`` replaces the noisy payloads."""

    def of_seed(models: Models, batch_key: Any, noise_key: Any, noisy: Any, data: Data) -> Any:
        recording = _recording(statics.transformation(arrays, noise_key), noisy)
        draw = functools.partial(statics.draw, data, batch_key)
        rounds = statics.rounds(
            arrays, noise_key, draw, frozen=data.frozen, transformation=recording
        )

        def one_round(state: State, _: None) -> tuple[State, Any]:
            new, info = rounds.step(state)
            before = PublicState(state.models, state.memory)
            after = PublicState(new.models, new.memory)
            last = new.secret.noise
            passed = Passed(last.private, last.noisy, info.messages, before, after)
            return new, _arrays(read(passed))

        state = statics.initial(arrays, models, batch_key, noise_key, recording)
        return jax.lax.scan(one_round, state, None, length=length)[1]

    axes = (0, 0, 0, None if sent is None else 0, statics.data_axes)
    return jax.vmap(of_seed, in_axes=axes)(models, batch_keys, noise_keys, sent, data)


def _arrays(values: Any) -> Any:
    """The values as arrays.

    Raises:
        ValueError: Where a leaf is no array.
    """
    try:
        return jax.tree.map(jnp.asarray, values)
    except (TypeError, ValueError) as error:
        shown = _validate.shown(values)
        raise ValueError(f"read gives {shown}; give a function that returns arrays") from error


class _Recorded(NamedTuple):
    """A privatizer's state, its last input and output, and the number of its calls."""

    inner: Any
    private: Any
    noisy: Any
    round: Any


def _recording(
    inner: optax.GradientTransformationExtraArgs, replayed: Updates
) -> optax.GradientTransformationExtraArgs:
    """A privatizer that records its inputs and outputs, or returns replayed ones."""

    def init(payload: Updates) -> _Recorded:
        state = inner.init(payload)
        noisy, _ = jax.eval_shape(lambda: inner.update(payload, state, key=jax.random.key(0)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), noisy)
        return _Recorded(state, payload, zeros, jnp.zeros((), jnp.int32))

    def update(
        payload: Updates, state: _Recorded, params: Models = None, *, key: PRNGKeyArray
    ) -> tuple[Updates, _Recorded]:
        noisy, inner_state = inner.update(payload, state.inner, key=key)
        if replayed is not None:
            noisy = jax.tree.map(lambda leaf: leaf[state.round], replayed)
        return noisy, _Recorded(inner_state, payload, noisy, state.round + 1)

    return optax.GradientTransformationExtraArgs(init, update)
