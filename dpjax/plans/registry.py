"""Methods, noise designs and samplers by row: what each builds, what it joins, and why no more.

`dpjax.plans.joins` holds configs to them. Rows name parts and read none of them, so that figures
can ask for labels and colours without loading anything else. A part that has no row is a user's
own: it is what its nearest named class is (a subclass of `Correlated`, say), or a method of one
payload an agent, for which an outsider's loss holds because messages depend on data through the
noisy payload alone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["METHODS", "NOISES", "SAMPLERS", "MethodRow", "NoiseRow", "Rule", "SamplerRow"]

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
        builds: What agents compute and send.
        view: What accounting calls it.
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
    builds: str
    view: str
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
        builds: The noise.
        view: What accounting calls it.
        title: What legends say.
        colour: In figures, from Okabe and Ito's and Tol's palettes: colour-blind readers can tell.
        marker: So that a figure also reads in grey.
        attackers: Pairs of attacker and gradients for which its loss is known and finite.
        methods: Names of the methods it joins; None is all whose payload is one an agent.
        pure: True where its loss is pure, epsilon at every delta.
        concentrated: True where its loss is known in zCDP alone.
        by_round: True where its scale changes by round and its loss follows from how far the
            payload moves, which any method may say of its own: clipped in the norm that the noise
            asks for, or under an assumed gap.
        released: Whether a run in one process may be a release.
        why: Why no others, with the remedy.
    """

    label: str
    part: str | None
    builds: str
    view: str
    title: str
    colour: str
    marker: str
    attackers: tuple[tuple[str, str], ...] = OUTSIDER
    methods: tuple[str, ...] | None = None
    by_round: bool = False
    pure: bool = False
    concentrated: bool = False
    released: bool = True
    why: str = "its loss is an outsider's: give attacker='outsider' and gradients='any'"


class Rule(NamedTuple):
    """What a sampler asks of the parts that it joins.

    Attributes:
        holds: Of a config, whether it is kept.
        culprit: Of a config, what breaks it, for the message.
        why: Why, with the remedy.
    """

    holds: Callable[[Any], bool]
    culprit: Callable[[Any], str]
    why: str


@dataclass(frozen=True, kw_only=True)
class SamplerRow:
    """A row of `SAMPLERS`.

    Attributes:
        part: Name of its class.
        builds: Which records take part in a round.
        claims: What of that makes a guarantee better: "rates" (secret batches amplify), "pattern"
            (a record comes only at times) or "nothing". All that claim the same, a user's own
            samplers among them, are held to the same rules.
        rules: What it asks of other parts.
        unknown: What a message says of a config that breaks one.
    """

    part: str
    builds: str
    claims: Literal["rates", "pattern", "nothing"] = "nothing"
    rules: tuple[Rule, ...] = ()
    unknown: str = ""


_BY_ROUND = ("Laplace", "Normal")
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
    MethodRow(
        part="DSGD",
        builds="x <- W^K (x + opt(noisy sum)); K > 1 is Muffliato",
        view="views.dsgd(W), views.muffliato(W, K)",
        noisy_means="own",
        one_answer=True,
    ),
    MethodRow(
        part="DiSK",
        builds="x <- W^K (x + opt(filtered sum)), gradients ahead of x combined before the clip",
        view="views.dsgd(W), of filtered sums",
    ),
    MethodRow(
        part="PMLF",
        builds="x <- W^K (x + opt(sum)), gradients at the last models averaged before the clip",
        view="views.dsgd(W)",
        noisy_means="own",
    ),
    MethodRow(
        part="Average",
        builds="another method, and the average of its models over rounds",
        view="the method's",
        wraps="method",
    ),
    MethodRow(
        part="ZipDL",
        builds="x + opt(sum) to every neighbour under another noise, which sum to zero",
        view="views.zip_dl(W)",
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
        builds="a server's x + opt(sum / present), through a sketch or not",
        view="none; the sum's",
        noisy_means="sums",
        noises=("Aggregate", "Discrete", "Independent", "PrefixSum"),
        why=(
            "its agents know one model, and hide what they send in the sum: give "
            "noise=plans.aggregate.Aggregate(), or noise.Independent() or PrefixSum() where single "
            "messages are seen"
        ),
    ),
    *(
        MethodRow(
            part=part,
            builds=builds,
            view=view,
            noises=_BY_ROUND,
            steps="plain",
            one_answer=True,
            why=_MODELS,
        )
        for part, builds, view in (
            (
                "Tracking",
                "z = x + noise; y += beta (z - W z); x <- W z + opt(y + grad f(z))",
                "none; pure.epsilon of the step before over the noise",
            ),
            ("DPOP", "x <- box(W z + opt(grad f(W z))), z = x + noise", "as Tracking"),
            ("DGD", "x <- W z + opt(grad f(x)), z = x + noise", "moves of models, by recursion"),
            (
                "GradientTracking",
                "x <- W x~ + opt(y), y <- W y~ + grad f(x+) - grad f(x)",
                "moves of models and trackers, by recursion",
            ),
            (
                "PPDOAGT",
                "s+ = W s~ - opt(grad f(x)), x+ = W x~ - (s+ - s)",
                "moves of models and trackers, by recursion",
            ),
        )
    ),
    *(
        MethodRow(
            part=part,
            builds=builds,
            view="none",
            noises=(),
            steps="plain",
            why=_BARE,
            unprotected=unprotected,
        )
        for part, builds, unprotected in (
            ("EXTRA", "(I + W) x_{k+1} - (I + W)/2 x_k + opt(g_{k+1}) - opt(g_k)", _NO_NOISE),
            ("NIDS", "(I + W)/2 (2 x_k - x_{k-1} + opt(g_k) - opt(g_{k-1}))", _NO_NOISE),
            (
                "CorrelatedRandomness",
                "tracking with random weights and steps",
                "weights and steps are random, and no epsilon follows; whoever sees all links can "
                "solve for gradients",
            ),
            ("Encrypted", "x + sum b_ij b_ji (x_j - x_i) + opt(grad f(x))", _CIPHERED),
            ("EncryptedOnLinks", "Encrypted, on a network", _CIPHERED),
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
        label="independent", part="Independent", builds="noise of its own at every agent",
        view="views.dsgd(W)", title="LDP", colour="#E69F00", marker="o", attackers=OWN_KEYS,
        why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="pairwise", part="Pairwise", builds="covariance s I + c L of one seed",
        view="views.dsgd(W, covariance=R)", title="DECOR (pairwise)", colour="#009E73",
        marker="s", why=_SHARED,
    ),
    NoiseRow(
        label="whisper", part="Whisper", builds="covariance over agents, one step ahead",
        view="views.dsgd(W, covariance=R)", title="Whisper", colour="#0072B2", marker="^",
        why=_SHARED,
    ),
    NoiseRow(
        label="whisper_horizon", part="Whisper", builds="covariance over agents, all rounds ahead",
        view="views.dsgd(W, covariance=R)", title="Whisper, horizon-aware", colour="#D55E00",
        marker="D", why=_SHARED,
    ),
    NoiseRow(
        label="central", part=None, builds="the trusted server's", view="none",
        title="CDP (trusted server)", colour="#CC79A7", marker="v", attackers=(), methods=(),
    ),
    NoiseRow(
        label="anti_pgd", part="AntiPgd", builds="strategy over rounds: noise that is taken back",
        view="views.dsgd(W, C)", title="Anti-PGD", colour="#56B4E9", marker="P",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="prefix_sum", part="PrefixSum", builds="strategy for prefix sums",
        view="views.dsgd(W, C)", title="D-MF", colour="#999933", marker="X",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="mafalda", part="Mafalda", builds="strategy for what the network makes of it",
        view="views.dsgd(W, C)", title="MAFALDA", colour="#882255", marker="p",
        attackers=OWN_KEYS, why=_OWN_SECRETS,
    ),
    NoiseRow(
        label="spacetime", part="SpaceTime", builds="covariance over agents, strategy over rounds",
        view="views.dsgd(W, C, R)", title="space and time", colour="#332288", marker="*",
        why=_SHARED,
    ),
    NoiseRow(
        label="pair_keys", part="PairKeys", builds="own noise and a secret on every link",
        view="views.decor(W, s, c).pndp(nodes)", title="DECOR, keys at both ends",
        colour="#44AA99", marker="<", attackers=KEYS_APART, methods=("DSGD",), released=False,
        why=(
            "its loss is known for D-SGD (method=DSGD()), and with gradients='view' for steps of "
            "constant size (optimizer=Sgd(step_size)); a run in one process holds all keys, so it "
            "is a simulation (release=False): in a release every agent draws its own with "
            "transforms.edges"
        ),
    ),
    NoiseRow(
        label="laplace", part="Laplace", builds="Laplace noise, its scale a schedule",
        view="none; epsilons add up", title="Laplace", colour="#AA4499", marker="h",
        by_round=True, pure=True, released=False, attackers=OWN_KEYS, why=_SCHEDULED,
    ),
    NoiseRow(
        label="normal", part="Normal", builds="Gaussian noise, its deviation a schedule",
        view="none; squares of mu add up", title="Gaussian, by schedule", colour="#117733",
        marker="d", by_round=True, released=False, attackers=OWN_KEYS, why=_SCHEDULED,
    ),
    NoiseRow(
        label="aggregate", part="Aggregate", builds="shares of the noise that a sum needs",
        view="none; the sum's", title="in a secure sum", colour="#661100", marker="8",
        attackers=(("aggregator", "any"), ("outsider", "any")), methods=("Federated",),
        released=False,
        why=(
            "its loss is that of sums of which nobody sees a part: give "
            "method=Federated(aggregate=...) and attacker='aggregator' or 'outsider'; a run in one "
            "process holds all keys, so it is a simulation (release=False)"
        ),
    ),
    NoiseRow(
        label="discrete", part="Discrete", builds="shares of whole numbers, discrete Gaussian",
        view="none; the sum's", title="whole numbers in a secure sum", colour="#6699CC",
        marker="H", attackers=(("aggregator", "any"),), methods=("Federated",), concentrated=True,
        released=False,
        why=(
            "its loss is that of sums of which nobody sees a part: give "
            "method=Federated(aggregate=...) and Protect(..., attacker='aggregator'); a run in one "
            "process holds all keys, so it is a simulation (release=False)"
        ),
    ),
    NoiseRow(
        label="zip_dl", part="ZeroSum", builds="noises of a sender that sum to zero",
        view="views.zip_dl(W).pndp(nodes)", title="Zip-DL", colour="#DDCC77", marker=">",
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


def _within(config: Any) -> bool:
    """Whether the bands of a strategy keep a record's draws apart; the plan looks at the matrix."""
    bands = getattr(config.noise, "bands", None)
    return bands is not None and bands <= config.sampler.pattern(config.rounds).separation


_FLIPPED = (
    Rule(
        lambda c: c.protect.relation == "zero_out_record",
        lambda c: f"with relation {c.protect.relation!r}",
        "protect zero_out_record, or use Random",
    ),
    Rule(
        lambda c: c.protect.attacker == "outsider",
        lambda c: f"with attacker {c.protect.attacker!r}",
        "whoever takes part may know its batches: use Random",
    ),
    Rule(
        lambda c: c.protect.gradients == "any",
        lambda c: f"with gradients {c.protect.gradients!r}",
        "what the attacker cannot see is not all that is unknown here: use Random",
    ),
    Rule(
        lambda c: not hasattr(c.method, "sensitivity"),
        lambda c: f"with method {type(c.method).__name__}",
        "what it sends carries a record into rounds that did not draw it: use Random",
    ),
    Rule(
        # Designs that do not say so may depend on earlier rounds, or be no covariance.
        lambda c: c.noise is None or not getattr(c.noise, "temporal", True) or _within(c),
        lambda c: f"with noise {c.label!r}",
        "use a covariance over agents that is fresh in every round, a strategy of few bands "
        "(noise.PrefixSum(bands=b) and Poisson(..., separation=b)), or Cyclic",
    ),
    Rule(
        lambda c: c.budget is None or c.budget.accountant == "gdp",
        lambda c: f"with accountant {c.budget and c.budget.accountant!r}",
        "its rule is for Gaussian losses: use 'gdp', the exact one, here numerically",
    ),
    Rule(
        lambda c: c.budget is None or c.budget.each is None,
        lambda c: "with one epsilon an agent",
        "give one for all",
    ),
    Rule(
        lambda c: not c.release,
        lambda c: "with release=True",
        "what finite precision costs beside secret batches is not derived: use Random",
    ),
)
_DEALT = (
    Rule(
        lambda c: c.protect.unit != "agent",
        lambda c: f"under relation {c.protect.relation!r}",
        "an agent takes part in every round: use Random, or protect records",
    ),
)

SAMPLERS = (
    SamplerRow(part="Random", builds="distinct records, drawn in every round"),
    SamplerRow(part="Full", builds="all records, in every round"),
    SamplerRow(
        part="Cyclic", builds="all records in turn, each a fixed number of rounds apart",
        claims="pattern", rules=_DEALT,
    ),
    SamplerRow(
        part="Clients", builds="clients in turn, each with another of its records",
        claims="pattern", rules=_DEALT,
    ),
    SamplerRow(
        part="Poisson", builds="each record by a coin flip of its own", claims="rates",
        rules=_FLIPPED,
        unknown=", for which batches drawn by coin flips amplify nothing that is accounted here",
    ),
)  # fmt: skip
"""One row a sampler."""

REFERENCES = {"non_private": ("non-private", "#000000", "x")}
"""Title, colour and marker of runs without noise."""

_CORRELATED = NoiseRow(
    label="covariance", part="Correlated", builds="F (C^-1 Z)_t", view="views.dsgd(W, C, R)",
    title="", colour="", marker="", why=_SHARED,
)  # fmt: skip
_OWN = MethodRow(part="", builds="a user's own", view="views.linear(...)")


def packaged(kind: type) -> bool:
    """Return whether a class is the package's, and not a user's own.

    Args:
        kind: A part's class.
    """
    return kind.__module__.startswith("dpjax.")


def own(part: Any) -> bool:
    """Return whether a part is a user's own, or holds one: a sketch in a method, say.

    Args:
        part: A part, or a value of one of its fields.
    """
    kind = type(part)
    if isinstance(part, tuple | list):
        return any(map(own, part))
    if dataclasses.is_dataclass(kind):
        values = (getattr(part, field.name) for field in dataclasses.fields(part))
        return not packaged(kind) or any(map(own, values))
    # Numbers, words and arrays do nothing; functions are by whom their module says.
    return callable(part) and not getattr(part, "__module__", "").startswith("dpjax.")


def _named(part: Any, rows: Any, otherwise: Any) -> Any:
    by_name = {row.part: row for row in reversed(rows)}
    for kind in type(part).__mro__:
        if kind.__name__ in by_name and packaged(kind):
            return by_name[kind.__name__]
    return otherwise


def method(part: Any) -> MethodRow:
    """Return the row of a method; one that wraps another joins what that one does.

    Args:
        part: A method, or one placed on a network.
    """
    row = _named(part, METHODS, _OWN)
    if row.wraps is None:
        return row
    inner = method(getattr(part, row.wraps))
    return dataclasses.replace(
        row,
        noises=inner.noises,
        steps=inner.steps,
        noisy_means=inner.noisy_means,
        one_answer=inner.one_answer,
        why=inner.why,
    )


def noise(part: Any) -> NoiseRow:
    """Return the row of a noise design.

    Args:
        part: A noise design.
    """
    return _named(part, NOISES, _CORRELATED)


def _claimed(part: Any) -> str:
    """What a sampler claims of its batches."""
    if part.capacity is not None:
        return "rates"
    return "nothing" if part.participation is None else "pattern"


def sampler(part: Any) -> SamplerRow:
    """Return the row of a sampler: by what it claims, then by its name.

    Args:
        part: A sampler.
    """
    rows = [row for row in SAMPLERS if row.claims == _claimed(part)]
    return _named(part, rows, rows[0])
