"""Adam in a low-rank space: full rank is Adam, and the space holds what it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _programs
from dpjax.contrib.optimizers import scale_by_adam, scale_by_galore
from dpjax.transforms.lowpass import FILTERS


def tree(rounds, seed=0):
    rng = np.random.default_rng(seed)
    low = rng.normal(size=(12, 2)) @ rng.normal(size=(2, 9))
    draw = lambda base, s: (base + s * rng.normal(size=(rounds, *base.shape))).astype(np.float32)  # noqa: E731
    conv = (rng.normal(size=(8, 2)) @ rng.normal(size=(2, 10))).reshape(2, 2, 2, 10)
    return {"conv": draw(conv, 0.1), "tall": draw(low, 0.1), "wide": draw(low.T, 0.1),
            "bias": draw(np.ones(5), 0.1)}  # fmt: skip


def stream(link, gradients):
    """Every output and the last state."""
    first = jax.tree.map(lambda leaf: leaf[0], gradients)
    step = lambda state, value: link.update(value, state)[::-1]  # noqa: E731
    state, out = jax.lax.scan(step, link.init(first), gradients)
    return out, state


@pytest.mark.parametrize("on_change", ["turn", "reset"])
def test_it_projects_on_leading_vectors(on_change):
    argument = tree(13)
    link = scale_by_galore(0.01, rank=2, every=4, on_change=on_change)
    out, state = stream(link, argument)
    # In order of names: bias, conv, tall, wide.
    assert [basis.shape for basis in state.bases] == [(0, 0), (8, 2), (9, 2), (9, 2)]
    for basis, name in zip(state.bases[1:], ("conv", "tall", "wide"), strict=True):
        matrix = argument[name][11].reshape(-1, argument[name].shape[-1])
        u, _, vt = np.linalg.svd(matrix)
        expected = u[:, :2] if matrix.shape[0] <= matrix.shape[1] else vt[:2].T
        np.testing.assert_allclose(basis @ basis.T, expected @ expected.T, atol=1e-4)
        np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-5)
        moved = np.asarray(out[name][12]).reshape(matrix.shape)
        assert np.linalg.matrix_rank(moved, tol=1e-4) <= 2
    own = scale_by_adam(0.01)
    if on_change == "turn":
        np.testing.assert_allclose(out["bias"], stream(own, argument["bias"])[0], rtol=1e-4)


def test_no_round_uses_its_own_gradients_space():
    """White noise: its own leading vectors would gather more of it than any fixed space."""
    rng = np.random.default_rng(2)
    options = {"w": rng.normal(size=(40, 30, 30)).astype(np.float32)}
    link = scale_by_galore(0.0, rank=3, every=1, b1=0.0, b2=0.0, on_change="reset")
    _, state = stream(link, options)
    (basis,) = state.bases
    mean = np.square(np.asarray(basis.T @ options["w"][-1])).mean()
    other = np.square(np.asarray(basis.T @ rng.normal(size=(30, 30)))).mean()
    assert mean > 2 and other < 1.5


@pytest.mark.parametrize("on_change", ["turn", "reset"])
def test_round_of_change_still_moves_in_space_before(on_change):
    """White gradients, all of other spaces: the fourth and the eighth round bring a new one."""
    rng = np.random.default_rng(5)
    shapes = {"tall": (12, 7), "wide": (7, 12)}
    options = {
        name: rng.normal(size=(9, *shape)).astype(np.float32) for name, shape in shapes.items()
    }
    link = scale_by_galore(0.0, rank=2, every=4, on_change=on_change)

    def step(state, gradient):
        out, new = link.update(gradient, state)
        return new, (state.bases, new.bases, out)

    first = link.init(jax.tree.map(lambda leaf: leaf[0], options))
    _, (before, after, out) = jax.lax.scan(step, first, options)
    moves = np.swapaxes(out["tall"], 1, 2), np.asarray(out["wide"])
    for old, new, moved in zip(before, after, moves, strict=True):
        outside = [
            np.linalg.norm(moved - basis @ np.swapaxes(basis, 1, 2) @ moved, axis=(1, 2))
            / np.linalg.norm(moved, axis=(1, 2))
            for basis in map(np.asarray, (old, new))
        ]
        assert outside[0].max() < 1e-5
        assert outside[1][[3, 7]].min() > 0.3 and np.delete(outside[1], [3, 7]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.x64
def test_mapped_layers_are_decomposed_one_matrix_at_time():
    """Batched calls for several layers wait for each other on a CPU's few threads, for ever."""
    link = scale_by_galore(0.01, rank=2, every=1)
    shapes = {"first": (8, 9), "second": (10, 7)}
    models = {name: jnp.ones((3, *shape)) for name, shape in shapes.items()}
    states = jax.vmap(link.init)(models)
    program = jax.make_jaxpr(jax.vmap(link.update))(models, states)
    equations = [eqn for jaxpr, _ in _programs.jaxprs(program) for eqn in jaxpr.eqns]
    operands = [eqn.invars[0].aval.shape for eqn in equations if eqn.primitive.name == "eigh"]
    assert sorted(operands) == [(7, 7), (8, 8)]
    out, _ = jax.vmap(link.update)(models, states)
    single, _ = link.update(*jax.tree.map(lambda leaf: leaf[0], (models, states)))
    for name in shapes:
        np.testing.assert_allclose(out[name][0], single[name], rtol=1e-6)


def test_moments_are_turned():
    """A gradient within the old and the new space keeps its filtered past through a change."""
    rng = np.random.default_rng(3)
    direction = np.outer(rng.normal(size=6), rng.normal(size=8)).astype(np.float32)
    arguments = [{"w": direction * (1 + 0.1 * t)} for t in range(10)]
    other = np.outer(rng.normal(size=6), rng.normal(size=8))
    arguments[9]["w"] = arguments[9]["w"] + other.astype(np.float32)
    link = scale_by_galore(0.0, rank=2, every=5, filter=FILTERS["f5"])
    adam = scale_by_adam(0.0, filter=FILTERS["f5"])
    update = jax.jit(link.update)
    of_adam = jax.jit(adam.update)
    state = link.init(arguments[0])
    for gradient in arguments[:5]:
        _, state = update(gradient, state)
    # From here the space holds the direction: Adam of what is within it, and no change till 9.
    (basis,), single = state.bases, state.adam
    for gradient in arguments[5:9]:
        _, state = update(gradient, state)
        _, single = of_adam([basis.T @ gradient["w"]], single)
    before = basis @ single.first.delayed[0][0]
    np.testing.assert_allclose(basis @ state.adam.first.delayed[0][0], before, rtol=1e-4, atol=1e-5)
    _, state = update(arguments[9], state)
    _, single = of_adam([basis.T @ arguments[9]["w"]], single)
    (turned,) = state.bases
    assert np.abs(basis @ basis.T - turned @ turned.T).max() > 0.1
    along = np.linalg.svd(direction)[0][:, 0]
    kept = along @ (turned @ state.adam.first.delayed[0][0])
    np.testing.assert_allclose(kept, along @ (basis @ single.first.delayed[0][0]), atol=1e-3)


def test_second_moment_keeps_noises_share():
    """White noise of variance 4 in any space: what is taken off stays what the moment holds."""
    rng = np.random.default_rng(4)
    options = {"w": (2 * rng.normal(size=(400, 40, 50))).astype(np.float32)}
    link = scale_by_galore(4.0, rank=10, every=20, b2=0.99)
    _, state = stream(link, options)
    (second,) = state.adam.second
    assert float(jnp.mean(second)) == pytest.approx(4 * (1 - 0.99**400), rel=0.05)


def test_no_rank_is_quarter_of_every_shorter_side():
    shapes = {"a": (12, 40), "b": (3, 3, 16, 10), "c": (7,), "d": (1, 9)}
    model = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    state = scale_by_galore(0.1, rank=None).init(model)
    results = [np.shape(basis) for basis in state.bases]
    assert results == [(12, 3), (10, 3), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("value", "text"),
    [({"rank": 0}, "rank is 0"), ({"every": 0}, "every is 0"), ({"on_change": "x"}, "on_change")],
)
def test_bad_settings_are_refused(value, text):
    with pytest.raises(ValueError, match=text):
        scale_by_galore(0.1, **value)
