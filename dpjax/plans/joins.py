"""Which parts go together: a config, and noise made alone, held to the rows of the registry."""

import dataclasses
from typing import Any

from dpjax import _validate
from dpjax.plans import optimizers, registry
from dpjax.protocols import Timed

__all__: list[str] = []


def _exact(part: Any) -> str | None:
    """Name of a part of the package; None for a user's own."""
    kind = type(part)
    return kind.__name__ if registry.packaged(kind) else None


def _check_sampler(config: Any) -> None:
    """Refuse parts that a sampler does not join."""
    part = config.sampler
    if part.capacity is not None and not part.counted:
        raise ValueError(
            f"sampler is {part} with capacity {part.capacity} and counted {part.counted}: sampler "
            f"{type(part).__name__} has rates, which hang on numbers of records: say counted = True"
        )
    if config.protect.unit == "client" and getattr(part, "turns", None) is None:
        raise ValueError(
            f"relation is {config.protect.relation!r} with sampler {_validate.shown(part)}, which "
            "knows no clients: use samplers.Clients, or protect records or agents"
        )
    row = registry.sampler(part)
    for rule in row.rules:
        if not rule.holds(config):
            raise ValueError(
                f"sampler is {_validate.shown(config.sampler)} {rule.culprit(config)}"
                f"{row.unknown}; {rule.why}"
            )


def check_alone(label: str, **pieces: Any) -> None:
    """Refuse pieces that belong to other noise.

    Args:
        label: What the noise is called.
        pieces: What was given, by name; None is nothing.

    Raises:
        ValueError: For one that was given.
    """
    for name, piece in pieces.items():
        if piece is not None:
            raise ValueError(f"{name} is given for noise {label!r}, which has none")


def check_noise(part: Any, joined: Any, protect: Any, *, own: bool = False) -> None:
    """Refuse noise whose loss is not that of a method, an attacker, or a kind of gradients.

    Args:
        part: A noise design; None for noise that is correlated over agents or rounds by a seed.
        joined: The method.
        protect: What is protected, and from whom.
        own: Whether every agent draws such noise from a secret of its own.

    Raises:
        ValueError: Naming the parts, why they do not go together, and the remedy.
    """
    row, of_method = registry.noise(part), registry.method(joined)
    if own:
        row = dataclasses.replace(row, attackers=registry.OWN_KEYS)
    name = row.part if part is None else type(part).__name__
    if row.methods is not None and of_method.part not in row.methods:
        raise ValueError(
            f"method is {type(joined).__name__}, which noise {name} does not join: {row.why}"
        )
    if row.methods is None and hasattr(joined, "sensitivity") and not row.by_round:
        raise ValueError(
            f"method is {type(joined).__name__}, whose payload is no answer of the query, which "
            f"noise {name} does not join: its loss is that of clipped sums; emit the query's total"
        )
    if (protect.attacker, protect.gradients) not in row.attackers:
        raise ValueError(
            f"protect has attacker {protect.attacker!r} and gradients {protect.gradients!r}, for "
            f"which noise {name} has no finite loss that is known: {row.why}"
        )


def _own_work(method: Any) -> tuple[type, list[str]]:
    """Who says how far a method's payload moves, and what others than that class have changed.

    Of a class of the package nothing may be: all that a user's class overrides may be part of what
    the sensitivity is of, but for the values of fields, which it reads. Of a user's own class what
    its subclasses override.
    """
    kinds = type(method).__mro__
    owner = next((kind for kind in kinds if "sensitivity" in vars(kind)), None)
    if owner is None:
        raise ValueError(
            f"method is {type(method).__name__}, whose class states no sensitivity though it has "
            "one; define it in the class"
        )
    own = [kind for kind in kinds[:-1] if not registry.packaged(kind)]
    if registry.packaged(owner):
        known = {name for kind in kinds if registry.packaged(kind) for name in vars(kind)}
        known |= {"start", "payload", "emit", "send", "absorb", "exchange", "on"}
    else:
        own = [kind for kind in own if kinds.index(kind) < kinds.index(owner)]
        known = {name for kind in kinds for name in vars(kind)}
    fields = {field.name for field in dataclasses.fields(method)}
    changed = {name for kind in own for name in vars(kind) if name in known - fields}
    return owner, sorted(name for name in changed if not name.startswith("__"))


def _check_moves(method: Any, row: Any, plain: bool, optimizer: Any) -> None:
    """Refuse methods whose own sensitivity may not be that of what they do."""
    if not hasattr(method, "sensitivity"):
        return
    owner, changed = _own_work(method)
    if changed:
        raise ValueError(
            f"method is {type(method).__name__}, which has its own {', '.join(changed)} under "
            f"the sensitivity of {owner.__name__}; state a sensitivity of what it does"
        )
    if row.wraps is not None:
        inner = getattr(method, row.wraps)
        return _check_moves(inner, registry.method(inner), plain, optimizer)
    if not plain:
        raise ValueError(
            f"optimizer is {_validate.shown(optimizer)}, with method {type(method).__name__}, "
            f"whose sensitivity is of plain steps: give Sgd(step_size, decay). {row.why}"
        )


def _check_bound(protect: Any, row: Any, of_method: Any, name: str, method: Any) -> None:
    """Refuse what bounds gradients for other noise, or other payloads, than it joins."""
    own = not registry.packaged(type(method))
    if protect.gradient_gap is not None and row.by_round and (own or not of_method.one_answer):
        raise ValueError(
            f"protect has gradient_gap {protect.gradient_gap}, which says how far one gradient "
            "moves, and the method combines several, or is a user's own: clip what it combines "
            "(clip_norm)"
        )
    if row.by_round or (protect.norm == "l2" and protect.gradient_gap is None):
        return
    raise ValueError(
        f"protect has norm {protect.norm!r} and gradient_gap {protect.gradient_gap}, which noise "
        f"{name} does not join: its loss is of gradients clipped in L2; give "
        "Protect(relation, clip_norm), or noise of plans.scheduled"
    )


def _check_accountant(accountant: str, row: Any, part: str) -> None:
    """Refuse an accountant of other noise."""
    kinds = {"pure": row.pure, "zcdp": row.concentrated}
    if kinds.get(accountant, not any(kinds.values())):
        return
    if row.pure:
        wanted = "Budget(epsilon, accountant='pure'): its noise is Laplace's, without a delta"
    elif row.concentrated:
        wanted = "Budget(epsilon, delta, accountant='zcdp'): its noise is whole numbers"
    else:
        wanted = "Budget(epsilon, delta), of accountant 'gdp' or 'rdp': its noise is real Gaussian"
    raise ValueError(f"accountant is {accountant!r} with noise {part}; give {wanted}")


def _check_whole(config: Any) -> None:
    """Refuse an aggregator of whole numbers where messages are none."""
    aggregate = getattr(getattr(config.method, "exchange", None), "aggregate", None)
    if getattr(aggregate, "whole", False) and not config.coded:
        raise ValueError(
            f"method has aggregate {aggregate}, which adds up whole numbers, with noise "
            f"{_validate.shown(config.noise)}, which are none; give plans.integers.Discrete, or "
            "algorithms.exchange.Trusted"
        )


def check(config: Any) -> None:
    """Refuse parts that do not go together.

    Args:
        config: A config whose parts have checked themselves.

    Raises:
        ValueError: Naming the parts, why they do not, and the remedy.
    """
    _check_sampler(config)
    for part in (config.method, config.optimizer, getattr(config.optimizer, "make", None)):
        if isinstance(part, Timed):
            part.check_rounds(config.rounds)
    of_method, optimizer = registry.method(config.method), _validate.shown(config.optimizer)
    name = type(config.method).__name__
    # A user's own class may have the name of one of the package, and do something else.
    plain = _exact(config.optimizer) == "Sgd"
    constant = plain and config.optimizer.decay == "constant"
    if not {"any": True, "plain": plain, "constant": constant}[of_method.steps]:
        raise ValueError(
            f"optimizer is {optimizer}, which method {name} does not join: {of_method.why}"
        )
    if getattr(config.optimizer, "uses_noise", False) and not of_method.noisy_means:
        raise ValueError(
            f"optimizer is {optimizer}, which uses the noise's variance, but method {name} "
            "gives its optimizer something else than the agents' noisy means: make the optimizer "
            "with a variance that you know, uses_noise=False"
        )
    _check_whole(config)
    if getattr(config.optimizer, "uses_noise", False) and of_method.noisy_means == "sums":
        optimizers.check_told(config.optimizer)
    if config.noise is None:
        return
    of_noise, part = registry.noise(config.noise), type(config.noise).__name__
    if of_noise.by_round and _exact(config.noise) is None:
        raise ValueError(
            f"noise is {part}, a class of one's own: a scale that changes by round is accounted by "
            "the package's classes alone; give plans.scheduled.Laplace or Normal with a schedule"
        )
    _check_bound(config.protect, of_noise, of_method, part, config.method)
    if of_noise.by_round:
        _check_moves(config.method, of_method, plain, config.optimizer)
    _check_accountant(config.budget.accountant, of_noise, part)
    if of_noise.by_round and getattr(config.optimizer, "uses_noise", False):
        raise ValueError(
            f"optimizer is {optimizer}, which uses the noise's variance, with noise {part}, "
            "whose variance changes by round: make the optimizer with a variance that you know, "
            "uses_noise=False"
        )
    told = getattr(config.optimizer, "uses_noise", False) and of_method.noisy_means == "sums"
    if told and getattr(config.noise, "temporal", False):
        raise ValueError(
            f"optimizer is {optimizer}, which uses the noise's variance, with noise {part} in "
            "sums, whose variance changes by round: make the optimizer with a variance that you "
            "know, uses_noise=False"
        )
    if of_method.noises is not None and _exact(config.noise) not in of_method.noises:
        raise ValueError(f"noise is {part}, which method {name} does not join: {of_method.why}")
    check_noise(config.noise, config.method, config.protect)
    if config.protect.gradients == "view" and not constant:
        raise ValueError(
            f"optimizer is {optimizer} with gradients 'view', whose loss is that of steps "
            f"of constant size: {of_noise.why}"
        )
    if config.release and not of_noise.released:
        raise ValueError(f"release is True with noise {part}: {of_noise.why}")
