"""Random variants of images."""

import jax
import numpy as np
import pytest

from dpjax.contrib import augmentation
from dpjax.contrib.augmentation import Shift

IMAGE = np.arange(1, 5 * 4 * 3 + 1, dtype=np.uint8).reshape(5, 4, 3)
KEYS = jax.random.split(jax.random.key(0), 400)


def made(augment, image=IMAGE):
    return np.asarray(jax.vmap(augment, in_axes=(0, None))(KEYS, image))


def test_half_of_images_are_mirrored():
    images = made(Shift(1, mirror=True))
    assert images.dtype == np.uint8
    counts = []
    for image in (IMAGE, IMAGE[:, ::-1]):
        padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), "reflect")
        places = [padded[i : i + 5, j : j + 4] for i in range(3) for j in range(3)]
        same = [(images == place).all(axis=(1, 2, 3)) for place in places]
        counts.append(np.any(same, axis=0).sum())
    assert sum(counts) >= len(images) and 150 < counts[1] < 250


@pytest.mark.parametrize("filling", ["reflect", "zeros"])
def test_every_shift_is_as_likely(filling):
    images = made(Shift(1, filling))
    mode = "reflect" if filling == "reflect" else "constant"
    padded = np.pad(IMAGE, ((1, 1), (1, 1), (0, 0)), mode)
    places = [padded[i : i + 5, j : j + 4] for i in range(3) for j in range(3)]
    counts = [int((images == place).all(axis=(1, 2, 3)).sum()) for place in places]
    assert sum(counts) == len(images) and min(counts) > 20 and max(counts) < 75


def test_mirror_and_shift_have_keys_of_their_own():
    first, second = (jax.random.fold_in(KEYS[3], number) for number in (0, 1))
    image = IMAGE[:, ::-1] if jax.random.bernoulli(first) else IMAGE
    np.testing.assert_array_equal(Shift(1, mirror=True)(KEYS[3], IMAGE), Shift(1)(second, image))
    standard = made(augmentation.standard, np.zeros((32, 32, 3), np.float32))
    assert standard.shape == (400, 32, 32, 3) and standard.dtype == np.float32


def test_impossible_shifts_are_refused():
    with pytest.raises(ValueError, match="pixels is 0"):
        Shift(0)
    with pytest.raises(ValueError, match="filling is 'wrap'"):
        Shift(1, "wrap")
    with pytest.raises(ValueError, match=r"shape \(5, 4, 3\); give"):
        Shift(4)(KEYS[0], IMAGE)
