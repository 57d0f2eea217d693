"""Which parts go together: what each states, and the reasons.

`check_parts` holds a config to it. A noise design states its `NoiseTerms` in its class, a method
its `dpjax.protocols.MethodTerms`, and they join by the kind of the payload. A user's own class is
what its nearest class of the package is (a subclass of `Correlated`, say), or a method of one
payload an agent, for which an outsider's loss holds because messages depend on data through the
noisy payload alone. That a user's own part does what it says is the user's word, and `custom_names`
names it.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dpjax import _validate
from dpjax.accounting.records import Threat
from dpjax.plans.optimizers import Sgd
from dpjax.protocols import Method, MethodTerms, Networked, Noise, Payload

__all__ = ()

_Rules: TypeAlias = dict[str, object]
"""Texts of refusals, each with what is true where it holds."""

ANSWERS: tuple[Payload, ...] = ("dsgd", "answer")
"""Payloads of one answer an agent, which noise joins by default."""
_OUTSIDER = (("outsider", "any"),)
_INDEPENDENT_KEYS = (*_OUTSIDER, ("node", "any"), ("coalition", "any"))
KEYS_APART = (*_INDEPENDENT_KEYS, ("outsider", "view"), ("node", "view"), ("coalition", "view"))


@dataclass(frozen=True, kw_only=True)
class NoiseTerms:
    """What a noise design joins and whom it defends against, stated in its class as ``terms``.

    Attributes:
        attackers: Pairs of attacker and gradients for which its loss is known and finite.
        payloads: The kinds of payloads that it joins, see `dpjax.protocols.MethodTerms`: with
            "answer" D-SGD's too, as its loss is that of any answers. Without "answer" its loss is
            that of the very messages of the methods that have such a payload.
        loss: "gaussian"; "pure", epsilon at every delta; or "zcdp", known in zCDP alone.
        by_round: True where its scale changes by round and its loss follows from how far the
            payload moves, which any method may say of its own: clipped in the norm that the noise
            asks for, or under an assumed gap.
        released: Whether it may be released at all.
        one_process: Whether a run in one process may be a release, or only one of sites.
        known_variance: Whether the plan knows the variance that optimizers may ask for.
        inherited: Whether a user's class may have them by inheritance alone, without a promise of
            its own: a method's kind of payload then does not count for it.
        why: Why no others, with the remedy.

    Example:
        >>> from dpjax.plans import compatibility
        >>> compatibility.NoiseTerms().attackers
        (('outsider', 'any'),)
    """

    attackers: tuple[tuple[str, str], ...] = _OUTSIDER
    payloads: tuple[Payload, ...] = ANSWERS
    by_round: bool = False
    loss: Literal["gaussian", "pure", "zcdp"] = "gaussian"
    released: bool = True
    one_process: bool = True
    known_variance: bool = True
    inherited: bool = False
    why: str = (
        "agents draw it from a seed that they share (all of them, or a group) and can subtract: "
        "give attacker='outsider' and gradients='any', or a design whose agents keep secrets of "
        "their own, dp.noise.Independent() or dp.noise.PairKeys(shared)"
    )


CORRELATED = NoiseTerms(inherited=True)
"""Of any noise over agents or rounds that a seed colours, a user's own among them."""
SHARED_SEED = NoiseTerms()
"""Of designs of the package whose agents share a seed."""
_SECRET_KEYS = (
    "its loss is an outsider's, and other agents learn no more if each keeps its own key: give "
    "attacker='outsider', 'node' or 'coalition', and gradients='any'"
)
OWN_KEYS = NoiseTerms(attackers=_INDEPENDENT_KEYS, why=_SECRET_KEYS)
"""Of designs in which every agent draws its noise alone."""
TO_SERVER = dataclasses.replace(OWN_KEYS, payloads=(*ANSWERS, "sum"))
"""Of those among them that messages to a server carry, too."""
SCHEDULED = NoiseTerms(
    attackers=_INDEPENDENT_KEYS,
    payloads=(*ANSWERS, "models"),
    by_round=True,
    one_process=False,
    why=_SECRET_KEYS,
)
"""Of designs whose scale changes by round."""
SIMULATED = "a run in one process holds all keys, so it is a simulation (release=False)"
"""Why noise with secrets of several holders is not released by one process."""


class _Own:
    """A method of a user's own, of no class of the package."""

    terms = MethodTerms(
        one_answer=True, why="its sensitivity is of plain steps: give Sgd(step_size, decay)"
    )


# Contrib promises nothing, so a guarantee names what it takes from there.
_CONTRIB = "dpjax.contrib."


def packaged(kind: type) -> bool:
    """Return whether a class is the package's own: of its core, neither a user's nor contrib's.

    Args:
        kind: A part's class.
    """
    module = kind.__module__
    return module.startswith("dpjax.") and not module.startswith(_CONTRIB)


@contextlib.contextmanager
def called(part: object, name: str) -> Iterator[None]:
    """Name a part of a user's own in errors of its code, which are ValueErrors then.

    Args:
        part: What is called inside.
        name: What of it.
    """
    try:
        yield
    except Exception as error:
        if packaged(type(part)):
            raise
        raise ValueError(f"{name} of {type(part).__name__} fails: {error!r}") from error


_LIBRARIES = {
    *("dpjax", "jax", "jaxlib", "ml_dtypes", "flax", "optax", "numpy", "scipy"),
    *("jax_privacy", "dp_accounting"),
}
"""Packages whose classes and functions are no user's own.

The page 'Security and the threat model' of the manual says that they are trusted.
"""

_PROGRAMS = ("Jaxpr", "ClosedJaxpr", "Exported")
"""Classes of JAX's that hold what a function of anybody's was traced to."""

_ON_THE_HEAP = 1 << 9
"""The flag of types that code in Python makes."""


def custom_names(*parts: object) -> tuple[str, ...]:
    """Return the names of classes and functions that are a user's own, in parts and what they hold.

    Guarantee: whatever is reached from a part through fields, containers, partial arguments, bound
    objects, wrapped functions and closures is of the package or a library, or named: code without
    a name of its own by ``module.qualname``, and what was set on a part of the package, beside its
    fields, by ``Class.attribute``.

    Args:
        parts: Parts on whose word a guarantee relies: a config, noise, or functions of a problem.
    """
    names: list[str] = []
    queue = [*reversed(parts)]
    visited: dict[int, object] = {}
    while queue:
        part = _compiled(queue.pop())
        if id(part) in visited:
            continue
        visited[id(part)] = part  # Held, so that no other object has its number.
        origin = part if isinstance(part, type) or inspect.isroutine(part) else type(part)
        custom_kinds = [kind for kind in getattr(origin, "__mro__", [origin]) if not _trusted(kind)]
        names += map(_name, custom_kinds[:1]) if custom_kinds else _replaced(part)
        queue += reversed(_held(part, bool(custom_kinds)))
    return tuple(dict.fromkeys(names))


def _compiled(part: object) -> object:
    """What a copy of a compiled function stands for; all other parts as they are.

    Such a copy, from a pickle, has lost its name and `__wrapped__`: its state alone has the source.
    """
    if not inspect.isroutine(part) or hasattr(part, "__name__"):
        return part
    state = part.__getstate__()
    return state.get("fun", part) if isinstance(state, dict) else part


def _module(origin: object) -> str:
    """Where a class or function was written: `functools.wraps` copies another's module."""
    if inspect.isfunction(origin):
        return origin.__globals__.get("__name__") or "__main__"
    return getattr(origin, "__module__", None) or "builtins"


def _name(origin: object) -> str:
    """The name of a class or function; with its module where it has none of its own."""
    # Descriptors such as `functools.partialmethod` are routines without a name of their own.
    name = getattr(origin, "__name__", type(origin).__name__)
    qualified = getattr(origin, "__qualname__", name)
    if inspect.isfunction(origin):
        # As it was written, which `functools.wraps` hides.
        name = origin.__code__.co_name
        qualified = origin.__code__.co_qualname
    if name.isidentifier():
        return name
    return re.sub(r"[^\w.<>-]", "_", f"{_module(origin)}.{qualified}")


def _replaced(part: object) -> list[str]:
    """Names of what an instance of a dataclass has in the place of what its class says."""
    kind = type(part)
    if not dataclasses.is_dataclass(kind):
        return []
    fields = {field.name for field in dataclasses.fields(kind)}
    names = []
    for name in getattr(part, "__dict__", {}).keys() - fields:
        replaced = inspect.getattr_static(kind, name, None)
        cached = isinstance(replaced, functools.cached_property)
        # Modules keep their state under private names of no function.
        state = name.startswith("_") and not hasattr(replaced, "__get__")
        if not cached and not state:
            names.append(f"{kind.__name__}.{name}")
    return sorted(names)


def _trusted(origin: object) -> bool:
    """Whether a class or function is of a trusted package, or of Python."""
    if not hasattr(origin, "__name__"):
        return False
    module = _module(origin)
    package = module.partition(".")[0]
    if package == "builtins":
        # What `exec` makes has this module, too; Python's own types are static.
        return not (isinstance(origin, type) and origin.__flags__ & _ON_THE_HEAP)
    if package in _LIBRARIES and not module.startswith(_CONTRIB):
        return origin.__name__ not in _PROGRAMS
    # Classes that are made by a call have the module of what makes them, "abc" say.
    source = sys.modules.get(module)
    registered = getattr(source, origin.__name__, None) is origin
    # A user's file may have the name of one of Python's, "code.py" say.
    file = getattr(source, "__file__", None) or os.__file__
    inside = Path(file).is_relative_to(Path(os.__file__).parent)
    return registered and inside and package in sys.stdlib_module_names


def _held(part: object, is_custom: bool) -> list[object]:
    """What a part holds; in a user's own functions and plain classes nothing more is named."""
    if isinstance(part, Mapping):
        return [*part.values()]
    if isinstance(part, tuple | list | set | frozenset):
        return [*part]
    # Fields are what a part is made of: nothing else takes part in its equality.
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    if is_custom or isinstance(part, type):
        return []
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    # Of functions, what compiled or wrapped ones stand for, and of what objects methods are.
    names = ["__wrapped__", "__self__"]
    if not inspect.isroutine(part) and not inspect.ismodule(part):
        # Attributes of what a library makes of functions: rules of derivatives and of batches.
        attributes = [*getattr(part, "__dict__", ())]
        for kind in type(part).__mro__:
            attributes += vars(kind).get("__slots__", ())
        # Others are of Python's, annotations say, whose parts are no code that runs.
        names += [name for name in attributes if not name.startswith("__")]
    values = [getattr(part, name, None) for name in names]
    function = getattr(part, "__func__", part)
    values += getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # Not yet assigned.
            values.append(cell.cell_contents)
    return values


def _stating(part: object, kind: type) -> type | None:
    """The nearest class of the package that states terms of a kind; None of a user's own.

    A user's class cannot state terms: these promise who is protected.
    """
    for base in type(part).__mro__:
        if packaged(base) and isinstance(vars(base).get("terms"), kind):
            return base
    return None


def method(part: object) -> MethodTerms:
    """Return the terms of a method; one that wraps another joins what that one does.

    Args:
        part: A method, or one placed on a network.
    """
    stating = _stating(part, MethodTerms) or _Own
    terms: MethodTerms = stating.terms  # type: ignore[attr-defined]
    return terms if terms.wraps is None else method(getattr(part, terms.wraps))


def in_sums(part: object) -> bool:
    """Return whether a method gives its optimizer means over agents, and their noise with each.

    Args:
        part: A method.
    """
    return method(part).noisy_means == "sums"


def by_agent(part: Method) -> bool:
    """Return whether an agent's part of a round follows from its own rows, as a method states it.

    A class of a user's own that replaces a function of the round makes the statement itself: its
    base's is of other functions.

    Args:
        part: A method on its network.
    """
    functions = ("start", "emit", "send", "absorb")
    return part.by_agent and _is_about(part, "by_agent", functions)


def _is_about(part: object, statement: str, members: tuple[str, ...]) -> bool:
    """Whether a class makes a statement itself, or replaces nothing that its base's is about."""
    kinds = type(part).__mro__
    stated = next(kind for kind in kinds if packaged(kind) or statement in vars(kind))
    return all(getattr(stated, name, None) is getattr(kinds[0], name) for name in members)


def noise(part: Noise | None) -> NoiseTerms:
    """Return the terms of a noise design; one of a user's own goes by the secrets that it states.

    Args:
        part: A noise design; None for noise that is correlated over agents or rounds by a seed.
    """
    if part is None:
        return CORRELATED
    design = _stating(part, NoiseTerms)
    if design is not None:
        return design.terms  # type: ignore[attr-defined]
    # As in a guarantee, a class says itself who knows its secrets, and inherits no promise.
    secrets = part.secrets if "secrets" in vars(type(part)) else None  # type: ignore[attr-defined]
    return NoiseTerms(
        inherited=True,
        attackers=_INDEPENDENT_KEYS if secrets in ("own", "links") else _OUTSIDER,
        why=(
            f"its class states secrets {secrets!r}, which promises an outsider's loss alone: give "
            "attacker='outsider' and gradients='any'; or state secrets 'own' or 'links', where "
            "agents keep secrets of their own and it states the loss to any attacker"
        ),
    )


def check_parts(config: Any) -> None:
    """Refuse parts that do not go together.

    Args:
        config: A config whose parts have checked themselves.

    Raises:
        ValueError: Naming the parts, why they do not, and the remedy.
    """
    method_part = config.method
    noise_part = config.noise
    row = method(method_part)
    terms = noise(noise_part)
    name = type(method_part).__name__
    optimizer = _validate.shown(config.optimizer)
    steps = row.steps
    if terms.by_round and method_part.sensitivity is not None and steps == "any":
        # How far models move is known of plain steps alone.
        steps = "plain"
    plain = isinstance(config.optimizer, Sgd)
    constant = plain and config.optimizer.decay == "constant"
    accepted = {"any": True, "plain": plain, "constant": constant}[steps]
    # Only a server's exchange adds up; gossip has no aggregate.
    aggregate = getattr(getattr(method_part, "exchange", None), "aggregate", None)
    unknown = _unknown_variance(config, row, terms)
    uses_noise = getattr(config.optimizer, "uses_noise", False)
    refusals = _sampler_rules(config) | {
        f"optimizer is {optimizer}, which method {name} does not join: {row.why}": not accepted,
        f"optimizer is {optimizer}, which uses the noise's variance, but {unknown}: make the "
        "optimizer with a variance that you know, uses_noise=False": uses_noise and unknown,
        f"method has aggregate {aggregate}, which adds up whole numbers: give noise "
        "dp.noise.Discrete, or algorithms.exchange.Trusted": getattr(aggregate, "integers_only", 0)
        and not config.integer_encoded,
    }
    _validate.refuse(refusals)
    budget = config.budget
    if noise_part is None or budget is None:
        return
    protect = config.protect
    kind = type(noise_part).__name__
    gap = protect.gradient_gap
    accountant = budget.accountant
    # All other accountants turn one mu into an epsilon, each by its own rule.
    counted = accountant if accountant in ("pure", "zcdp") else "gaussian"
    norm = "l1" if terms.loss == "pure" else "l2"
    # Noise of a user's own is the user's word, whatever method it is given to.
    is_custom = terms.inherited and not packaged(type(noise_part))
    # Of one answer an agent the design says it, in `check_noise`.
    excluded = row.payload not in {*ANSWERS, *terms.payloads} and not is_custom
    refusals = {
        f"protect has gradient_gap {gap}, which says how far one gradient moves, and the method "
        "combines several: clip what it combines (clip_norm)": gap is not None
        and terms.by_round
        and not row.one_answer,
        f"protect has norm {protect.norm!r} and gradient_gap {gap}, which noise {kind} does not "
        f"join: give Protect(relation, clip_norm, norm={norm!r}); a gap is for plans.scheduled": (
            protect.norm != norm or (gap is not None and not terms.by_round)
        ),
        f"epsilon is {budget.epsilon} for noise {kind}; give one for all": (
            budget.each and (terms.by_round or terms.loss == "zcdp")
        ),
        f"accountant is {accountant!r} with noise {kind}; give {_BUDGETS[terms.loss]}": (
            terms.loss != counted
        ),
        f"noise is {kind}, which method {name} does not join: {row.why}": excluded,
    }
    _validate.refuse(refusals)
    # The plan asks again, of noise as it will run.
    check_noise(noise_part, method_part, protect)
    refusals = {
        f"optimizer is {optimizer} with gradients 'view', whose loss is that of steps of constant "
        f"size: {terms.why}": protect.gradients == "view" and not constant,
        f"release is True with noise {kind}: {terms.why}": config.release and not terms.released,
        f"release is True with method {name}, whose payload nothing bounds, nor what is lost where "
        "float64 adds noise to it: give DSGD(), whose gradients are clipped, or release=False": (
            config.release and method_part.sensitivity is not None
        ),
    }
    _validate.refuse(refusals)


_BUDGETS = {
    "pure": "Budget(epsilon, accountant='pure'): its noise is Laplace's, without a delta",
    "zcdp": "Budget(epsilon, delta, accountant='zcdp'): its noise is whole numbers",
    "gaussian": "Budget(epsilon, delta), of accountant 'gdp' or 'rdp': its noise is real Gaussian",
}


def check_noise(
    part: Noise | None,
    emitter: Method | Networked,
    protect: Threat,
    *,
    independent_keys: bool = False,
) -> None:
    """Refuse noise whose loss is not that of a method, an attacker, or a kind of gradients.

    Args:
        part: A noise design; None for noise that is correlated over agents or rounds by a seed.
        emitter: The method.
        protect: What is protected, and from whom.
        independent_keys: Whether every agent draws such noise from a secret of its own.

    Raises:
        ValueError: Naming the parts, why they do not go together, and the remedy.
    """
    terms = noise(part)
    name = "Correlated" if part is None else type(part).__name__
    kind = type(emitter).__name__
    attackers = _INDEPENDENT_KEYS if independent_keys else terms.attackers
    base = _stating(emitter, MethodTerms) or _Own
    of_messages = "answer" not in terms.payloads
    # Such a loss follows from the messages themselves, which a subclass may change. One of a
    # user's own is the user's word, and named; one of the package states a view of its own.
    lacks_view = base is not type(emitter) and packaged(type(emitter))
    refusals = {
        f"method is {kind} under gradients 'view', and the loss of noise {name} is that of the "
        f"very messages of {base.__name__}: give gradients='any', or the method a view and a row": (
            protect.gradients == "view" and of_messages and lacks_view
        ),
        f"method is {kind}, which noise {name} does not join: {terms.why}": (
            # As the class states it: of a method that wraps another these are other messages.
            of_messages and base.terms.payload not in terms.payloads  # type: ignore[attr-defined]
        ),
        f"method is {kind}, whose payload is no answer of the query, which noise {name} does not "
        "join: its loss is that of clipped sums; emit the query's total": (
            not of_messages and emitter.sensitivity is not None and not terms.by_round
        ),
        f"protect has attacker {protect.attacker!r} and gradients {protect.gradients!r}, for "
        f"which noise {name} has no finite loss that is known: {terms.why}": (
            (protect.attacker, protect.gradients) not in attackers
        ),
    }
    _validate.refuse(refusals)


def _sampler_rules(config: Any) -> _Rules:
    """What a sampler asks of other parts, by what it claims of its batches."""
    part = config.sampler
    protect = config.protect
    text = _validate.shown(part)
    relation = f"relation {protect.relation!r}"
    with called(part, "sampler.amplification"):
        amplification = part.amplification(None)
    if amplification is None:
        clients = part.turns is not None
        dealt = part.participation
        pattern = part.pattern(config.rounds)
        is_any = dealt is None and pattern == (config.rounds, 1)
        return {
            f"sampler is {text} with {relation}, but knows no clients: use samplers.Clients": (
                protect.unit == "client" and not clients
            ),
            f"sampler is {text} with {relation}; an agent takes part in every round: protect "
            "records, or use Random": not is_any and protect.unit == "agent",
            f"sampler is {text}, whose participation is {dealt} and whose pattern is {pattern}; "
            "give both alike, or leave participation out": dealt not in (None, pattern),
        }
    # Designs that do not say so may depend on earlier rounds, or be no covariance.
    fresh = config.noise is None or not getattr(config.noise, "temporal", True)
    bands = getattr(config.noise, "bands", None) or math.inf
    budget = config.budget
    _, separation = part.pattern(config.rounds)
    accountant = "gdp" if budget is None else budget.accountant
    relations = " or ".join(amplification.relations)
    attackers = " or ".join(map(repr, amplification.attackers))
    gradients = " or ".join(map(repr, amplification.gradients))
    claim = "the accounting covers no privacy amplification with"
    rules = {
        f"{relation}: protect {relations}": (protect.relation not in amplification.relations),
        f"attacker {protect.attacker!r}: give {attackers}, who knows no batches": (
            protect.attacker not in amplification.attackers
        ),
        f"gradients {protect.gradients!r}: give {gradients}": (
            protect.gradients not in amplification.gradients
        ),
        f"method {type(config.method).__name__}, which sends a record's gradient also in rounds "
        "that did not draw it": config.method.sensitivity is not None,
        f"noise {config.label!r}: {amplification.remedy}": not fresh and bands > separation,
        f"accountant {accountant!r}: give 'gdp', the numerical one": accountant != "gdp",
        "one epsilon an agent: give one for all": budget and budget.each is not None,
        "batches other than its base's: define amplification in its own class": (
            not _is_about(part, "amplification", ("draw", "key_of", "pattern"))
        ),
        "release=True: give release=False, which must not be published": config.release,
    }
    return {f"sampler is {text}: {claim} {why}, or use Random": on for why, on in rules.items()}


def _unknown_variance(config: Any, row: MethodTerms, terms: NoiseTerms) -> str:
    """Why the plan does not know the noise's variance; "" where it does."""
    # Of what is not the noisy mean itself, the plan's variance would be of something else.
    if row.noisy_means is None:
        return (
            f"method {type(config.method).__name__} gives its optimizer something else than the "
            "agents' noisy means"
        )
    kind = type(config.noise).__name__
    if terms.by_round or (row.noisy_means == "sums" and getattr(config.noise, "temporal", False)):
        return f"the variance of noise {kind} changes by round"
    return "" if terms.known_variance else f"the plan computes no variance of noise {kind}"
