"""Neighbouring sums that rounding drives apart, for every route that adds clipped records up."""

import contextlib
import fractions
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import _numerics
from dpjax.learning.query import RecordQuery, UngatheredBatch
from dpjax.models import layer_norms
from dpjax.transforms import clipping

CLIP = 1.01
"""A little above the longest record, which is then not scaled."""
PLACES = 8_200


def amplitudes(places=PLACES):
    """2^p records of norm 1, one that lifts the sum above 2^p, then records of half an ulp there.

    Added one by one in float32, each of the last is rounded up to one ulp; without the first record
    the sum stays below 2^p, where half an ulp is a number.
    """
    top = 1 << ((places - 1) // 2).bit_length() - 1
    ulp = top * 2.0**-23
    each = np.full(places, 0.51 * ulp)
    each[:top] = 1
    each[top] = ulp
    return each.astype(np.float32)


def exact_square(leaves) -> fractions.Fraction:
    """Sum of squares of floating numbers, without rounding."""
    total = fractions.Fraction(0)
    for leaf in leaves:
        values = np.asarray(leaf).astype(np.float64).reshape(-1)
        # Equal entries are counted, so that large constant leaves stay cheap.
        for value, count in zip(*np.unique(values, return_counts=True), strict=True):
            total += int(count) * fractions.Fraction(float(value)) ** 2
    return total


def check_bound(transform, updates, clip_norm) -> None:
    out, _ = transform.update(updates, transform.init(updates))
    leaves = jax.tree.leaves(out)
    for agent in range(leaves[0].shape[0]):
        assert all(np.isfinite(np.asarray(leaf[agent], np.float64)).all() for leaf in leaves)
        assert exact_square([leaf[agent] for leaf in leaves]) <= fractions.Fraction(clip_norm) ** 2


def of_remainders(clip_norm, method="flat"):
    """Clip what rounding leaves of products: zero, unless multiply and add are fused."""
    transform = clipping.per_agent(clip_norm, method)

    def update(value, state, params=None):
        a, b, product = value
        remainders = {"x": {"k": a * b - product}, "y": {"k": product - b * a}}
        return transform.update(remainders, state)

    # What users have by default; the tests' own setting compiles faster. Other releases lack it.
    older = jax.__version_info__ < (0, 11)
    options = (
        {"xla_cpu_use_fusion_emitters": True} if older and jax.default_backend() == "cpu" else {}
    )
    update = jax.jit(update, compiler_options=options)
    return optax.GradientTransformation(lambda argument: optax.EmptyState(), update)


def factors(size, n):
    rng = np.random.default_rng(size)
    a, b = (jnp.asarray(1e6 * rng.normal(size=(n, size)), jnp.float32) for _ in range(2))
    return a, b, a * b


class Linear(nn.Module):
    """One product, at every position."""

    @nn.compact
    def __call__(self, x):
        """Return the products."""
        return nn.Dense(1, use_bias=False)(x)


class Word(nn.Module):
    """One row of a table, scaled by the label in the loss."""

    @nn.compact
    def __call__(self, x):
        """Return the row."""
        return nn.Embed(1, 1)(x)


def _of_layer(route, positions=1, microbatch=1, **options):
    """By a model's own sum; a record's gradient is the sum of its positions."""
    model = Linear()
    gradients = layer_norms.Gradients(model.apply, lambda out, y: jnp.sum(out), {"Dense_0": route})
    fn = clipping.clipped_sum(gradients, CLIP, microbatch=microbatch, **options)
    params = model.init(jax.random.key(0), jnp.ones((1, positions, 1)))

    def total(x, padding):
        rows = jnp.repeat(x[:, None, None] / positions, positions, axis=1)
        return fn(params, rows, jnp.zeros(len(x)), padding)

    return total


def _of_words(x, padding):
    model = Word()
    gradients = layer_norms.Gradients(
        model.apply, lambda out, y: y * jnp.sum(out), {"Embed_0": "norm"}
    )
    params = model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
    fn = clipping.clipped_sum(gradients, CLIP, microbatch=1)
    return fn(params, jnp.zeros(len(x), jnp.int32), x, padding)


def _loss(params, x, y):
    return jnp.sum(params * x)


def _per_example(**options):
    fn = clipping.per_example(_loss, CLIP, **options)

    def total(x, padding):
        return fn(jnp.zeros(1), x[:, None], jnp.zeros(len(x)), padding)

    return total


def _of_a_function(x, padding):
    def weighted(params, x, y, weights):
        return jnp.matmul(weights(jnp.abs(x[:, 0])), x)

    fn = clipping.clipped_sum(weighted, CLIP, microbatch=1)
    return fn(jnp.zeros(1), x[:, None], jnp.zeros(len(x)), padding)


def _in_queries(x, padding):
    """As a run with Poisson batches asks, of one agent."""
    query = RecordQuery(_loss, None, CLIP, "flat", microbatch=1, capacity=1)
    rows = jnp.arange(len(x))[None]
    batch = UngatheredBatch(x[:, None], jnp.zeros(len(x)), rows, padding[None])
    return query(jnp.zeros((1, 1)), batch).total


def _by_a_query(x, padding):
    """As a run asks whose model knows its norms, at two positions."""
    model = Linear()
    gradients = layer_norms.Gradients(model.apply, lambda out, y: jnp.sum(out), {"Dense_0": "norm"})
    query = RecordQuery(_loss, gradients, CLIP, "flat", microbatch=1)
    params = model.init(jax.random.key(0), jnp.ones((1, 2, 1)))
    models = jax.tree.map(lambda leaf: leaf[None], params)
    rows = jnp.repeat(x[None, :, None, None] / 2, 2, axis=2)
    return query(models, (rows, jnp.zeros((1, len(x))), padding[None])).total


ROUTES = {
    "records one by one": _per_example(microbatch=1),
    "encoded records": _per_example(microbatch=1, encode=lambda g: jnp.concatenate([g, 0 * g])),
    "records by layer": _per_example(microbatch=1, per_layer=True),
    "passes of a query": _in_queries,
    "products": _of_layer("norm"),
    "products by layer": _of_layer("norm", per_layer=True),
    "products of positions": _of_layer("norm", positions=2),
    "products of a query": _by_a_query,
    "formed products": _of_layer("formed"),
    "plain gradients": _of_layer("plain"),
    "rows of a table": _of_words,
    "a function of one's own": _of_a_function,
}
WHOLE = {
    "records, 8 a pass": _per_example(microbatch=8),
    "all records at once": _per_example(microbatch=PLACES),
    "all products at once": _of_layer("norm", microbatch=None),
    "all formed at once": _of_layer("formed", microbatch=None),
}
"""Whose additions XLA arranges, so that the pair above need not hurt the broken copy."""


def jitted(total):
    fn = jax.jit(total)
    return lambda x, paddings: [fn(x, padding) for padding in paddings]


def vmapped(total):
    return jax.jit(jax.vmap(total, (None, 0)))


def scanned(total):
    def both(x, paddings):
        return jax.lax.scan(lambda _, value: (None, total(x, value)), None, paddings)[1]

    return jax.jit(both)


def _mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), "d")


def over_agents(total):
    """Eight agents on as many devices, every second of whom has the neighbouring records."""
    mesh = _mesh()
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def both(x, paddings):
        count = mesh.size
        each = jnp.tile(paddings, (max(1, count // 2), 1))
        rows = jnp.tile(x, (len(each), 1))
        rows, each = jax.device_put((rows, each), spread)
        return jax.jit(jax.vmap(total))(rows, each)

    return both


def over_records(total):
    """The records of one sum on as many devices as there are."""
    mesh = _mesh()
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    fn = jax.jit(total)

    def both(x, paddings):
        x = jax.device_put(x, spread)
        return [fn(x, jax.device_put(padding, spread)) for padding in paddings]

    return both


FORMS = {
    "jitted": jitted,
    "vmapped": vmapped,
    "scanned": scanned,
    "agents on devices": over_agents,
    "records on devices": over_records,
}


def distance(total, form="jitted", x=None):
    """How far apart the two sums are, in exact arithmetic (of float32 numbers in float64)."""
    x = jnp.asarray(amplitudes() if x is None else x)
    neighbours = jnp.stack([jnp.zeros(len(x), bool), jnp.arange(len(x)) == 0])
    # A function of its own each time: compiled code of the same one is found again.
    result = FORMS[form](lambda x, padding: total(x, padding))(x, neighbours)
    if isinstance(result, list):
        result = jax.tree.map(lambda *leaves: np.stack(leaves), *result)
    leaves = [np.float64(leaf[0]) - np.float64(leaf[1]) for leaf in jax.tree.leaves(result)]
    assert all(leaf.any() for leaf in leaves) or len(leaves) > 1
    return math.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def in_single_precision(monkeypatch):
    """A broken copy: all sums in float32."""
    monkeypatch.setattr(_numerics, "double_precision", contextlib.nullcontext)
    monkeypatch.setattr(jnp, "float64", jnp.float32)
