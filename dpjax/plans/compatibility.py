"""Which parts go together, in one table of methods, noise designs and samplers, with the reasons.

`check` holds a config to it. Rows name parts and import none of them, so that figures can ask for
labels and colours without loading anything else. A part that has no row is a user's own: it is what
its nearest named class is (a subclass of `Correlated`, say), or a method of one payload an agent,
for which an outsider's loss holds because messages depend on data through the noisy payload alone.
That a user's own part does what it says is the user's word, and `custom` names it.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from dpjax import _validate

__all__ = ["METHODS", "NOISES", "SAMPLERS", "MethodRow", "NoiseRow"]

OUTSIDER = (("outsider", "any"),)
OWN_KEYS = tuple((attacker, "any") for attacker in ("outsider", "node", "coalition"))
KEYS_APART = tuple(
    (attacker, gradients)
    for gradients in ("any", "view")
    for attacker in ("outsider", "node", "coalition")
)
RECEIVERS = (("node", "view"), ("coalition", "view"))


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A row of `METHODS`.

    Attributes:
        part: Name of its class.
        noises: Names of the noise parts it joins; None is all whose payload is one an agent.
        steps: What it joins: "any" optimizer, "plain" steps of a size known beforehand, or plain
            ones of "constant" size.
        one_answer: True where an agent's private payload takes one gradient a round as it is, so
            that an assumed gap between gradients says how far it moves.
        noisy_means: "own" where the optimizer is given the mean of each agent's own noisy sum, so
            that the variance of the noise in it is the plan's; "sums" where it is given means over
            agents, and told the variance with each; None where it is given something else.
        why: Why no others, with the remedy.
        unprotected: Why nobody is protected in a run without noise.
        wraps: Name of its field that holds another method, whose joins are its own.
    """

    part: str
    noises: tuple[str, ...] | None = None
    steps: Literal["any", "plain", "constant"] = "any"
    noisy_means: Literal["own", "sums"] | None = None
    one_answer: bool = False
    why: str = ""
    unprotected: str = "no noise is added"
    wraps: str | None = None


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """A row of `NOISES`.

    Attributes:
        label: What records call the design.
        part: Name of its class; None for a reference that no run has.
        title: What legends say.
        colour: In figures, from Okabe and Ito's and Tol's palettes: colour-blind readers can tell.
        marker: So that a figure also reads in grey.
        attackers: Pairs of attacker and gradients for which its loss is known and finite.
        methods: Names of the methods it joins; None is all whose payload is one an agent.
        loss: "gaussian"; "pure", epsilon at every delta; or "zcdp", known in zCDP alone.
        by_round: True where its scale changes by round and its loss follows from how far the
            payload moves, which any method may say of its own: clipped in the norm that the noise
            asks for, or under an assumed gap.
        released: Whether a run in one process may be a release.
        why: Why no others, with the remedy.
    """

    label: str
    part: str | None
    title: str
    colour: str
    marker: str
    attackers: tuple[tuple[str, str], ...] = OUTSIDER
    methods: tuple[str, ...] | None = None
    by_round: bool = False
    loss: Literal["gaussian", "pure", "zcdp"] = "gaussian"
    released: bool = True
    why: str = "its loss is an outsider's: give attacker='outsider' and gradients='any'"


_MODELS = (
    "it hides models, which plain steps move by amounts known beforehand: give "
    "noise=plans.scheduled.Laplace(ratio) or Normal(ratio), or None, and "
    "optimizer=plans.optimizers.Sgd(step_size, decay)"
)
_BARE = (
    "it sends what no noise was accounted for, a reference or a method without DP: give noise=None "
    "and optimizer=plans.optimizers.Sgd(step_size, decay)"
)

_NO_NOISE = "no noise is added"
_CIPHERED = (
    "links carry ciphertexts where a transport encrypts them, and no epsilon follows; a neighbour "
    "learns weighted differences of models"
)

METHODS = (
    MethodRow(part="DSGD", noisy_means="own", one_answer=True),
    MethodRow(part="DiSK"),
    MethodRow(part="PMLF", noisy_means="own"),
    MethodRow(part="Average", wraps="method"),
    MethodRow(
        part="ZipDL",
        noises=("ZeroSum",),
        steps="constant",
        why=(
            "it hides updated models by noise of their own on every link, which a step of constant "
            "size moves by a known amount: give noise=plans.links.ZeroSum() and "
            "optimizer=plans.optimizers.Sgd(step_size)"
        ),
    ),
    MethodRow(
        part="Federated",
        noisy_means="sums",
        noises=("Aggregate", "Discrete", "Independent", "PrefixSum"),
        why=(
            "its agents know one model, and hide what they send in the sum: give "
            "noise=plans.noise.Aggregate(), or noise.Independent() or PrefixSum() where single "
            "messages are seen"
        ),
    ),
    *(
        MethodRow(
            part=part, noises=("Laplace", "Normal"), steps="plain", one_answer=True, why=_MODELS
        )
        for part in ("Tracking", "DPOP", "DGD", "GradientTracking", "PPDOAGT")
    ),
    *(
        MethodRow(part=part, noises=(), steps="plain", why=_BARE, unprotected=unprotected)
        for part, unprotected in (
            ("EXTRA", _NO_NOISE),
            ("NIDS", _NO_NOISE),
            (
                "CorrelatedRandomness",
                "weights and steps are random, and no epsilon follows; whoever sees all links can "
                "solve for gradients",
            ),
            ("Encrypted", _CIPHERED),
            ("EncryptedOnLinks", _CIPHERED),
        )
    ),
)
"""One row a method."""

_SHARED = (
    "agents draw it from a seed that they share (all of them, or a group) and can subtract: give "
    "attacker='outsider' and gradients='any', or a design whose agents keep secrets of their own, "
    "plans.noise.Independent() or plans.links.PairKeys(shared)"
)

_OWN_SECRETS = (
    "its loss is an outsider's, and other agents learn no more if each keeps its own key: give "
    "attacker='outsider', 'node' or 'coalition', and gradients='any'"
)

_SCHEDULED = (
    f"{_OWN_SECRETS}; what float32 adds to it is not accounted, so it is a simulation "
    "(release=False)"
)

NOISES = (
    NoiseRow(
        label="independent", part="Independent", title="LDP", colour="#E69F00", marker="o",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="pairwise", part="Pairwise", title="DECOR (pairwise)", colour="#009E73", marker="s",
        why=_SHARED,
    ),
    NoiseRow(
        label="whisper", part="Whisper", title="Whisper", colour="#0072B2", marker="^", why=_SHARED,
    ),
    NoiseRow(
        label="whisper_horizon", part="Whisper", title="Whisper, horizon-aware", colour="#D55E00",
        marker="D", why=_SHARED,
    ),
    NoiseRow(
        label="central", part=None, title="CDP (trusted server)", colour="#CC79A7", marker="v",
        attackers=(), methods=(),
    ),
    NoiseRow(
        label="anti_pgd", part="AntiPgd", title="Anti-PGD", colour="#56B4E9", marker="P",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="prefix_sum", part="PrefixSum", title="D-MF", colour="#999933", marker="X",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="mafalda", part="Mafalda", title="MAFALDA", colour="#882255", marker="p",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="spacetime", part="SpaceTime", title="space and time", colour="#332288", marker="*",
        why=_SHARED,
    ),
    NoiseRow(
        label="pair_keys", part="PairKeys", title="DECOR, keys at both ends", colour="#44AA99",
        marker="<", attackers=KEYS_APART, methods=("DSGD",), released=False,
        why=(
            "its loss is known for D-SGD (method=DSGD()), and with gradients='view' for steps of "
            "constant size (optimizer=Sgd(step_size)); a run in one process holds all keys, so it "
            "is a simulation (release=False): in a release every agent draws its own with "
            "transforms.noise"
        ),
    ),
    NoiseRow(
        label="laplace", part="Laplace", title="Laplace", colour="#AA4499", marker="h",
        by_round=True, loss="pure", released=False, attackers=OWN_KEYS, why=_SCHEDULED,
    ),
    NoiseRow(
        label="normal", part="Normal", title="Gaussian, by schedule", colour="#117733", marker="d",
        by_round=True, released=False, attackers=OWN_KEYS, why=_SCHEDULED,
    ),
    NoiseRow(
        label="aggregate", part="Aggregate", title="in a secure sum", colour="#661100", marker="8",
        attackers=(("aggregator", "any"), ("outsider", "any")), methods=("Federated",),
        released=False,
        why=(
            "its loss is that of sums of which nobody sees a part: give "
            "method=Federated(aggregate=...) and attacker='aggregator' or 'outsider'; a run in one "
            "process holds all keys, so it is a simulation (release=False)"
        ),
    ),
    NoiseRow(
        label="discrete", part="Discrete", title="whole numbers in a secure sum", colour="#6699CC",
        marker="H", attackers=(("aggregator", "any"),), methods=("Federated",), loss="zcdp",
        released=False,
        why=(
            "its loss is that of sums of which nobody sees a part: give "
            "method=Federated(aggregate=...) and Protect(..., attacker='aggregator'); a run in one "
            "process holds all keys, so it is a simulation (release=False)"
        ),
    ),
    NoiseRow(
        label="zip_dl", part="ZeroSum", title="Zip-DL", colour="#DDCC77", marker=">",
        attackers=RECEIVERS, methods=("ZipDL",), released=False,
        why=(
            "it is Zip-DL's (method=ZipDL()), whose loss is finite only for nodes, and for "
            "gradients that do not depend on what these cannot see: give "
            "Protect(..., attacker='node', gradients='view'), an assumption that captions state; "
            "a run in one process holds all keys, so it is a simulation (release=False)"
        ),
    ),
)  # fmt: skip
"""One row a design that records may name."""

SAMPLERS = ("Random", "Full", "Cyclic", "Clients", "Poisson")
"""Samplers of the package; what one claims of its batches decides what it joins."""

REFERENCES = {"non_private": ("non-private", "#000000", "x")}
"""Title, colour and marker of runs without noise."""

_CORRELATED = NoiseRow(
    label="covariance", part="Correlated", title="", colour="", marker="", why=_SHARED
)
_CUSTOM = MethodRow(
    part="", one_answer=True, why="its sensitivity is of plain steps: give Sgd(step_size, decay)"
)


def packaged(kind: type) -> bool:
    """Return whether a class is the package's, and not a user's own.

    Args:
        kind: A part's class.
    """
    return kind.__module__.startswith("dpjax.")


def custom(config: Any) -> tuple[str, ...]:
    """Return the names of a config's parts that are a user's own: a sketch in a method, say.

    Args:
        config: A config, on whose parts' word a guarantee relies. What an optimizer makes of noisy
            means is post-processing; its class says how far it steps.
    """
    classes = [type(part) for part in (config, config.optimizer)]
    own = [kind.__name__ for kind in classes if not packaged(kind)]
    return tuple(dict.fromkeys(_foreign(config.method, config.noise, config.sampler) + own))


def _foreign(*parts: Any) -> list[str]:
    names: list[str] = []
    for part in parts:
        kind = type(part)
        if isinstance(part, tuple | list):
            names += _foreign(*part)
        elif dataclasses.is_dataclass(part):
            names += [] if packaged(kind) else [kind.__name__]
            names += _foreign(*(getattr(part, field.name) for field in dataclasses.fields(part)))
        elif callable(part) and not getattr(part, "__module__", "").startswith("dpjax."):
            name = getattr(part, "__name__", kind.__name__)
            names.append(name if name.isidentifier() else "function")
    return names


def _named(part: Any, rows: Any, default: Any) -> Any:
    by_name = {row.part: row for row in reversed(rows)}
    for kind in type(part).__mro__:
        if kind.__name__ in by_name and packaged(kind):
            return by_name[kind.__name__]
    return default


def method(part: Any) -> MethodRow:
    """Return the row of a method; one that wraps another joins what that one does.

    Args:
        part: A method, or one placed on a network.
    """
    row = _named(part, METHODS, _CUSTOM)
    if row.wraps is None:
        return row
    return dataclasses.replace(method(getattr(part, row.wraps)), part=row.part)


def noise(part: Any) -> NoiseRow:
    """Return the row of a noise design.

    Args:
        part: A noise design.
    """
    return _named(part, NOISES, _CORRELATED)


def check(config: Any) -> None:
    """Refuse parts that do not go together.

    Args:
        config: A config whose parts have checked themselves.

    Raises:
        ValueError: Naming the parts, why they do not, and the remedy.
    """
    _check_sampler(config)
    optimizer, name = _validate.shown(config.optimizer), type(config.method).__name__
    method_row, noise_row = method(config.method), noise(config.noise)
    plain = any(
        kind.__name__ == "Sgd" and packaged(kind) for kind in type(config.optimizer).__mro__
    )
    constant = plain and config.optimizer.decay == "constant"
    steps = method_row.steps
    if noise_row.by_round and config.method.sensitivity is not None and steps == "any":
        steps = "plain"
    if not {"any": True, "plain": plain, "constant": constant}[steps]:
        raise ValueError(
            f"optimizer is {optimizer}, which method {name} does not join: {method_row.why}"
        )
    _check_variance(config, method_row, noise_row)
    aggregate = getattr(getattr(config.method, "exchange", None), "aggregate", None)
    if getattr(aggregate, "whole", False) and not config.integer_encoded:
        raise ValueError(
            f"method has aggregate {aggregate}, which adds up whole numbers: give noise "
            "plans.integers.Discrete, or algorithms.exchange.Trusted"
        )
    if config.noise is None:
        return
    part = type(config.noise).__name__
    _check_bound(config.protect, method_row, noise_row, part)
    _check_accountant(config.budget.accountant, noise_row.loss, part)
    known = packaged(type(config.noise)) or noise_row is not _CORRELATED
    if method_row.noises is not None and known and noise_row.part not in method_row.noises:
        raise ValueError(f"noise is {part}, which method {name} does not join: {method_row.why}")
    check_noise(config.noise, config.method, config.protect)
    if config.protect.gradients == "view" and not constant:
        raise ValueError(
            f"optimizer is {optimizer} with gradients 'view', whose loss is that of steps "
            f"of constant size: {noise_row.why}"
        )
    if config.release and not noise_row.released:
        raise ValueError(f"release is True with noise {part}: {noise_row.why}")


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
    row, kind = noise(part), type(joined).__name__
    name = row.part if part is None else type(part).__name__
    attackers = OWN_KEYS if own else row.attackers
    if row.methods is not None and method(joined).part not in row.methods:
        raise ValueError(f"method is {kind}, which noise {name} does not join: {row.why}")
    if row.methods is None and joined.sensitivity is not None and not row.by_round:
        raise ValueError(
            f"method is {kind}, whose payload is no answer of the query, which noise {name} does "
            "not join: its loss is that of clipped sums; emit the query's total"
        )
    if (protect.attacker, protect.gradients) not in attackers:
        raise ValueError(
            f"protect has attacker {protect.attacker!r} and gradients {protect.gradients!r}, for "
            f"which noise {name} has no finite loss that is known: {row.why}"
        )


def _check_sampler(config: Any) -> None:
    """Refuse parts that a sampler does not join, by what it claims of its batches."""
    part, protect = config.sampler, config.protect
    if protect.unit == "client" and getattr(part, "turns", None) is None:
        raise ValueError(
            f"relation is {protect.relation!r} with sampler {_validate.shown(part)}, which "
            "knows no clients: use samplers.Clients, or protect records or agents"
        )
    rules, claim = [], ""
    if part.capacity is not None:
        rules = _rules_of_rates(config)
        claim = ", for which batches drawn by coin flips amplify nothing that is accounted here"
    elif part.participation is not None:
        why = "an agent takes part in every round: protect records"
        rules = [(protect.unit != "agent", f"relation {protect.relation!r}", why)]
    for holds, culprit, why in rules:
        if not holds:
            shown = _validate.shown(part)
            raise ValueError(f"sampler is {shown} with {culprit}{claim}; {why}, or use Random")


def _rules_of_rates(config: Any) -> list[tuple[bool, str, str]]:
    """What amplification asks of other parts: whether it holds, what breaks it, and why."""
    protect, name = config.protect, type(config.method).__name__
    accountant, each = "gdp", None
    if config.budget is not None:
        accountant, each = config.budget.accountant, config.budget.each
    # Designs that do not say so may depend on earlier rounds, or be no covariance.
    fresh = config.noise is None or not getattr(config.noise, "temporal", True)
    bands = getattr(config.noise, "bands", None) or math.inf
    apart = bands <= config.sampler.pattern(config.rounds).separation
    few = (
        "give a covariance over agents that is fresh in every round, a strategy of few bands "
        "(noise.PrefixSum(bands=b) and Poisson(..., separation=b))"
    )
    carried = "what it sends carries a record into rounds that did not draw it"
    zeroed, outside = protect.relation == "zero_out_record", protect.attacker == "outsider"
    return [
        (zeroed, f"relation {protect.relation!r}", "protect zero_out_record"),
        (outside, f"attacker {protect.attacker!r}", "whoever takes part may know its batches"),
        (protect.gradients == "any", "gradients 'view'", "batches are unknown, too"),
        (config.method.sensitivity is None, f"method {name}", carried),
        (fresh or apart, f"noise {config.label!r}", few),
        (accountant == "gdp", f"accountant {accountant!r}", "give 'gdp', here numerical"),
        (each is None, "one epsilon an agent", "give one for all"),
        (not config.release, "release=True", "its finite precision is not priced"),
    ]


def _check_variance(config: Any, method_row: MethodRow, noise_row: NoiseRow) -> None:
    """Refuse an optimizer that uses the noise's variance where the plan does not know it."""
    if not getattr(config.optimizer, "uses_noise", False):
        return
    sums, name = method_row.noisy_means == "sums", type(config.noise).__name__
    if method_row.noisy_means is None:
        why = (
            f"method {type(config.method).__name__} gives its optimizer something else than the "
            "agents' noisy means"
        )
    elif noise_row.by_round or (sums and getattr(config.noise, "temporal", False)):
        why = f"the variance of noise {name}{' in sums' if sums else ''} changes by round"
    else:
        return
    raise ValueError(
        f"optimizer is {_validate.shown(config.optimizer)}, which uses the noise's variance, but "
        f"{why}: make the optimizer with a variance that you know, uses_noise=False"
    )


def _check_bound(protect: Any, method_row: MethodRow, noise_row: NoiseRow, name: str) -> None:
    """Refuse what bounds gradients for other noise, or other payloads, than it joins."""
    gap = protect.gradient_gap
    if gap is not None and noise_row.by_round and not method_row.one_answer:
        raise ValueError(
            f"protect has gradient_gap {gap}, which says how far one gradient moves, and the "
            "method combines several: clip what it combines (clip_norm)"
        )
    if not noise_row.by_round and (protect.norm != "l2" or gap is not None):
        raise ValueError(
            f"protect has norm {protect.norm!r} and gradient_gap {gap}, which noise {name} does "
            "not join: its loss is of gradients clipped in L2; give Protect(relation, clip_norm), "
            "or noise of plans.scheduled"
        )


def _check_accountant(accountant: str, loss: str, part: str) -> None:
    """Refuse an accountant of other noise."""
    if loss == (accountant if accountant in ("pure", "zcdp") else "gaussian"):
        return
    remedy = {
        "pure": "Budget(epsilon, accountant='pure'): its noise is Laplace's, without a delta",
        "zcdp": "Budget(epsilon, delta, accountant='zcdp'): its noise is whole numbers",
        "gaussian": "Budget(epsilon, delta), of accountant 'gdp' or 'rdp': its noise is real "
        "Gaussian",
    }
    raise ValueError(f"accountant is {accountant!r} with noise {part}; give {remedy[loss]}")
