"""Record and replay: Proposition 1 in both orders, and bounds that no replay exceeds."""

from dataclasses import dataclass

import numpy as np
import pytest

from dpjax.accounting import pure
from dpjax.contrib import moves, replay
from dpjax.mechanism import laplace
from dpjax.topology import graphs, mixing

N = 5
P = 2
T = 8
W = mixing.metropolis_hastings(graphs.ring(N))
STEPS = 0.1 * 0.97 ** np.arange(T)
GAP = 1.0
START = np.linspace(-1, 1, N * P).reshape(N, P)
NOISE = np.random.default_rng(0).laplace(scale=0.1, size=(T, N, 1, P))
# One agent's gradient moves by GAP in L1 norm; its Hessian, as everybody's, is 2.
SHIFT = np.zeros((N, P))
SHIFT[1] = 0.5 * GAP


@dataclass(frozen=True)
class Tracked:
    """Algorithm 1, (4): implicit gradient tracking, of which models alone are sent."""

    mixing: np.ndarray
    step_sizes: np.ndarray
    start: np.ndarray
    beta: float

    def first(self, gradient):
        return self.start, np.zeros_like(self.start)

    def sent(self, state):
        return state[0][:, None]

    def after(self, state, step, display, gradient):
        z = display[:, 0]
        mixed = self.mixing @ z
        y = state[1] + self.beta * (z - mixed)
        return mixed - self.step_sizes[step] * (y + gradient(z)), y


@dataclass(frozen=True)
class TwoVariables:
    """(7) with noise, both sent: x+ = W x~ - alpha y, y+ = W y~ + g(x+) - g(x)."""

    mixing: np.ndarray
    step_sizes: np.ndarray
    start: np.ndarray
    own: str

    def first(self, gradient):
        return self.start, gradient(self.start), gradient(self.start)

    def sent(self, state):
        return np.stack(state[:2], axis=1)

    def after(self, state, step, display, gradient):
        x_mixed = self.mixing @ display[:, 0]
        y_mixed = self.mixing @ display[:, 1]
        if self.own == "true":
            own = np.diag(self.mixing)[:, None]
            x_mixed = x_mixed + own * (state[0] - display[:, 0])
            y_mixed = y_mixed + own * (state[1] - display[:, 1])
        x = x_mixed - self.step_sizes[step] * state[1]
        new = gradient(x)
        return x, y_mixed + new - state[2], new


def quadratic(x):
    return 2 * x


def shifted(x):
    return 2 * x + SHIFT


def of_agent(rule, gradient=quadratic, neighbour=shifted, noise=NOISE):
    result = replay.moved(rule, gradient, neighbour, noise)
    assert (np.delete(result, 1, axis=1) == 0).all()
    return result[:, 1].sum(axis=1)


def descent(own="noisy", point="noisy"):
    return replay.DescentRule(W, STEPS, START, own, point)


def test_noisy_states_move_by_step_before():
    want = np.append(0.0, STEPS[:-1] * GAP)
    np.testing.assert_allclose(of_agent(descent()), want, atol=1e-15)
    tracked = of_agent(Tracked(W, STEPS, START, beta=3.0))
    np.testing.assert_allclose(tracked, want, atol=1e-14)
    np.testing.assert_allclose(tracked, moves.tracking(STEPS, GAP), atol=1e-14)


def test_own_true_state_in_consensus_moves_further():
    """Claim (i): w_ii of the last move is added."""
    result = of_agent(descent(own="true"))
    plain = of_agent(descent())
    assert (result[2:] > plain[2:]).all()
    for k in range(2, T):
        assert result[k] == pytest.approx(W[1, 1] * result[k - 1] + STEPS[k - 1] * GAP, rel=1e-12)


def test_on_quadratics_gradients_at_true_states_are_less_sensitive():
    """Against claim (ii): equal Hessians pull the two problems' true states together."""
    result = of_agent(descent(point="true"))
    plain = of_agent(descent())
    assert plain[2] == pytest.approx(0.097, abs=1e-12)
    assert result[2] == pytest.approx(0.0776, abs=1e-12)
    assert (result[2:] < plain[2:]).all()


def test_gap_that_changes_sign_between_rounds_shows_claimed_order():
    """The supremum over pairs: a gap against the drift moves the true state's gradient more."""

    def turned(x):
        sign = np.where(x[1, :1] > 0, 1.0, -1.0)
        return 2 * x + sign * SHIFT

    # The agent's state is above the threshold in the first round and below it in the second.
    start = np.zeros((N, P))
    push = np.zeros((T, N, 1, P))
    start[1] = 1.0
    push[0] = -2.0
    rule = replay.DescentRule(W, STEPS, start, "noisy", "true")
    result = replay.moved(rule, quadratic, turned, push)[:, 1, 0]
    assert result[1] == pytest.approx(0.1, abs=1e-12)
    assert result[2] == pytest.approx(0.1164, abs=1e-12)
    plain = replay.moved(replay.DescentRule(W, STEPS, start), quadratic, turned, push)[:, 1, 0]
    assert plain[2] == pytest.approx(0.097, abs=1e-12)


@pytest.mark.parametrize("own", ["noisy", "true"])
def test_two_variables_move_further(own):
    """Claim (iii) holds for what any gradients can do; on quadratics, in the first rounds only."""
    noise = np.concatenate([NOISE, NOISE], axis=2)
    rule = TwoVariables(W, STEPS, START, own)
    result = replay.moved(rule, quadratic, shifted, noise)[:, 1]
    plain = of_agent(descent())
    assert (result.sum(axis=1)[1:3] > plain[1:3]).all()
    assert (result.sum(axis=1)[5:] < plain[5:]).all()
    weight = W[1, 1] if own == "true" else 0.0
    assert (moves.moves("diff_tv_ab", STEPS, GAP, weight).sum(axis=1) > plain).all()
    bound = moves.moves("diff_tv_ab", STEPS, GAP, weight, smoothness=2.0)
    assert (result <= bound * (1 + 1e-12)).all()


def test_no_replay_of_method_exceeds_its_accounted_loss():
    """Gradients at random that differ by the gap: losses of replayed moves, and at halved noise."""
    outcome = laplace.geometric(1.0, GAP, 0.1, 0.5, 0.9, T)
    rng = np.random.default_rng(3)
    accounted = pure.epsilon(outcome.step_sizes, outcome.scales, GAP)
    for _ in range(20):
        curvature = rng.uniform(0, 3, (N, 1))
        signs = np.zeros((N, P))
        signs[1] = rng.dirichlet(np.ones(P)) * rng.choice((-1, 1), P) * GAP
        noise = rng.laplace(size=(T, N, 1, P)) * outcome.scales[:, None, None, None]
        result = replay.moved(
            Tracked(W, outcome.step_sizes, START, 2.0),
            lambda x, c=curvature: c * x,
            lambda x, c=curvature, s=signs: c * x + s,
            noise,
        )[:, 1]
        assert pure.epsilon_of_sensitivities(result, outcome.scales) <= accounted * (1 + 1e-9)
        assert pure.epsilon_of_sensitivities(result, outcome.scales / 2) > accounted * 1.9


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="noise"):
        replay.moved(descent(), quadratic, shifted, np.zeros((T, N, 2, P)))
    with pytest.raises(ValueError, match="own"):
        descent(own="mine")
    with pytest.raises(ValueError, match="point"):
        descent(point="far")


RUNS = 400
SIZE = 6
MAP = np.random.default_rng(1).normal(size=(SIZE, SIZE + 2))
MOVE = np.array([1.0, -2.0, 0.0, 0.5, 0.0, 0.0])


def recorded(seed, runs=RUNS):
    """Messages with noise of covariance M M', and what they would be on the neighbour."""
    messages = np.random.default_rng(seed).normal(size=(runs, SIZE + 2)) @ MAP.T
    return messages, messages + MOVE


def test_measured_loss_is_whitened_difference():
    exact = np.sqrt(MOVE @ np.linalg.solve(MAP @ MAP.T, MOVE))
    result = replay.measured(*recorded(0, 40_000))
    assert result.low < exact < result.high and result.high - result.low < 0.02 * exact
    # Another unit of any entry, or a message that repeats one, tells no more.
    messages, neighbours = recorded(0, 40_000)
    units = np.array([1e-6, 1, 1e5, 1, 1, 3])
    twice = [np.hstack([part * units, part[:, :2] - part[:, 2:4]]) for part in recorded(0, 40_000)]
    assert replay.measured(*twice).mu == pytest.approx(result.mu, rel=1e-6)
    halved = replay.measured(messages / 2, messages / 2 + MOVE)
    assert halved.mu == pytest.approx(2 * result.mu)
    shaped = [part.reshape(-1, 2, 3) for part in (messages, neighbours)]
    assert replay.measured(*shaped) == result


def test_intervals_cover_loss_as_often_as_stated():
    exact = np.sqrt(MOVE @ np.linalg.solve(MAP @ MAP.T, MOVE))
    results = [replay.measured(*recorded(seed, 4 * SIZE), confidence=0.8) for seed in range(500)]
    covered = np.mean([low < exact < high for _, low, high in results])
    assert abs(covered - 0.8) < 3 * np.sqrt(0.16 / 500)
    # Without the degrees of freedom that a covariance takes, they would lie too high.
    free = np.sqrt(4 * SIZE / (3 * SIZE))
    high = np.mean([low * free < exact < high * free for _, low, high in results])
    assert high < 0.8 - 3 * np.sqrt(0.16 / 500)


def test_what_noise_does_not_reach_is_told_at_once():
    messages, _ = recorded(0)
    bare = np.hstack([messages, np.full((RUNS, 1), 3.0)])
    assert replay.measured(bare, bare + np.append(MOVE, 1e-3)).mu == np.inf
    # Noise that is sent twice is taken off.
    again = np.hstack([messages, messages])
    assert replay.measured(again, again + np.append(MOVE, 0 * MOVE)).mu == np.inf
    assert np.isfinite(replay.measured(again, again + np.append(MOVE, MOVE)).mu)
    assert replay.measured(messages, messages) == (0.0, 0.0, 0.0)


def test_recorded_messages_that_cannot_be_measured_are_named():
    messages, neighbours = recorded(0)
    with pytest.raises(ValueError, match="neighbours has .*; record the same runs"):
        replay.measured(messages, neighbours[:, :3])
    with pytest.raises(ValueError, match="messages has 20 runs of 6 numbers; give 24 runs"):
        replay.measured(messages[:20], neighbours[:20])
    with pytest.raises(ValueError, match="depend on the noise; .*replay the messages"):
        replay.measured(messages, 1.5 * messages + MOVE)
    with pytest.raises(ValueError, match="confidence is 2"):
        replay.measured(messages, neighbours, confidence=2)
