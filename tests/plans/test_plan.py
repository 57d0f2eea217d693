"""The plan cannot be made to understate: every broken part is refused or seen."""

import dataclasses
import re

import numpy as np
import optax
import pytest
from scipy.stats import norm

import dpjax as dp
from dpjax import _validate
from dpjax.data import partition
from dpjax.engine.step import Statics
from dpjax.learning import samplers
from dpjax.mechanism import banded, design, temporal
from dpjax.mechanism.participation import Participation
from dpjax.mechanism.strategy import inverse_of
from dpjax.plans import calibration, noise, plan
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.topology import graphs, mixing
from dpjax.transforms.rounds import applied
from tests.support import diagonal, make_config, retargeted, with_factor


def oracle_delta(mu, epsilon):
    """Delta of the Gaussian mechanism, Balle and Wang 2018, Theorem 8, as printed there."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def oracle_mu(result, sensitivity):
    """Whitened distance of all T rounds for the worst agent and start, from a dense covariance."""
    factor = result.factor.astype(np.float64)
    rounds = result.config.rounds
    n = result.agents
    over_rounds = np.eye(rounds)
    if result.strategy is not None:
        inverse = np.linalg.inv(result.strategy)
        over_rounds = inverse @ inverse.T
    covariance = np.kron(over_rounds, factor @ factor.T)
    epochs, separation = result.config.participation or (rounds, 1)
    worst = 0.0
    for agent in range(n):
        for start in range(rounds - (epochs - 1) * separation):
            # Equal shifts are the worst where C'C is not negative, as in all of these designs.
            taking = np.zeros(rounds)
            taking[start :: separation if epochs > 1 else rounds] = sensitivity
            shift = np.kron(taking, np.eye(n)[agent])
            worst = max(worst, float(np.sqrt(shift @ np.linalg.solve(covariance, shift))))
    return worst


@pytest.mark.parametrize(
    ("name", "relation"),
    diagonal(noise.LABELS[1:], ["replace_agent", "replace_record", "zero_out_record"]),
)
def test_guarantee_is_what_dense_oracle_computes(network, name, relation):
    times = 1 if relation == "zero_out_record" else 2
    training_plan = plan.make(make_config(design=name, relation=relation), network)
    mu = oracle_mu(training_plan, times * training_plan.config.protect.clip_norm)
    stated = training_plan.guarantee
    assert oracle_delta(mu, stated.epsilon) <= stated.delta
    # Tight as well: one percent less noise would break the guarantee.
    assert oracle_delta(mu * 1.01, stated.epsilon) > stated.delta
    np.testing.assert_allclose(stated.mu, mu, rtol=1e-6)
    assert stated.relation == relation and stated.rounds == 20 and stated.attacker == "outsider"


def test_budget_of_each_agent_is_kept(network):
    epsilons = (2.0, 4.0, 4.0, 8.0, 8.0, 16.0)
    training_plan = plan.make(make_config(epsilon=epsilons), network)
    diagonal = np.diag(np.linalg.inv(training_plan.covariance()))
    for agent, epsilon in enumerate(epsilons):
        mu = (
            2
            * training_plan.config.protect.clip_norm
            * np.sqrt(training_plan.config.rounds * diagonal[agent])
        )
        assert oracle_delta(mu, epsilon) <= training_plan.config.budget.delta


@pytest.mark.mutant
def test_mis_scaled_noise_is_refused(network):
    training_plan = plan.make(make_config(), network)
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        with_factor(training_plan, np.float32(0.99) * training_plan.factor)
    with_factor(training_plan, np.float32(1.01) * training_plan.factor)


def counting(monkeypatch, module, name):
    """The first arguments of all calls of a function, by whatever name modules have it."""
    function = getattr(module, name)
    observed = []

    def counted(*args, **options):
        observed.append(args[0] if args else options)
        return function(*args, **options)

    monkeypatch.setattr(module, name, counted)
    return observed


def test_plan_checks_and_hashes_its_network_once(network, monkeypatch):
    targets = counting(monkeypatch, calibration.Target, "__post_init__")
    checks = counting(monkeypatch, mixing, "check_mixing")
    weights = counting(monkeypatch, _validate, "check_weights")
    digests = counting(monkeypatch, mixing, "fingerprint")
    training_plan = plan.make(make_config(design="whisper_horizon"), network)
    assert [len(calls) for calls in (targets, checks, weights, digests)] == [1, 1, 1, 1]
    assert (
        training_plan.target is targets[0] and training_plan.mixing is training_plan.target.mixing
    )


@pytest.mark.parametrize("part", [noise.OneStep(0.37), noise.BandedInverse(5)])
def test_no_strategy_s_sensitivity_is_computed_twice(network, part, monkeypatch):
    """Of C as it is designed, and as runs apply it in float32 and in float64."""
    observed = counting(monkeypatch, temporal, "sensitivity")
    training_plan = plan.make(make_config(noise=part, rounds=23), network)
    assert len({matrix.tobytes() for matrix in observed}) == len(observed) == 3
    again = plan.make(training_plan.config, network)
    assert len(observed) == 3 and again.guarantee == training_plan.guarantee


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("field", "value"),
    [("clip_norm", 0.6), ("rounds", 21), ("relation", "zero_out_record"), ("delta", 1e-6)],
)
def test_swapped_config_is_refused(network, field, value):
    training_plan = plan.make(make_config(), network)
    changed = make_config(**{field: value})
    with pytest.raises(ValueError, match="guarantee"):
        retargeted(training_plan, config=changed)


@pytest.mark.mutant
def test_swapped_relation_in_guarantee_is_refused(network):
    training_plan = plan.make(make_config(relation="zero_out_record"), network)
    stronger = training_plan.guarantee.replace(relation="replace_record")
    with pytest.raises(ValueError, match="guarantee.relation"):
        dataclasses.replace(training_plan, guarantee=stronger)
    # Noise for zero-out, everything labelled replacement: the audit computes twice the mu.
    config = make_config(relation="replace_record")
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        retargeted(training_plan, config=config, guarantee=stronger)


@pytest.mark.mutant
def test_guarantee_understated_is_refused(network):
    """By the record itself where it contradicts itself, by the audit where it does not."""
    training_plan = plan.make(make_config(), network)
    stated = training_plan.guarantee
    with pytest.raises(ValueError, match="exact epsilon"):
        stated.replace(epsilon=7.9)
    for weaker in (
        stated.replace(mu=stated.mu * 0.99),
        stated.replace(mu=stated.mu * 0.9, epsilon=7.9),
    ):
        with pytest.raises(ValueError, match="guarantee states (epsilon|mu)"):
            dataclasses.replace(training_plan, guarantee=weaker)


def test_noise_in_non_private_plan_and_none_in_private_one(network):
    training_plan = plan.make(make_config(design="non_private"), network)
    assert not training_plan.factor.any() and not np.isfinite(training_plan.guarantee.epsilon)
    private = plan.make(make_config(), network)
    with pytest.raises(ValueError, match="guarantee"):
        dataclasses.replace(training_plan, guarantee=private.guarantee)
    with pytest.raises(ValueError):
        with_factor(private, training_plan.factor)


def test_float32_factor_of_badly_conditioned_design_keeps_bound():
    matrix = mixing.metropolis_hastings(graphs.complete(20))
    training_plan = plan.make(make_config(rounds=100), matrix)
    bound = training_plan.target.precision_bound(None)
    diagonal = np.diag(np.linalg.inv(training_plan.covariance()))
    assert diagonal.max() <= bound
    assert diagonal.max() >= 0.98 * bound


def test_design_of_another_network_or_budget_is_refused(network):
    bound = float(calibration.Target(make_config(), network).precision_bound(None))
    other = mixing.metropolis_hastings(graphs.ring(6))
    with pytest.raises(ValueError, match="mixing|network"):
        plan.make(make_config(), network, design=design.Design.whisper(other, bound))
    with pytest.raises(ValueError, match="bound|budget"):
        plan.make(make_config(), network, design=design.Design.whisper(network, 2 * bound))
    with pytest.raises(ValueError, match="design is 'pairwise'"):
        plan.make(make_config(), network, design=design.Design.pairwise(network, bound))
    with pytest.raises(ValueError, match="horizon"):
        short = design.Design.whisper(network, bound, horizon=5)
        plan.make(make_config(design="whisper_horizon"), network, design=short)


def _covariance(scale):
    matrix = np.eye(6) + scale * np.ones((6, 6))
    return {"noise": noise.Covariance(matrix, name="mine")}


_DEALT = {"design": "spacetime", "relation": "zero_out_record"}


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "changes", "others"),
    [
        ("max_variance", {}, {"max_variance": 5.0}),
        ("max_variance", {"max_variance": 1.1}, {"max_variance": None}),
        ("max_variance", {"max_variance": 1.1}, {"max_variance": 1.2}),
        ("step_sizes", {"design": "whisper_horizon"}, {"step_decay": "sqrt"}),
        ("step_sizes", {"design": "whisper_horizon", "step_decay": "sqrt"}, {"step_decay": 0.9}),
        ("participation", _DEALT | {"participation": (4, 5)}, {"participation": (5, 4)}),
        ("matrix", _covariance(0.1), _covariance(0.2)),
    ],
)
def test_design_of_what_config_does_not_say_is_refused(network, name, changes, others):
    config = make_config(**changes)
    other = make_config(**changes | others)
    argument = plan.make(config, network).design
    assert plan.make(config, network, design=argument).design is argument
    with pytest.raises(ValueError, match=f"design is .* of {name} .*, the config's is "):
        plan.make(other, network, design=argument)
    # Files from before the options held it have less to compare.
    if name != "step_sizes":
        options = {key: value for key, value in argument.options.items() if key != name}
        older = dataclasses.replace(argument, options=options)
        assert plan.make(config, network, design=older).design is older


@pytest.mark.parametrize("horizon", [5, 50])
def test_horizon_beside_run_s_takes_its_own_step_sizes(network, horizon):
    config = make_config(design="whisper_horizon", horizon=horizon, step_decay="sqrt")
    training_plan = plan.make(config, network)
    bound = training_plan.target.precision_bound(None)
    steps = 1 / np.sqrt(np.arange(1, horizon + 1))
    expected = design.Design.whisper(network, bound, horizon=horizon, step_sizes=steps)
    np.testing.assert_array_equal(training_plan.design.covariance, expected.covariance)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design": "central"}, "design is 'central'; choose one of"),
        ({"design": "nothing"}, "design is 'nothing'; choose one of"),
        ({"relation": "replace"}, "relation is 'replace'"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": ()}, "epsilon is empty"),
        ({"epsilon": "10"}, "epsilon is '10'"),
        ({"epsilon": 10**400}, "epsilon is 1000"),
        ({"allow_unsound": "no"}, "allow_unsound is 'no'; give True or False"),
        ({"release": None}, "release is missing"),
        ({"clip_norm": 1e10}, "clip_norm is 10000000000.0"),
        ({"step_size": 1e300}, "step_size is 1e"),
        ({"rounds": 2**31}, "rounds is 2147483648"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"clip_norm": -1}, "clip_norm is -1"),
        ({"clip_norm": np.inf}, "clip_norm is inf; give clip_norm=1.0"),
        ({"relation": "add_remove_record"}, "give 'zero_out_record' in its place"),
        ({"step_size": float("nan")}, "step_size is nan"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"accountant": "moments"}, "accountant is 'moments'"),
        ({"microbatch": 2}, "microbatch is 2 under relation"),
        ({"design": "non_private", "release": True}, "release is True"),
        ({"sampler": "random"}, "sampler is 'random'; give dp.samplers.Random"),
        ({"optimizer": 0.1}, "optimizer is 0.1; give dp.optimizers.Sgd"),
        ({"optimizer": Sgd}, "optimizer is <class"),
        ({"optimizer": optax.adam(0.1)}, "init_fn>, update=<function .*update_fn>.*of what makes"),
        ({"noise": "whisper"}, "noise is 'whisper'; give dp.noise.Whisper()"),
        ({"noise": noise.Independent}, "give dp.noise.Whisper(), say, or None"),
        ({"noise": Sgd}, "give dp.noise.Whisper(), say, or None"),
        ({"sampler": samplers.Random}, "give dp.samplers.Random(batch_size)"),
        ({"noise": None}, "budget is given and noise is missing"),
        ({"budget": None}, "noise is given and budget is missing"),
        ({"method": None}, "method is missing; give dp.methods.DSGD"),
        ({"participation": (4, 5)}, "an agent takes part in every round"),
        (
            {"participation": (3, 5), "relation": "replace_record"},
            "sampler deals 3 epochs of 5 batches in 20 rounds; give rounds=15",
        ),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "config is missing; give make_plan(dp.Config(...), W)"),
        ({"config": np.eye(2), "mixing": make_config()}, "config is array"),
        ({"mixing": None}, "mixing is None; give the matrix of a graph"),
        ({"mixing": np.full((6, 6), 1 / 6, np.float32)}, "give a matrix in float64 whose rows"),
    ],
)
def test_arguments_of_plan_that_are_something_else(network, changes, message):
    arguments = {"config": make_config(), "mixing": network} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.make(**arguments)


def test_partition_gives_counts_and_names_of_messages():
    shards = partition.iid(12, n=6, seed=0)
    config = make_config(sampler=dp.samplers.Random(3))
    matrix = np.full((6, 6), 1 / 6)
    with pytest.raises(ValueError, match="batch_size is 3, but agent 0 has 2 records"):
        plan.make(config, matrix, counts=shards)
    named = shards._replace(names=tuple("abcdef"))
    with pytest.raises(ValueError, match=r"but agent a \(index 0\) has 2 records"):
        plan.make(config, matrix, counts=named)
    fitting = plan.make(make_config(sampler=dp.samplers.Random(2)), matrix, counts=named)
    np.testing.assert_array_equal(fitting.counts, shards.counts)


def test_design_is_one_of_those_listed(network):
    terms = dict(relation="replace_agent", epsilon=1.0, delta=1e-5, rounds=5, clip_norm=1.0)
    for kind in ("non_private", "central", "prefix_sum"):
        with pytest.raises(ValueError, match=f"kind is '{kind}'; choose one of independent"):
            dp.design(network, kind, **terms)


def test_relation_has_no_default():
    with pytest.raises(TypeError, match="relation"):
        Protect(clip_norm=1.0)


def test_wrong_number_of_budgets(network):
    with pytest.raises(ValueError, match="epsilon has 2 entries for 6 agents"):
        plan.make(make_config(epsilon=(1.0, 2.0)), network)


def test_arrays_cannot_be_changed_after_audit(network):
    training_plan = plan.make(make_config(), network)
    with pytest.raises(ValueError, match="read-only"):
        training_plan.factor *= np.float32(0.5)
    mine = training_plan.factor.copy()
    copied = with_factor(training_plan, mine)
    mine *= 0
    np.testing.assert_array_equal(copied.factor, training_plan.factor)


def test_fingerprint_sees_every_part(network):
    training_plan = plan.make(make_config(), network)
    again = plan.make(make_config(), network)
    other = plan.make(make_config(step_size=0.2), network)
    assert training_plan.fingerprint() == again.fingerprint() != other.fingerprint()


def test_options_of_designs(network):
    groups = ((0, 1, 2), (3, 4, 5))
    training_plan = plan.make(make_config(subgroups=groups), network)
    assert not training_plan.covariance()[:3, 3:].any()
    limited = plan.make(make_config(max_variance=1.5), network)
    bound = limited.target.precision_bound(None)
    assert np.diag(limited.covariance()).max() * bound <= 1.5 * (1 + 1e-5)
    with pytest.raises(ValueError, match="subgroups"):
        plan.make(make_config(), network, design=training_plan.design)
    assert make_config(epsilon=[1.0, 2.0]).budget.epsilon == (1.0, 2.0)


def test_numbers_of_other_libraries_become_plain(network):
    training_plan = plan.make(
        make_config(rounds=np.int64(4), clip_norm=np.float32(0.5), epsilon=np.float64(2)), network
    )
    assert (
        training_plan.fingerprint()
        == plan.make(make_config(rounds=4, clip_norm=0.5, epsilon=2.0), network).fingerprint()
    )


def test_mixing_that_does_not_average_is_refused(network):
    for matrix in (5 * network, -network, np.full_like(network, np.nan)):
        with pytest.raises(ValueError, match="mixing"):
            plan.make(make_config(), matrix)
    training_plan = plan.make(make_config(), network)
    with pytest.raises(ValueError, match="mixing"):
        retargeted(training_plan, mixing=2 * network)


def test_sensitivity_is_that_of_rounded_coefficients():
    """A run multiplies by float32(1 / c): its C is that number's inverse, often larger than c."""
    when = Participation(4, 1, 4)
    larger = 0
    for c in np.linspace(1, 2, 60):
        truth = 1 / float(np.float32(1 / c))
        result = np.sqrt(calibration.partial_energies(c * np.eye(4), when, [4])[0])
        assert truth <= result <= max(truth, c) * (1 + 1e-8)
        larger += truth > c * (1 + 1e-8)
    # What forgets the rounding would understate these.
    assert larger > 10


def _ill_conditioned(rounds):
    """Rows of |C^-1| |C| sum to less than `strategy.WORST`, and columns to a million a round."""
    c = np.tri(rounds)
    c[2:, 1] = np.arange(2, rounds) % 2
    c[1, :2] = 0.4, 1e-6
    return c


STRATEGIES = {
    "ill": _ill_conditioned(64),
    "anti_pgd": np.tri(64),
    "banded_inverse": banded.banded_inverse(Participation(64, 4, 16), 8),
    "one_step": banded.one_lag(Participation(64, 4, 16), 0.99),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("pattern", [(1, 64), (4, 16), (64, 1)])
@pytest.mark.parametrize("mark", [1, 40, 64])
def test_sensitivity_covers_what_inverting_coefficients_loses(name, pattern, mark):
    """The error of each column of C entry by entry, and of each sum of Gram entries."""
    when = Participation(64, *pattern)
    for dtype in (np.float32, np.float64):
        matrix = applied(STRATEGIES[name], dtype)
        sizes = np.abs(matrix)
        lost = (64 * 2.0**-53 * sizes @ np.abs(np.linalg.inv(matrix)) @ sizes)[:mark]
        crossed = sizes[:mark].T @ lost
        gram = np.abs(matrix[:mark].T @ matrix[:mark]) + crossed + crossed.T
        largest = max(gram[np.ix_(rows, rows)].sum() for rows in when.patterns)
        stated = calibration._sensitivity(matrix, inverse_of(matrix), mark, when)
        assert largest <= stated**2
        # The package's own strategies have the margin that they always had.
        usual = temporal.sensitivity(matrix[:mark], when) * (1 + 4 * 64 * 1e6 * 2.0**-52)
        assert name == "ill" or stated == pytest.approx(usual, rel=1e-12)


def test_plan_says_whom_seed_betrays(network):
    text = "agents who share its seed are NOT protected from each other"
    assert text in repr(plan.make(make_config(), network))
    assert text in repr(plan.make(make_config(subgroups=((0, 1, 2), (3, 4, 5))), network))
    for single in ("independent", "mafalda", "non_private"):
        assert text not in repr(plan.make(make_config(design=single), network))


def test_plans_that_differ_are_told_apart_as_they_were_given(network, small):
    first, other, bare = (
        plan.make(make_config(design=design), network)
        for design in ("independent", "mafalda", "non_private")
    )
    with pytest.raises(ValueError, match=r"differ in noise \('independent' and 'mafalda'\)"):
        Statics.of((bare, first, other), (small,))
    pair = [Statics.of(plans, (small,)) for plans in ((bare, first), (first, bare), (first,))]
    assert pair[0] == pair[1] == pair[2]


def test_what_is_no_number_is_stated_by_none(network):
    training_plan = plan.make(make_config(), network)

    class Silent(type(training_plan.noise)):
        def loss(self, target):
            loss = super().loss(target)
            return dataclasses.replace(loss, epsilon=np.full(target.agents, np.nan))

    stated = dataclasses.replace(training_plan.guarantee, custom=("Silent",), secrets=None)
    with pytest.raises(ValueError, match="guarantee states epsilon .* but its noise gives nan"):
        dataclasses.replace(
            training_plan, noise=Silent(**vars(training_plan.noise)), guarantee=stated
        )


def test_one_agent_below_its_own_loss_makes_papers_rule_unsound():
    """Its exact epsilon is above its own budget, and below the largest one."""
    budget = Budget((40.0,) * 5 + (80.0,), 1e-5, "paper", allow_unsound=True)
    config = dataclasses.replace(make_config(design="pairwise"), budget=budget)
    training_plan = plan.make(config, mixing.metropolis_hastings(graphs.ring(6)))
    exact = training_plan.noise.loss(training_plan.target).exact_epsilon
    assert exact[0] > 40 and exact.max() < 80
    stated = training_plan.guarantee
    assert stated.unsound and "FALSE" in stated.caption()
    assert type(stated).from_dict(stated.to_dict()) == stated
    with pytest.raises(ValueError, match="per_agent_epsilon is 40.0 at agent . with mu"):
        stated.replace(unsound=False)
    with pytest.raises(ValueError, match="whose exact epsilon is"):
        stated.replace(accountant="gdp")
