"""Batches: distinct records, each as likely as any other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax.data import batches

COUNTS = np.array([8, 9, 15, 100])


def distinct(rows: np.ndarray) -> bool:
    return all(len(set(row)) == len(row) for row in rows.reshape(-1, rows.shape[-1]).tolist())


def draws(counts: np.ndarray, size: int, rounds: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(3), rounds)
    draw = jax.jit(jax.vmap(lambda key: batches.draw(key, counts, size)))
    return np.asarray(draw(keys))


def uniformity(rows: np.ndarray, count: int) -> float:
    """The p-value of a chi-square test that each of an agent's records is as likely as any."""
    counts = np.bincount(rows.ravel(), minlength=count)
    # Draws of one batch exclude each other, which only makes the counts more even.
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("size", [1, 7])
def test_records_of_batch_are_distinct_and_in_range(size: int) -> None:
    rows = draws(COUNTS, size, 200)
    assert rows.shape == (200, 4, size) and rows.dtype == np.int32
    assert distinct(rows)
    assert (rows >= 0).all() and (rows < COUNTS[:, None]).all()


@pytest.mark.parametrize("size", [4, 8])
def test_every_record_is_equally_likely(size: int) -> None:
    rows = draws(COUNTS, size, 4000)
    for agent, count in enumerate(COUNTS):
        assert uniformity(rows[:, agent], count) > 1e-3


def test_uniformity_test_catches_draw_without_its_shift() -> None:
    # Strata of unequal size: 9 records in 4 strata are 2, 2, 2, 3, the last ones less likely.
    rng = np.random.default_rng(0)
    low = np.arange(4) * 9 // 4
    high = (np.arange(4) + 1) * 9 // 4
    assert uniformity(rng.integers(low, high, (4000, 4)), 9) < 1e-6


def test_distinctness_test_catches_independent_draws() -> None:
    assert not distinct(np.random.default_rng(0).integers(0, 9, (50, 4)))


def test_each_record_of_stratum_is_drawn_beside_each_of_next() -> None:
    """Draws inside half of a stratum would be uniform too, by the shift that all places share."""
    rows = draws(np.array([800]), 8, 500)[:, 0]
    spacings = np.diff(rows, axis=1) % 800
    # Of two strata of 100 records, between 1 and 199 apart.
    assert spacings.min() < 20 and spacings.max() > 180
    halves = rows[:, :1] + 100 * np.arange(8) + np.random.default_rng(0).integers(0, 50, (500, 8))
    spacings = np.diff(halves % 800, axis=1) % 800
    assert spacings.min() > 40 and spacings.max() < 160


def test_whole_batch_is_every_record() -> None:
    rows = draws(np.array([6]), 6, 20)
    assert (np.sort(rows, axis=-1) == np.arange(6)).all()


def test_agents_and_rounds_draw_apart() -> None:
    rows = draws(np.full(6, 1000), 5, 20).reshape(120, 5)
    assert len(np.unique(rows, axis=0)) == 120


def test_jit_equals_eager_and_counts_may_be_traced() -> None:
    key = jax.random.key(0)
    eager = batches.draw(key, COUNTS, 5)
    jitted = jax.jit(batches.draw, static_argnums=2)(key, jnp.asarray(COUNTS), 5)
    np.testing.assert_array_equal(eager, jitted)


def test_strata_of_large_counts_do_not_overflow() -> None:
    count = np.array([2**30])
    rows = draws(count, 512, 3)
    assert distinct(rows) and (rows >= 0).all() and (rows < count[0]).all()
    assert rows.max() > 2**29


def test_check_names_agent_with_too_few_records() -> None:
    batches.check_batch_size(COUNTS, 8)
    with pytest.raises(ValueError, match="batch_size is 9, but agent 0 has 8 records"):
        batches.check_batch_size(COUNTS, 9)


def taking_part(counts: np.ndarray, size: int, separation: int, rounds: int) -> list[np.ndarray]:
    """For each agent which of its records are in which round, [records, rounds]."""
    deal = jax.jit(batches.cyclic, static_argnums=(2, 3))
    selection = [np.zeros((count, rounds), int) for count in counts]
    for t in range(rounds):
        positions, padding = map(np.asarray, deal(t, counts, size, separation))
        assert positions.shape == padding.shape == (len(counts), size)
        for agent, (row, pad) in enumerate(zip(positions, padding, strict=True)):
            np.add.at(selection[agent][:, t], row[~pad], 1)
    return selection


@pytest.mark.parametrize("counts", [[12, 12], [9, 14, 1, 20]])
def test_cyclic_batches_hold_every_record_once_cycle(counts: list[int]) -> None:
    separation = 4
    epochs = 3
    size = -(-max(counts) // separation)
    for taken in taking_part(np.array(counts), size, separation, epochs * separation):
        assert (taken.sum(axis=1) == epochs).all() and taken.max() == 1
        first = taken.argmax(axis=1)
        for k in range(epochs):
            assert (taken[np.arange(len(taken)), first + k * separation] == 1).all()
        # Batches of an agent differ by one record at most.
        assert np.ptp(taken.sum(axis=0)) <= 1


def test_cyclic_batches_refuse_what_does_not_fit() -> None:
    batches.check_cyclic(np.array([9, 14]), 4, 4)
    with pytest.raises(ValueError, match="agent 1 has 14 records .*give batch_size=4"):
        batches.check_cyclic(np.array([9, 14]), 3, 4)
    with pytest.raises(ValueError, match="product is below"):
        batches.check_cyclic(np.array([9, 14]), 2**16, 2**16)
    # What the check refuses would leave records out.
    assert taking_part(np.array([14]), 3, 4, 4)[0].sum() < 14
