"""The reductions that show whether numbers are finite, on this backend and at every length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax._numerics import double_precision, square_sum

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
REDUCTIONS = {
    "isfinite": lambda x: jnp.where(jnp.isfinite(x).all(), 0.0, jnp.nan),
    "sum": jnp.sum,
    "square_sum": lambda x: square_sum(x.astype(jnp.promote_types(x.dtype, jnp.float32))),
    "replaced": lambda x: jnp.where((x == jnp.nan_to_num(x)).all(), 0.0, jnp.nan),
    "selected": lambda x: jnp.sum(jnp.where(jnp.isfinite(x), 0, jnp.nan)),
}
MAPS = {
    "jitted": lambda subject, x: subject(x),
    "mapped": lambda subject, x: jax.vmap(subject)(jnp.stack([x, x])).sum(),
    "scanned": lambda subject, x: jax.lax.map(
        lambda i: subject(x + i), jnp.zeros(2, x.dtype)
    ).sum(),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", [8_192, pytest.param(65_537, marks=pytest.mark.slow)])
def test_number_that_is_not_finite_shows_in_every_reduction(platform, kind, size):
    assert jax.default_backend() == platform
    with double_precision():
        spoiled = {}
        for place in (0, size // 2 + 7, size - 1):
            for bad in (np.nan, np.inf):
                spoiled[place, bad] = jnp.ones(size, kind).at[place].set(bad)
        for name, reduction in REDUCTIONS.items():
            for mode, run in MAPS.items():
                compiled = jax.jit(functools.partial(run, reduction))
                for where, x in spoiled.items():
                    assert not np.isfinite(compiled(x)), (name, mode, where)
