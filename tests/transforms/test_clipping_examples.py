"""Per-example clipping: a sum of exactly bounded terms, whatever the batch."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.transforms import clipping

CLIP = 0.5


def linear(params, x, y):
    """A loss whose gradient is the record itself: every gradient can be made."""
    del y
    return jnp.sum(params["w"] * x[:-1]) + params["b"] * x[-1]


def logistic(params, x, y):
    return jnp.log1p(jnp.exp(-y * (x[:-1] @ params["w"] + params["b"] * x[-1])))


def make(d=6, seed=0, batch=9):
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=d), jnp.float32), "b": jnp.float32(0.3)}
    x = rng.normal(size=(batch, d + 1)) * 10.0 ** rng.uniform(-2, 2, size=(batch, 1))
    return params, jnp.asarray(x, jnp.float32), jnp.asarray(rng.choice([-1.0, 1.0], batch))


def flat(tree):
    leaves = [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def pick(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def oracle(loss, params, x, y, keep, scale):
    """One gradient after the other, clipped in float64, and their sum."""
    total = np.zeros(flat(params).size)
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(params, x, y)
    gradients = jax.tree.map(np.asarray, gradients)
    for index, real in enumerate(keep):
        gradient = flat(pick(gradients, index))
        if real and np.isfinite(gradient).all():
            total += gradient * scale(np.linalg.norm(gradient))
    return total


SCALES = {
    "flat": lambda norm: min(1.0, CLIP / norm),
    "automatic": lambda norm: CLIP / (norm + 0.01),
}


def check_sum(build, loss=logistic, method="flat", microbatch=None, spoil=False):
    params, x, y = make()
    if spoil:
        x = x.at[4, 1].set(jnp.nan).at[7, 0].set(jnp.inf)
    keep = np.ones(len(x), bool)
    keep[[2, 8]] = False
    fn = jax.jit(build(loss, CLIP, method=method, microbatch=microbatch))
    result = flat(fn(params, x, y, jnp.asarray(~keep)))
    expected = oracle(loss, params, x, y, keep, SCALES[method])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)
    everything = flat(fn(params, x, y))
    expected = oracle(loss, params, x, y, np.ones(len(x), bool), SCALES[method])
    np.testing.assert_allclose(everything, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("method", "microbatch"),
    [("flat", None), ("automatic", 1), ("flat", 3), ("automatic", 4), ("automatic", 20)],
)
def test_sum_of_clipped_gradients(method, microbatch):
    check_sum(clipping.per_example, method=method, microbatch=microbatch)


@pytest.mark.parametrize(("method", "microbatch"), [("flat", 4), ("automatic", None)])
def test_gradients_that_are_not_finite_add_nothing(method, microbatch):
    check_sum(clipping.per_example, linear, method=method, microbatch=microbatch, spoil=True)


@pytest.mark.mutant
def test_broken_sums_are_caught():
    def mean(*args, **kwargs):
        inner = clipping.per_example(*args, **kwargs)

        def fn(params, x, y, is_padding=None):
            return jax.tree.map(lambda leaf: leaf / len(x), inner(params, x, y, is_padding))

        return fn

    def clipped_after_the_sum(loss, clip_norm, **_):
        def fn(params, x, y, is_padding=None):
            real = jnp.ones(len(x)) if is_padding is None else 1.0 - is_padding
            total = jax.grad(
                lambda p: jnp.sum(real * jax.vmap(loss, in_axes=(None, 0, 0))(p, x, y))
            )(params)
            stacked = jax.tree.map(lambda leaf: leaf[None], total)
            clipped, _ = clipping.per_agent(clip_norm).update(stacked, None)
            return jax.tree.map(lambda leaf: leaf[0], clipped)

        return fn

    def padding_counts(*args, **kwargs):
        inner = clipping.per_example(*args, **kwargs)
        return lambda params, x, y, is_padding=None: inner(params, x, y)

    for broken in (mean, clipped_after_the_sum, padding_counts):
        with pytest.raises(AssertionError):
            check_sum(broken)


def check_sensitivity(build, method="flat") -> None:
    """Replace one record by its worst opposite: the sum moves by 2 C at most, zeroed by C."""
    rng = np.random.default_rng(3)
    params, x, y = make(d=40, batch=16)
    fn = jax.jit(build(linear, CLIP, method=method))
    rounding = 16**2 * 2.0**-24  # of the float32 sum, see the docstring
    moved_most = 0.0
    for trial in range(20):
        # The others are tiny or huge, aligned with the record or not.
        x = np.asarray(rng.normal(size=x.shape) * 10.0 ** rng.uniform(-6, 6, (16, 1)), np.float32)
        if trial % 2:
            x[:] = x[0] * 10.0 ** rng.uniform(-3, 3, (16, 1))
        record = x[0] * 1e6
        before = x.copy()
        replaced = x.copy()
        zeroed = x.copy()
        before[0] = record
        replaced[0] = -record
        zeroed[0] = 0
        base = flat(fn(params, jnp.asarray(before), y))
        moved = np.linalg.norm(base - flat(fn(params, jnp.asarray(replaced), y)))
        assert moved <= 2 * CLIP * (1 + rounding)
        gone = np.linalg.norm(base - flat(fn(params, jnp.asarray(zeroed), y)))
        assert gone <= CLIP * (1 + 2 * rounding)
        padded = flat(fn(params, jnp.asarray(before), y, jnp.arange(16) == 0))
        np.testing.assert_allclose(padded, flat(fn(params, jnp.asarray(zeroed), y)), atol=1e-6)
        moved_most = max(moved_most, moved)
    assert moved_most > 2 * CLIP * 0.999  # the data are adversarial enough


@pytest.mark.parametrize("method", clipping.CLIPPINGS)
def test_sensitivity_of_sum(method):
    check_sensitivity(clipping.per_example, method)


@pytest.mark.mutant
def test_dropped_clip_is_caught():
    def unclipped(loss, clip_norm, **_):
        return clipping.per_example(loss, math.inf)

    with pytest.raises(AssertionError):
        check_sensitivity(unclipped)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("dtype", "size"), [(jnp.float32, 5), (jnp.bfloat16, 3_000), (jnp.float32, 9_001)]
)
def test_every_term_is_bounded_exactly(dtype, size):
    rng = np.random.default_rng(size)
    fn = jax.jit(clipping.per_example(lambda p, x, y: p @ x, CLIP))
    params = jnp.zeros(size, dtype)
    for _ in range(5):
        x = jnp.asarray(rng.normal(size=(1, size)) * 10, dtype)
        term = np.asarray(fn(params, x, jnp.zeros(1)), np.float64)
        square = sum(fractions.Fraction(float(value)) ** 2 for value in term)
        assert square <= fractions.Fraction(CLIP) ** 2
        assert square > fractions.Fraction(CLIP) ** 2 * fractions.Fraction(0.97)


def test_empty_and_all_padding_batches_are_zero():
    params, x, y = make()
    fn = jax.jit(clipping.per_example(logistic, CLIP, microbatch=4))
    for result in (fn(params, x[:0], y[:0]), fn(params, x, y, jnp.ones(len(x), bool))):
        assert jax.tree.structure(result) == jax.tree.structure(params)
        np.testing.assert_array_equal(flat(result), 0)


@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_agents_by_vmap(microbatch):
    parts = [make(seed=seed) for seed in range(3)]
    params, x, y = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    padding = jnp.zeros(x.shape[:2], bool).at[1, 3:].set(True).at[2].set(True)
    fn = clipping.per_example(logistic, CLIP, microbatch=microbatch)
    together = jax.jit(jax.vmap(fn))(params, x, y, padding)
    fn = jax.jit(fn)
    for agent, (own, rows, labels) in enumerate(parts):
        single = fn(own, rows, labels, padding[agent])
        np.testing.assert_allclose(flat(pick(together, agent)), flat(single), atol=1e-6)
    assert (flat(pick(together, 2)) == 0).all()


def test_images_and_integer_labels():
    def loss(params, x, y):
        return -jax.nn.log_softmax(jnp.einsum("hw,hwc->c", x, params))[y]

    params = jnp.zeros((3, 3, 4), jnp.float32)
    x = jnp.ones((5, 3, 3), jnp.float32)
    y = jnp.arange(5) % 4
    total = jax.jit(clipping.per_example(loss, 0.1))(params, x, y)
    assert total.shape == params.shape
    assert 0 < np.linalg.norm(flat(total)) <= 5 * 0.1


def test_malformed_calls_are_refused():
    params, x, y = make()
    fn = clipping.per_example(logistic, CLIP)
    with pytest.raises(ValueError, match="one count"):
        fn(params, x, y[:-1])
    with pytest.raises(ValueError, match="one count"):
        fn(params, x, y, jnp.zeros(3, bool))
    with pytest.raises(ValueError, match="microbatch is 0"):
        clipping.per_example(logistic, CLIP, microbatch=0)


@pytest.mark.parametrize(
    ("d", "passes"), [(5, 0), pytest.param(9_000, 3, marks=pytest.mark.slow), (50_000, 8)]
)
def test_records_at_once_are_chosen_by_cost(d, passes):
    """On a CPU large gradients are formed a few at a time by default; the sum stays the same."""
    batch = 8
    x = jnp.asarray(np.random.default_rng(d).normal(size=(batch, d)), jnp.float32)
    padding = jnp.arange(batch) == 2
    params = jnp.full(d, d**-0.5, jnp.float32)
    y = jnp.ones(batch)

    def loss(p, x, y):
        return jnp.tanh(p @ x) * y

    sums = {}
    for count in (None, batch, 1):
        fn = clipping.per_example(loss, CLIP, microbatch=count)
        sums[count] = flat(jax.jit(fn)(params, x, y, padding))
        if count is None and jax.default_backend() == "cpu":
            # One loop is the clip's, another goes over the passes.
            text = str(jax.make_jaxpr(fn)(params, x, y))
            assert (text.count("scan[") > 1) == (passes > 0)
            assert clipping._at_once(params, batch) == (-(-batch // passes) if passes else None)
    for count in (batch, 1):
        np.testing.assert_allclose(sums[None], sums[count], rtol=1e-4, atol=1e-6)
    assert 0 < np.linalg.norm(sums[None]) <= batch * CLIP


def test_complex_gradients_are_refused():
    """Squares of theirs are no squared sizes: 1 and the imaginary unit have none together."""
    x = jnp.full((1, 2), 1e3)
    y = jnp.zeros(1)
    turned = jnp.array([1, 1j], jnp.complex64)

    def loss(w, x, y):
        return jnp.real(jnp.sum(w * turned * x))

    with pytest.raises(ValueError, match="leaves are complex64; give real and imaginary parts"):
        clipping.per_example(loss, 1.0)(turned, x, y)
    encoded = clipping.per_example(lambda w, x, y: w @ x, 1.0, encode=lambda g: g * turned)
    with pytest.raises(ValueError, match="leaves are complex64"):
        encoded(jnp.ones(2), x, y)
    weighted = clipping.clipped_sum(lambda w, x, y, weights: w * weights(jnp.ones(1)), 1.0)
    with pytest.raises(ValueError, match="leaves are complex64"):
        weighted(turned, x, y)


@pytest.mark.optimized
@pytest.mark.parametrize("clip_norm", [5.0, math.inf])
def test_gradient_that_is_not_finite_adds_nothing(clip_norm):
    """Compilers take the root of its square for its size, which does not overflow."""
    total = clipping.per_example(lambda w, x, y: jnp.log(w * x), clip_norm)
    x = jnp.array([0.0, 1.0])
    single = total(jnp.float32(1), x[1:], jnp.zeros(1))
    assert total(jnp.float32(1), x, jnp.zeros(2)) == pytest.approx(float(single), rel=1e-6)
    clip = clipping.per_agent(clip_norm)
    clipped, _ = jax.jit(clip.update)(jnp.array([[jnp.nan], [1.0]]), clip.init(None))
    assert clipped.tolist() == [[0.0], [1.0]] if clip_norm == math.inf else clipped[0, 0] == 0


def test_custom_sum_never_meets_what_padding_holds():
    """Nor does it add anything of it where all is padding."""
    gradients = jax.vmap(jax.grad(lambda w, x, y: jnp.log(w @ x)), (None, 0, 0))

    def weighted(w, x, y, weights):
        each = gradients(w, x, y)
        return weights(jnp.linalg.norm(each, axis=1)) @ each

    total = clipping.clipped_sum(weighted, 1.0)
    x = jnp.ones((3, 2)).at[1].set(0.0)
    y = jnp.zeros(3)
    padding = jnp.array([False, True, False])
    good = total(jnp.ones(2), x[::2], y[::2])
    np.testing.assert_allclose(total(jnp.ones(2), x, y, padding), good, rtol=1e-5)
    nothing = total(jnp.ones(2), x[::-1], y, jnp.ones(3, bool))
    np.testing.assert_array_equal(nothing, np.zeros(2))
