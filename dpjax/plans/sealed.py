"""Sums that noise in shares counts on: nobody sees a single message, none counts twice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.algorithms.exchange import Server
from dpjax.plans import dependence, registry
from dpjax.plans.calibration import Target

__all__: list[str] = []

_ROUNDS = 3
"""First rounds in which a user's own aggregate is tried, and the last one."""
_COLUMNS = 4


def check(part: Any, target: Target) -> None:
    """Refuse an exchange that shows single messages, or opens sums of too few.

    An aggregate of a user's own that claims to be sealed is tried on small messages (`_try`); what
    it does in other rounds, with larger ones, or beyond what is computed, is its own word.

    Args:
        part: Noise in shares, with the ``dropouts`` that it makes up for.
        target: What it is for.

    Raises:
        ValueError: Naming the exchange and the remedy.
    """
    exchange = getattr(target.method, "exchange", None)
    # A subclass may hand out what it likes.
    aggregate: Any = exchange.aggregate if type(exchange) is Server else None
    changed = _changed(aggregate)
    if changed:
        raise ValueError(
            f"method has aggregate {type(aggregate).__name__}, which has its own "
            f"{', '.join(changed)} and inherits that it shows plain sums alone; say sealed = True "
            "in that class, where its sums have every message once"
        )
    if not getattr(aggregate, "sealed", False):
        raise ValueError(
            f"method has exchange {exchange}, which shows single messages, with noise {part}, of "
            "which each has a share; give an aggregate that shows the sum alone, or "
            "noise.Independent() and attacker='outsider'"
        )
    agents, least = target.agents, aggregate.least(target.agents)
    if least < agents - part.dropouts:
        remedy = f"dropouts={agents - least}, or " if least > 0 else ""
        raise ValueError(
            f"aggregate opens sums of {max(least, 0)} of {agents} agents with noise {part}; give "
            f"{remedy}an aggregate that aborts earlier"
        )
    if not registry.packaged(type(aggregate)):
        _try(aggregate, agents, target.rounds, getattr(part, "coded", False))


def _changed(aggregate: Any) -> list[str]:
    """What a user's class has changed of one whose claim to be sealed it inherits."""
    kinds = type(aggregate).__mro__
    owner = next((kind for kind in kinds if "sealed" in vars(kind)), kinds[0])
    own = [kind for kind in kinds[: kinds.index(owner)] if not registry.packaged(kind)]
    names = {name for kind in own for name in vars(kind) if hasattr(owner, name)}
    return sorted(name for name in names if name == "__call__" or not name.startswith("__"))


@functools.lru_cache(maxsize=64)
def _try(aggregate: Any, agents: int, rounds: int, coded: bool) -> None:
    """Refuse a user's own aggregate that is not as sealed as it says, as far as a few rounds tell.

    Of units as messages the sum says how often each agent's is in it: once or not at all, and as
    many as are said to be present. Other messages must be in it as often, or who is in it would
    depend on them. And what is shown may follow from messages by the sum alone.

    Args:
        aggregate: The aggregate; its class is not the package's.
        agents: n.
        rounds: Of the run.
        coded: Whether messages are whole numbers.

    Raises:
        ValueError: Saying what it does.
    """
    name = f"method has aggregate {type(aggregate).__name__}, which says sealed = True and "
    kind: Any = np.uint32 if coded else np.float32
    units = {"w": jnp.asarray(np.eye(agents), kind)}
    other = np.random.default_rng(0).integers(1, 1000, (agents, _COLUMNS))
    others = {"w": jnp.asarray(other, kind)}
    least = aggregate.least(agents)
    for round in sorted({*range(min(_ROUNDS, rounds)), rounds - 1}):
        at = getattr(aggregate, "at", None)
        one = aggregate if at is None else at(jnp.int32(round))
        if _leaves(one, units):
            continue  # A protocol behind a callback: to try it would be to hold a round.
        (total, present), (second, _) = one(units), one(others)
        times, found = np.asarray(total["w"], np.float64), float(present)
        if set(times.tolist()) - {0.0, 1.0} or times.sum() != found:
            raise ValueError(
                f"{name}adds up messages {times.tolist()} times in round {round}, of {found:g} "
                "agents: the noise is for sums that have every message of who is present once"
            )
        if 0 < found < least:
            raise ValueError(
                f"{name}opens a sum of {found:g} in round {round}, fewer than the {least} of its "
                "least(agents); open none, with nobody present"
            )
        if not np.array_equal(np.asarray(second["w"], np.float64), times @ other):
            raise ValueError(
                f"{name}adds up other messages otherwise in round {round}: who is in a sum may "
                "not depend on what was sent"
            )
        if _shows(aggregate, units, total):
            raise ValueError(f"{name}shows more of messages than their sum; return that in seen")


def _leaves(one: Any, messages: Any) -> bool:
    """Whether messages are handed to the host."""
    handed = list[str]()
    closed = jax.make_jaxpr(one)(messages)
    dependence.reached(closed.jaxpr, [True] * len(closed.jaxpr.invars), handed)
    return bool(handed)


def _shows(aggregate: Any, messages: Any, total: Any) -> bool:
    """Whether what is seen depends on messages apart from their sum."""
    closed = jax.make_jaxpr(aggregate.seen)(messages, total)
    return any(dependence.reached(closed.jaxpr, [True, False]))
