"""Image classifiers by name: data, network and problem that belong together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.contrib import augmentation, images, networks, vit


def test_bytes_become_numbers_from_minus_one_to_one():
    class Same(networks.nn.Module):
        @networks.nn.compact
        def __call__(self, x):
            return x

    x = jnp.asarray([[0, 51, 255]], jnp.uint8)
    out = networks.Pixels(Same()).apply({}, x)
    np.testing.assert_allclose(out, [[-1.0, -0.6, 1.0]], rtol=1e-6)
    assert out.dtype == jnp.float32
    # Enlarged, neighbours are averaged and an image of one colour stays one.
    image = jnp.asarray([[0, 255], [0, 255]], jnp.uint8)[None, :, :, None]
    large = networks.Pixels(Same(), side=4).apply({}, image)[0, :, :, 0]
    np.testing.assert_allclose(large, [[-1.0, -0.5, 0.5, 1.0]] * 4, atol=1e-6)


@pytest.mark.parametrize("name", ["small_cnn", "cnn5", "vit_tiny"])
def test_networks_have_logit_class(name):
    x = jnp.zeros((2, 28, 28, 1), jnp.uint8)
    model = networks.network(name, 7, pixels=True)
    shapes = jax.eval_shape(lambda key: model.init_with_output(key, x)[0], jax.random.key(0))
    assert shapes.shape == (2, 7)


@pytest.mark.slow
def test_problem_is_of_records_that_it_is_given():
    digits = images.read("digits", "mlp", records=100)
    x, y = digits.train
    assert len(x) == len(y) == 100 and type(digits.model).__name__ == "MLP"
    half = digits.problem((x[:50], y[:50]), (x[50:], y[50:]))
    assert len(half.y) == 50 and half.partition.counts.tolist() == [50]
    argument = digits.model.init(jax.random.key(3), jnp.asarray(x[:1]))
    started = digits._replace(params=argument).problem(*digits[1:3]).init(jax.random.key(0))
    for leaf, expected in zip(jax.tree.leaves(started), jax.tree.leaves(argument), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    assert half.augmentation_multiplicity == 1 and half.augment is None and half.name == "digits"
    # A mirrored digit is another sign: it is shifted alone, a picture of anything else is not.
    pictures = np.zeros((6, 28, 28, 1), np.float32), np.arange(6) % 2
    display = images.Images("mnist", pictures, pictures, networks.network("small_cnn", 2))
    shifted = display.problem(pictures, pictures, 2)
    assert (
        shifted.augment == augmentation.Shift(2, "zeros") and shifted.augmentation_multiplicity == 2
    )
    mirrored = display._replace(dataset="cifar10").problem(pictures, pictures, 2)
    assert mirrored.augment is augmentation.standard


def small_vit(width=12):
    """Tensors in the layout of timm: one block, patches of 16 in an image of 224."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 197, width)}
    shapes["patch_embed.proj.weight"] = (width, 3, 16, 16)
    dense = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 4}
    shapes |= {f"blocks.0.{name}.weight": (n * width, width) for name, n in dense.items()}
    shapes |= {f"blocks.0.{name}.bias": (n * width,) for name, n in dense.items()}
    shapes |= {"blocks.0.mlp.fc2.weight": (width, 4 * width), "head.weight": (1000, width)}
    shapes |= {"head.bias": (1000,)}
    for name in ("patch_embed.proj", "blocks.0.mlp.fc2", "blocks.0.norm1", "blocks.0.norm2"):
        shapes[f"{name}.bias"] = (width,)
    for name in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_fine_tuning_starts_from_files_numbers(tmp_path, monkeypatch):
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = small_vit()
    path = tmp_path / "vit.safetensors"
    numpy.save_file(tensors, path)
    make = functools.partial(vit.ViT, width=12, depth=1, heads=2)
    monkeypatch.setattr(images.vit, "ViT", make)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (9, 32, 32, 3)).astype(np.uint8), np.arange(9) % 3
    monkeypatch.setattr(images.load, "load", lambda name: None)
    monkeypatch.setattr(images.split, "with_test", lambda data, part, seed: (pictures, pictures))
    data = images.read("cifar10", "vit_small", weights=path)
    assert data.model.side == 224
    begun = data.problem(data.train, data.test).init(jax.random.key(1))
    body = begun["params"]["body"]
    np.testing.assert_array_equal(body["cls_token"], tensors["cls_token"])
    kernel = tensors["blocks.0.attn.qkv.weight"].T
    np.testing.assert_array_equal(body["block_0"]["qkv"]["kernel"], kernel)
    assert body["head"]["kernel"].shape == (12, 3)
    # A start at random has none of it.
    assert images.read("cifar10", "cnn5").params is None
    with pytest.raises(ValueError, match="weights are of ViT-S/16 .* model is 'cnn5' on cifar10"):
        images.read("cifar10", "cnn5", weights=path)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="model is 'vit_small' on digits; give"):
        images.read("digits", "vit_small", weights="vit.safetensors")
    with pytest.raises(ValueError, match="model is 'cnn6'; did you mean cnn5.* one of mlp"):
        images.read("digits", "cnn6")
    with pytest.raises(ValueError, match="records is -1"):
        images.read("digits", "mlp", records=-1)
    with pytest.raises(ValueError, match="name is 'cnn6'"):
        networks.network("cnn6", 10)
