"""Moves of messages by record and replay; the signs that reach them; the paper's tables."""

import numpy as np
import pytest

from dpjax.contrib import moves

STEPS = 0.3 * 0.8 ** np.arange(9)


def simulated(method, own, differences, steps=STEPS):
    """Moves of an agent's messages, by running its update twice with the same messages received.

    The agent's gradients are arbitrary numbers in the first run and others in the second: all that
    is assumed of clipped ones. What comes from others and from its own message is the same in both.
    """
    rounds = len(steps)
    rng = np.random.default_rng(0)
    base = rng.standard_normal(rounds + 1)
    heard = rng.standard_normal((rounds, 2))
    sent = []
    for gradients in (base, base + np.append(differences, 0.0)):
        x = 0.4
        s = 0.0
        y = gradients[0]
        values = []
        for k in range(rounds):
            if method == "pp_doagt":
                values.append((x, s))
                last = s
                s = own * s + heard[k, 0] + steps[k] * gradients[k]
                x = own * x + heard[k, 1] - (s - last)
            elif method == "diff_tv_ab":
                values.append((x, y))
                x = own * x + heard[k, 0] - steps[k] * y
                y = own * y + heard[k, 1] + gradients[k + 1] - gradients[k]
            else:
                values.append((x,))
                x = heard[k, 0] - steps[k] * (heard[k, 1] + gradients[k])
        sent.append(values)
    return np.abs(np.subtract(*sent))


@pytest.mark.parametrize("own", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("method", ["tracking", "dpop", "pp_doagt", "diff_tv_ab"])
def test_no_gradients_move_messages_further_and_some_as_far(method, own):
    gap = 1.7
    bound = moves.moves(method, STEPS, gap, own)
    rng = np.random.default_rng(1)
    reached = np.zeros_like(bound)
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 8)).reshape(8, -1).T
    for row in signs:
        reached = np.maximum(reached, simulated(method, own, gap * np.append(row, 1.0)))
    for _ in range(50):
        inside = simulated(method, own, gap * rng.uniform(-1, 1, 9))
        assert (inside <= bound).all()
    assert (reached <= bound + 1e-12).all()
    np.testing.assert_allclose(reached, bound, atol=1e-11)
    # A bound ten percent lower is broken by one of these.
    assert (reached > 0.9 * bound + 1e-9).any()


@pytest.mark.parametrize("own", [0.0, 0.3, 0.8])
def test_sums_of_sizes_bound_pp_doagt_from_above(own):
    """S and x term by term: what cancels between rounds is what these recursions do not see."""
    loose = []
    s = 0.0
    x = 0.0
    gap = 2.0
    for step in STEPS:
        loose.append((x, s))
        last = s
        s = own * s + step * gap
        x = own * x + s + last
    tight = moves.moves("pp_doagt", STEPS, gap, own)
    assert (tight <= np.array(loose) * (1 + 1e-12)).all()
    np.testing.assert_allclose(tight[:, 1], np.array(loose)[:, 1], rtol=1e-12)


def test_own_noisy_values_forget():
    """With own noisy values PP-DOAGT moves by a_k + a_{k-1}: with its tracker, three steps."""
    result = moves.moves("pp_doagt", STEPS, 1.0)
    np.testing.assert_allclose(result[1:, 1], STEPS[:-1], rtol=1e-12)
    np.testing.assert_allclose(result[2:, 0], STEPS[1:-1] + STEPS[:-2], rtol=1e-12)
    constant = moves.moves("pp_doagt", np.full(9, 0.1), 1.0).sum(axis=1)[5]
    assert constant == pytest.approx(moves.printed_sensitivity("pp_doagt", 1.0, 0.1), rel=1e-12)


@pytest.mark.parametrize("method", ["pp_doagt", "diff_tv_ab"])
def test_smooth_costs_of_adjacent_problems_stay_below(method):
    """Gradients h x and h x + gap, |h| <= 3: taken at true points, which drift apart."""
    gap = 0.7
    slope = 3.0
    own = 0.4
    bound = moves.moves(method, STEPS, gap, own, smoothness=slope)
    assert (bound >= moves.moves(method, STEPS, gap, own)).all()
    rng = np.random.default_rng(2)
    heard = rng.standard_normal((9, 2))
    for h in (-3.0, -1.0, 0.0, 2.0, 3.0):
        sent = []
        for shift in (0.0, gap):
            x = 0.4
            s = 0.0
            y = h * 0.4 + shift
            values = []
            for k in range(9):
                gradient = h * x + shift
                values.append((x, s if method == "pp_doagt" else y))
                if method == "pp_doagt":
                    last = s
                    s = own * s + heard[k, 0] + STEPS[k] * gradient
                    x = own * x + heard[k, 1] - (s - last)
                else:
                    x = own * x + heard[k, 0] - STEPS[k] * y
                    y = own * y + heard[k, 1] + h * x + shift - gradient
            sent.append(values)
        assert (np.abs(np.subtract(*sent)) <= bound * (1 + 1e-12)).all()


def test_tracked_gradient_does_not_settle():
    result = moves.moves("diff_tv_ab", 0.5 ** np.arange(60), 1.0, own_weight=0.25)
    assert (result[1:, 1] > 1.7).all() and result[-1, 0] < 1e-9 < result[-1, 1]


def test_tables_are_as_printed():
    assert [moves.numbers_sent(name, 7) for name in ("tracking", "dpop")] == [7, 7]
    others = ("ding2022", "xuan2023", "wang2024", "pp_doagt", "diff_tv_ab")
    assert [moves.numbers_sent(name, 7) for name in others] == [14] * 5
    gap, step, (c, d) = 2.0, 0.5, (0.25, 1.0)

    def row(name, weakening=0.0):
        return moves.printed_sensitivity(name, gap, step, constants=(c, d), weakening=weakening)

    assert row("tracking") == row("dpop") == 1.0
    assert row("ding2022") == row("diff_tv_ab") == 2.5 * 3.0
    assert row("xuan2023") == 1.5 * 3.0 * 0.5
    assert row("wang2024", weakening=0.5) == 1.5 * 3.0 * 1.5
    assert row("pp_doagt") == 3 * 3.0 * 0.5


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("method", ("gt", STEPS, 1.0)),
        ("step_sizes", ("tracking", [0.1, -0.1], 1.0)),
        ("gradient_gap", ("tracking", STEPS, 0.0)),
        ("own_weight", ("pp_doagt", STEPS, 1.0, 1.5)),
        ("smoothness", ("diff_tv_ab", STEPS, 1.0, 0.5, -1.0)),
    ],
)
def test_bad_input_is_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        moves.moves(*arguments)


@pytest.mark.parametrize("method", ["tracking", "pp_doagt", "diff_tv_ab"])
@pytest.mark.parametrize("own", [0.0, 0.3, 1.0])
def test_moves_overflow_to_infinity_and_never_underflow_to_zero(method, own):
    for gap, slope in ((10.0, 0.0), (1e308, 1e10)):
        wide = moves.moves(method, [1e308] * 4, gap, own, slope)
        assert not np.isnan(wide).any() and wide[-1, 0] == np.inf and wide[0, 0] == 0
    thin = moves.moves(method, [1e-200] * 4, 1e-200, own)
    assert (thin[1:, 0] > 0).all() and thin.max() < 1e-190
