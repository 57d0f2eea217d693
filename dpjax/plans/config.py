"""The frozen config of a run: its parts, checked alone when they are made and together here."""

import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dpjax import _validate
from dpjax.algorithms.dsgd import DSGD
from dpjax.mechanism.participation import Participation
from dpjax.plans import compatibility
from dpjax.plans.optimizers import Chain, Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.protocols import Method, Networked, Noise, Optimizer, Sampler, Timed

__all__ = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's mechanism.

    Attributes:
        protect: Whose data are protected, from whom, and how gradients are clipped for it.
        sampler: Which records take part in a round.
        optimizer: What is done with noisy means; the only place of step sizes.
        rounds: Rounds T, which the budget covers and the run cannot exceed.
        noise: The noise design; None clips and adds none.
        budget: What the run may cost; None where there is no noise.
        method: What agents compute and send.
        release: True for a run whose messages really go out: its noise key comes from the
            operating system. False is a simulation, whose seed reveals the noise.

    Example:
        >>> from dpjax.learning import samplers
        >>> from dpjax.plans import noise, optimizers, plan, protect
        >>> config = plan.Config(
        ...     noise=noise.Independent(), budget=protect.Budget(10.0, delta=1e-5), rounds=100,
        ...     protect=protect.Protect("replace_agent", clip_norm=1.0),
        ...     sampler=samplers.Random(1), optimizer=optimizers.Sgd(0.05),
        ... )
        >>> config.label, config.using(None).label
        ('independent', 'non_private')
    """

    protect: Protect
    sampler: Sampler
    optimizer: Sgd | Chain
    rounds: int
    noise: Noise | None = None
    budget: Budget | None = None
    method: Method | Networked = DSGD()
    release: bool = False

    def __post_init__(self) -> None:
        """Refuse parts that do not go together."""
        # A class in the place of an instance has the functions of its protocol, too.
        for name, (kind, remedy) in _KINDS.items():
            part = getattr(self, name)
            if isinstance(part, type) or not isinstance(part, kind):
                raise _validate.refusal(name, part, f"give {remedy}")
            if part is not None:
                _check_frozen(name, part)
        _validate.number("optimizer.first", self.optimizer.first)
        _validate.flag("release", self.release)
        # Below what an int32 counter of rounds can hold.
        rounds = _validate.integer("rounds", self.rounds, maximum=2**31 - 2)
        _validate.assign(self, rounds=rounds)
        # A budget without noise would be stated and not kept.
        if (self.noise is None) != (self.budget is None):
            present, missing = ("budget", "noise") if self.noise is None else ("noise", "budget")
            raise ValueError(
                f"{present} is given and {missing} is missing; a private config has both, one "
                "without noise neither"
            )
        if self.release and self.noise is None:
            raise ValueError("release is True for a config without noise; give it noise")
        # A chain's factory may depend on the length of a run as well.
        for part in (self.method, self.optimizer, getattr(self.optimizer, "make", None)):
            if isinstance(part, Timed):
                part.check_rounds(rounds)
        self.sampler.pattern(rounds)  # Refuses other rounds than it deals.
        compatibility.check_parts(self)

    def using(self, noise: Noise | None) -> "Config":
        """The same config with another noise design; None is without noise and budget.

        Args:
            noise: A noise design.
        """
        return dataclasses.replace(self, noise=noise, budget=None if noise is None else self.budget)

    @property
    def label(self) -> str:
        """What records, figures and plans call the design, with parameters that are no defaults.

        Parameters without a default are left out, as are parts and arrays.
        """
        if self.noise is None:
            return "non_private"
        settings = ", ".join(_settings(self.noise))
        return f"{self.noise.label}({settings})" if settings else self.noise.label

    @property
    def integer_encoded(self) -> bool:
        """Whether noise makes integers of the payload, see `dpjax.protocols.Privatizer.opened`."""
        return getattr(self.noise, "integer_encoded", False)

    @property
    def accountant(self) -> str | None:
        """How the guarantee's epsilon follows: the budget's rule, or the sampled loss's."""
        if self.budget is None:
            return None
        amplification = self.sampler.amplification()
        return self.budget.accountant if amplification is None else amplification.kind

    @property
    def pattern(self) -> Participation:
        """In which rounds what the relation changes takes part."""
        return Participation(self.rounds, *self.turns)

    @property
    def turns(self) -> tuple[int, int]:
        """How often what the relation changes takes part at most, and how many rounds apart."""
        turns = self.sampler.turns if self.protect.unit == "client" else None
        return turns or self.sampler.pattern(self.rounds)

    @property
    def participation(self) -> tuple[int, int] | None:
        """How often, and how many rounds apart, what the relation changes takes part.

        (epochs, separation) where a fixed order deals the records, or the clients' turns; None
        where any may come.
        """
        if self.protect.unit == "client":
            return self.sampler.turns
        return self.sampler.participation


_KINDS: dict[str, tuple[Any, str]] = {
    "protect": (Protect, "dp.Protect(relation, clip_norm)"),
    "sampler": (Sampler, "dp.samplers.Random(batch_size)"),
    "optimizer": (
        Optimizer,
        "dp.optimizers.Sgd(step_size), or Chain(optax.adam, step_size) of what makes one",
    ),
    "noise": (Noise | None, "dp.noise.Whisper(), say, or None"),
    "budget": (Budget | None, "dp.Budget(epsilon, delta), or None"),
    "method": (
        Method | Networked,
        "dp.methods.DSGD(), or your own class that inherits protocols.Method",
    ),
}
"""What each field is, and what to give."""


_LONGEST = 24
"""Letters of a parameter in a label; of a longer one it has a digest."""


def _settings(noise: Noise) -> Iterator[str]:
    """The plain parameters of a design that are no defaults and not in its own label already."""
    for field in dataclasses.fields(noise):
        value = getattr(noise, field.name)
        if not isinstance(value, int | float | str | tuple):
            continue
        usual = field.default in (dataclasses.MISSING, value)
        if usual or field.metadata.get("in_label") == value:
            continue
        text = str(value)
        # Labels name files and legends.
        if len(text) > _LONGEST:
            text = f"{zlib.crc32(text.encode()):08x}"
        yield f"{field.name}={text}"


def _check_frozen(name: str, part: Any) -> None:
    """Refuse a part that may change after it was checked, or that equals another one."""
    settings = getattr(type(part), "__dataclass_params__", None)
    fixed = settings is not None and settings.frozen
    # A field that is not compared would find the program or the plan of another part.
    if not fixed or not all(field.compare for field in dataclasses.fields(part)):
        raise ValueError(
            f"{name} is {type(part).__name__}, which may change after the plan was made, or equal "
            "another one; make it a frozen dataclass, all fields compared"
        )
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(
            f"{name} is {type(part).__name__}, which cannot be hashed ({error}); give its fields "
            "as numbers, texts, functions or tuples"
        ) from None
