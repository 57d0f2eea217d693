"""Schedules of clients that leave secure sums, for experiments: public, and fixed beforehand."""

from collections.abc import Callable, Mapping, Sequence

from dpjax import _validate
from dpjax.secagg import local

__all__ = ["absent", "taking_turns"]

_Leaves = Mapping[int, str]
"""The stage in which a client leaves, by its number."""


def taking_turns(
    clients: int, dropouts: int, stages: Sequence[str] = local.STAGES
) -> Callable[[int], _Leaves]:
    """Return who leaves when: in every round as many as may, others each time, at all stages.

    Args:
        clients: n.
        dropouts: How many leave in a round.
        stages: In which they leave, in turn.

    Returns:
        ``leaves(round)``, for `dpjax.secagg.transport.SecureSums`.

    Raises:
        ValueError: For more than there are, or stages that are none.

    Example:
        >>> from dpjax.contrib import departures
        >>> leaves = departures.taking_turns(50, 2)
        >>> leaves(0), leaves(1)
        ({0: 'enrol', 1: 'share'}, {2: 'mask', 3: 'unmask'})
    """
    dropouts = _validate.integer("dropouts", dropouts, minimum=0, maximum=clients)
    if not stages:
        raise ValueError(f"stages is {stages!r}; give at least one of {local.STAGES}")
    for stage in stages:
        _validate.one_of("stages", stage, (*local.STAGES, "confirm"))

    def leaves(round: int) -> _Leaves:
        # Counted on from round to round, so that all clients and stages have their turn.
        numbers = range(round * dropouts, (round + 1) * dropouts)
        return {number % clients: stages[number % len(stages)] for number in numbers}

    return leaves


def absent(leaves: Callable[[int], _Leaves], rounds: int) -> tuple[tuple[int, ...], ...]:
    """Return who is missing from the sums of rounds: who left before its vector was sent.

    Args:
        leaves: As `dpjax.secagg.transport.SecureSums` takes it.
        rounds: Rounds.

    Returns:
        Agents a round, as `dpjax.contrib.masks.Masked` takes them.

    Example:
        >>> from dpjax.contrib import departures
        >>> departures.absent(departures.taking_turns(50, 2), rounds=2)
        ((0, 1), (2,))
    """
    # In the stage "mask" a client leaves before its vector is sent.
    early = local.STAGES[: local.STAGES.index("mask") + 1]
    missing = []
    for round in range(rounds):
        agents = [agent for agent, stage in leaves(round).items() if stage in early]
        missing.append(tuple(sorted(agents)))
    return tuple(missing)
