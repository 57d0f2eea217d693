"""Random configs: every plan's guarantee computed again from what colours the noise.

The loss is derived anew, in 40 digits and without the library's accounting: noise of covariance
F F' over agents and (C'C)^-1 over rounds, F the float32 factor and C the strategy as it is applied.
An agent's gradients that move by x_t, |x_t| <= s, in the rounds of a pattern shift the messages by

    mu^2 = [(F F')^-1]_ii sum_ab (C'C)_ab <x_a, x_b>,

at least its value for equal directions and the worst signs, and delta(epsilon) is that of Balle
and Wang (2018), Theorem 8, exact for Gaussian noise whatever gradients depend on.
"""

import itertools

import mpmath
import networkx as nx
import numpy as np
import pytest

from dpjax.plans import noise, plan
from dpjax.topology import mixing
from tests.support import make_config

DESIGNS = [name for name in noise.LABELS if name != "non_private"]
FRESH = ("independent", "pairwise", "whisper", "whisper_horizon")
DIGITS = 40


def network(rng, wide):
    """A mixing matrix of two to five agents; few different ones unless ``wide``."""
    n = int(rng.integers(2, 6)) if wide else int(rng.choice([2, 4]))
    kinds = [nx.path_graph(n), nx.complete_graph(n), nx.star_graph(n - 1)]
    matrix = mixing.metropolis_hastings(kinds[int(rng.integers(3 if wide else 2))])
    lazy = float(rng.uniform(0, 0.6)) if wide else 0.0
    return (1 - lazy) * matrix + lazy * np.eye(n)


def config(rng, n, wide):
    """A random config for n agents."""
    relation = str(rng.choice(["replace_agent", "replace_record", "zero_out_record"]))
    design = str(rng.choice(DESIGNS))
    epochs = int(rng.integers(1, 4))
    separation = int(rng.integers(1, 4))
    if not wide:
        epochs, separation = [(2, 2), (3, 1)][int(rng.integers(2))]
    rounds = epochs * separation
    selection = {"relation": relation, "design": design, "rounds": rounds}
    if relation != "replace_agent" and rng.random() < 0.6:
        selection |= {"participation": (epochs, separation)}
    elif design in FRESH:
        selection["rounds"] = int(rng.integers(1, 2000 if design != "whisper_horizon" else 40))
    if wide and design.startswith("whisper") and rng.random() < 0.4:
        selection["max_variance"] = float(10 ** rng.uniform(0.1, 3))
    if wide and design.startswith("whisper") and n > 3 and rng.random() < 0.3:
        selection["subgroups"] = (tuple(range(2)), tuple(range(2, n)))
    accountant = str(rng.choice(["gdp", "gdp", "rdp", "paper"]))
    many = rng.random() < 0.3 and design != "spacetime"
    budgets = 10 ** rng.uniform(-2, 1.3, n if many else 1)
    return make_config(
        epsilon=tuple(map(float, budgets)) if many else float(budgets[0]),
        delta=float(10 ** rng.uniform(-9, -2)),
        clip_norm=float(10 ** rng.uniform(-4, 4)),
        batch_size=4,
        step_size=0.1,
        accountant=accountant,
        allow_unsound=accountant == "paper",
        release=bool(rng.random() < 0.2),
        **selection,
    )


def inverse_diagonal(factor):
    """Diagonal of (F F')^-1 of float32 F, exactly but for 40 digits."""
    inverse = mpmath.inverse(mpmath.matrix(factor.astype(float).tolist()))
    n = len(factor)
    return [mpmath.fsum(inverse[row, i] ** 2 for row in range(n)) for i in range(n)]


def over_rounds(result):
    """The largest sum of (C'C)_ab x_a x_b over patterns and signs."""
    selection = result.config
    strategy = result.applied_strategy
    rounds = selection.rounds
    epochs, separation = selection.participation or (rounds, 1)
    if strategy is None:
        return mpmath.mpf(epochs)
    gram = strategy.T @ strategy
    best = mpmath.mpf(0)
    for start in range(rounds - (epochs - 1) * separation):
        taking = start + separation * np.arange(epochs)
        signs = np.array([(1, *s) for s in itertools.product((1, -1), repeat=epochs - 1)])
        inside = gram[np.ix_(taking, taking)]
        worst = signs[np.argmax(np.einsum("sa,ab,sb->s", signs, inside, signs))]
        moved = [
            mpmath.fsum(
                mpmath.mpf(float(x)) * int(sign) for x, sign in zip(row, worst, strict=True)
            )
            for row in strategy[:, taking]
        ]
        best = max(best, mpmath.fsum(x * x for x in moved))
    return best


def truth(result, factor):
    """Mu of every agent, at least: exact for strategies without negative products."""
    selection = result.config
    times = 1 if selection.protect.relation == "zero_out_record" else 2
    energy = over_rounds(result)
    shift = times * mpmath.mpf(selection.protect.clip_norm)
    return [shift * mpmath.sqrt(energy * entry) for entry in inverse_diagonal(factor)]


def delta(mu, epsilon):
    epsilon = mpmath.mpf(epsilon)
    below = mu / 2 - epsilon / mu
    above = -mu / 2 - epsilon / mu
    return mpmath.ncdf(below) - mpmath.exp(epsilon) * mpmath.ncdf(above)


def understated(result, factor):
    """Whether a plan's guarantee states less than a factor gives; exact up to 40 digits."""
    stated = result.guarantee
    n = result.agents
    epsilons = stated.per_agent_epsilon or (stated.epsilon,) * n
    mus = truth(result, factor)
    if max(mus) > stated.mu:
        return True
    broken = any(
        delta(mu, epsilon) > stated.delta for mu, epsilon in zip(mus, epsilons, strict=True)
    )
    return broken and not stated.unsound


def check(count, seed, wide):
    rng = np.random.default_rng(seed)
    refused = caught = unsound = 0
    with mpmath.workdps(DIGITS):
        for _ in range(count):
            matrix = network(rng, wide)
            selection = config(rng, len(matrix), wide)
            try:
                training_plan = plan.make(selection, matrix)
            except ValueError as error:
                refused += 1
                # A budget is refused for what it asks, never for how numbers round.
                assert not any(word in str(error) for word in ("condition", "singular")), selection
                continue
            assert not understated(training_plan, training_plan.factor), selection
            unsound += training_plan.guarantee.unsound
            # Tight: nobody pays for noise that the statement does not need.
            assert (
                max(truth(training_plan, training_plan.factor)) >= training_plan.guarantee.mu * 0.99
            ), selection
            # The broken twin: a millionth less noise than stated.
            caught += understated(training_plan, training_plan.factor * np.float32(1 - 2e-6))
    assert refused <= 0.05 * count
    assert caught >= 0.9 * (count - refused - unsound)


def test_dozens_of_random_configs():
    check(16, seed=11, wide=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_thousands_of_random_configs(seed):
    check(200, seed=100 + seed, wide=True)
