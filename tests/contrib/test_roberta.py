"""RoBERTa and vision transformers from public files, against plain numpy and against PyTorch."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.contrib import roberta, vit, weights
from dpjax.data import partition
from dpjax.learning.supervised import supervised

SMALL = roberta.RoBERTa(
    classes=3, vocabulary=50, positions=20, width=32, depth=2, heads=4, hidden=64
)
SMALL_VIT = vit.ViT(classes=5, patch=4, width=32, depth=2, heads=4)
TOKENS = np.array(
    [[0, 7, 9, 11, 4, 2, 1, 1], [0, 30, 2, 1, 1, 1, 1, 1], [0, 5, 6, 7, 8, 9, 10, 2]], np.int32
)

run = jax.jit(SMALL.apply)


def normal(shapes, seed=0):
    """Random tensors of a layout, far from their usual starts."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def roberta_layout(model):
    """Names and shapes of the public layout, [out, in]."""
    d = model.width
    hidden = model.hidden
    shapes = {
        "roberta.embeddings.word_embeddings.weight": (model.vocabulary, d),
        "roberta.embeddings.position_embeddings.weight": (model.positions, d),
        "roberta.embeddings.token_type_embeddings.weight": (1, d),
    }

    def layer(name, out, inside=None):
        shapes[f"{name}.weight"] = (out,) if inside is None else (out, inside)
        shapes[f"{name}.bias"] = (out,)

    layer("roberta.embeddings.LayerNorm", d)
    for index in range(model.depth):
        start = f"roberta.encoder.layer.{index}."
        for name in ("query", "key", "value"):
            layer(f"{start}attention.self.{name}", d, d)
        layer(f"{start}attention.output.dense", d, d)
        layer(f"{start}attention.output.LayerNorm", d)
        layer(f"{start}intermediate.dense", hidden, d)
        layer(f"{start}output.dense", d, hidden)
        layer(f"{start}output.LayerNorm", d)
    layer("classifier.dense", d, d)
    layer("classifier.out_proj", model.classes, d)
    return shapes


def vit_layout(model, image):
    d = model.width
    patches = (image // model.patch) ** 2
    shapes = {
        "cls_token": (1, 1, d),
        "pos_embed": (1, 1 + patches, d),
        "patch_embed.proj.weight": (d, 3, model.patch, model.patch),
        "patch_embed.proj.bias": (d,),
    }
    for index in range(model.depth):
        for name, out, inside in (
            ("norm1", d, None),
            ("attn.qkv", 3 * d, d),
            ("attn.proj", d, d),
            ("norm2", d, None),
            ("mlp.fc1", 4 * d, d),
            ("mlp.fc2", d, 4 * d),
        ):
            name = f"blocks.{index}.{name}"
            shapes[f"{name}.weight"] = (out,) if inside is None else (out, inside)
            shapes[f"{name}.bias"] = (out,)
    for name, shape in (("norm", (d,)), ("head", (model.classes, d))):
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


@pytest.fixture
def save(tmp_path):
    """Return ``write(tensors)``, which makes a file of them."""
    library = pytest.importorskip("safetensors.numpy", reason="needs dpjax[pretrained]")

    def write(tensors):
        path = tmp_path / "model.safetensors"
        library.save_file(tensors, path)
        return path

    return write


# Plain numpy, float64, on the file's own names.


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].astype(np.float64).T + tensors[f"{name}.bias"]


def layer_norm(tensors, name, x, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    centred = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return centred * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def attention(query, key, value, heads):
    """Of one sequence [t, d], a head at a time."""
    out = np.zeros_like(query)
    wide = query.shape[1] // heads
    for head in range(heads):
        part = slice(head * wide, (head + 1) * wide)
        scores = np.exp(query[:, part] @ key[:, part].T / math.sqrt(wide))
        out[:, part] = scores / scores.sum(1, keepdims=True) @ value[:, part]
    return out


def numpy_roberta(tensors, row, heads, depth, padding=1):
    """One text without its padding: nothing of it may matter."""
    row = row[row != padding]
    start = "roberta.embeddings."
    x = tensors[f"{start}word_embeddings.weight"][row].astype(np.float64)
    x = x + tensors[f"{start}token_type_embeddings.weight"][0]
    x = x + tensors[f"{start}position_embeddings.weight"][padding + 1 : padding + 1 + len(row)]
    x = layer_norm(tensors, f"{start}LayerNorm", x, 1e-5)
    for index in range(depth):
        start = f"roberta.encoder.layer.{index}."
        requests = [
            linear(tensors, f"{start}attention.self.{n}", x) for n in ("query", "key", "value")
        ]
        layer = linear(tensors, f"{start}attention.output.dense", attention(*requests, heads))
        x = layer_norm(tensors, f"{start}attention.output.LayerNorm", x + layer, 1e-5)
        inner = gelu(linear(tensors, f"{start}intermediate.dense", x))
        out = linear(tensors, f"{start}output.dense", inner)
        x = layer_norm(tensors, f"{start}output.LayerNorm", x + out, 1e-5)
    return linear(
        tensors, "classifier.out_proj", np.tanh(linear(tensors, "classifier.dense", x[0]))
    )


def numpy_vit(tensors, image, heads, depth, patch):
    """One image [h, w, 3]."""
    kernel = tensors["patch_embed.proj.weight"].astype(np.float64)
    tokens = [tensors["cls_token"][0, 0]]
    for i in range(0, image.shape[0], patch):
        for j in range(0, image.shape[1], patch):
            part = image[i : i + patch, j : j + patch].transpose(2, 0, 1)
            tokens.append((kernel * part).sum((1, 2, 3)) + tensors["patch_embed.proj.bias"])
    x = np.stack(tokens) + tensors["pos_embed"][0]
    for index in range(depth):
        start = f"blocks.{index}."
        inner = linear(tensors, f"{start}attn.qkv", layer_norm(tensors, f"{start}norm1", x, 1e-6))
        result = attention(*np.split(inner, 3, axis=1), heads)
        x = x + linear(tensors, f"{start}attn.proj", result)
        inner = linear(tensors, f"{start}mlp.fc1", layer_norm(tensors, f"{start}norm2", x, 1e-6))
        x = x + linear(tensors, f"{start}mlp.fc2", gelu(inner))
    return linear(tensors, "head", layer_norm(tensors, "norm", x, 1e-6)[0])


def test_roberta_reads_its_file_and_is_numpy_one(save):
    tensors = normal(roberta_layout(SMALL))
    params = roberta.load_roberta(save(tensors), SMALL)
    got = run(params, TOKENS)
    want = [numpy_roberta(tensors, row, SMALL.heads, SMALL.depth) for row in TOKENS]
    assert got.dtype == jnp.float32 and got.shape == (3, 3)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    # The same with one kernel not turned round, which is square, must differ.
    twin = jax.tree.map(np.copy, params)
    kernel = twin["params"]["layer_0"]["attended"]["kernel"]
    twin["params"]["layer_0"]["attended"]["kernel"] = kernel.T
    assert np.abs(run(twin, TOKENS) - np.array(want)).max() > 1e-2


def test_vit_reads_its_file_and_is_numpy_one(save):
    tensors = normal(vit_layout(SMALL_VIT, 8))
    params = vit.load_vit(save(tensors), SMALL_VIT, 8)
    x = np.random.default_rng(3).normal(size=(2, 8, 8, 3)).astype(np.float32)
    want = [numpy_vit(tensors, image, 4, 2, 4) for image in x.astype(np.float64)]
    got = jax.jit(SMALL_VIT.apply)(params, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_roberta_is_that_of_transformers(save):
    """Logits and the gradient of a loss, by a public implementation that reads the same file."""
    torch = pytest.importorskip("torch", reason="needs PyTorch, see dpjax[bench]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="needs dpjax[bench]")
        config = transformers.RobertaConfig(
            vocab_size=50,
            max_position_embeddings=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=3,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
        )
        theirs = transformers.RobertaForSequenceClassification(config).eval()
        tensors = normal(roberta_layout(SMALL))
        path = save(tensors)
        options = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
        left = theirs.load_state_dict(options, strict=False)
        assert not left.unexpected_keys
        assert all("position_ids" in name or "pooler" in name for name in left.missing_keys)
        tokens = torch.tensor(TOKENS.astype(np.int64))
        want = theirs(input_ids=tokens, attention_mask=(tokens != 1).long()).logits
        torch.logsumexp(want, 1).sum().backward()
        name = "roberta.encoder.layer.0.attention.self.key.weight"
        slope = dict(theirs.named_parameters())[name].grad.numpy()
    params = roberta.load_roberta(path, SMALL)
    np.testing.assert_allclose(run(params, TOKENS), want.detach(), rtol=1e-4, atol=2e-5)

    def loss(params):
        return jnp.sum(jax.nn.logsumexp(SMALL.apply(params, TOKENS), axis=1))

    ours = jax.grad(loss)(params)["params"]["layer_0"]["key"]["kernel"]
    np.testing.assert_allclose(ours.T, slope, rtol=1e-3, atol=1e-5)


def test_roberta_base_has_published_size():
    """124.6 million: 124,055,040 of the encoder, and the head of two classes."""
    d = 768
    want = (50265 + 514 + 1) * d + 2 * d
    want += 12 * (4 * (d * d + d) + 2 * d + 4 * d * d + 4 * d + 4 * d * d + d + 2 * d)
    assert want == 124_055_040
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(roberta.RoBERTa().init, jax.random.key(0), tokens)
    head = d * d + d + 2 * d + 2
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == want + head == 124_647_170


def at_random():
    """Parameters, without compiling how they are drawn."""
    shapes = jax.eval_shape(SMALL.init, jax.random.key(0), TOKENS)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


@pytest.mark.optimized
def test_padding_changes_no_bit():
    """What stands in the padding's rows is read by nobody."""
    params = at_random()
    other = jax.tree.map(np.array, params)
    other["params"]["words"]["embedding"][1] = 100.0
    other["params"]["places"]["embedding"][1] = -50.0
    np.testing.assert_array_equal(run(other, TOKENS), run(params, TOKENS))


@pytest.mark.slow
def test_padding_has_no_gradient():
    params = at_random()

    def gradient(tokens):
        return jax.jit(jax.grad(lambda p: jnp.sum(SMALL.apply(p, tokens) ** 2)))(params)["params"]

    text = TOKENS[:1]
    slope = gradient(text)
    assert not np.any(slope["words"]["embedding"][1]) and not np.any(
        slope["places"]["embedding"][1]
    )
    assert np.any(slope["words"]["embedding"][7])
    # Another number for padding makes other texts.
    blind = SMALL.clone(padding=3)
    assert np.any(jax.jit(blind.apply)(params, TOKENS) != run(params, TOKENS))
    short = run(params, text[:, :6])
    np.testing.assert_allclose(run(params, TOKENS)[:1], short, rtol=1e-5, atol=1e-6)


def test_batch_s_padding_row_is_finite():
    """Empty places of a batch are texts of padding alone."""
    params = at_random()
    assert np.isfinite(run(params, np.ones((2, 8), np.int32))).all()


@pytest.mark.slow
def test_problem_takes_encoder_and_its_tokens():
    """Tokens reach it as integers, and each example has a gradient."""
    y = np.array([0, 2, 1])
    shards = partition.iid(3, n=1, seed=0)
    task = supervised(SMALL, "cross_entropy", (TOKENS, y), (TOKENS, y), shards)
    assert task.x.dtype == np.int32
    params = at_random()
    slopes = jax.jit(jax.vmap(jax.grad(task.loss), (None, 0, 0)))(params, task.x, task.y)
    words = np.asarray(slopes["params"]["words"]["embedding"])
    for row, slope in zip(TOKENS, words, strict=True):
        used = np.flatnonzero(np.abs(slope).max(1))
        assert set(used) == set(row[row != SMALL.padding])


def test_tokens_that_do_not_fit_are_refused():
    for tokens, message in [
        (np.zeros((1, 4), np.float32), "tokens are float32; give integers"),
        (np.zeros((1, 19), np.int32), "at most 18 tokens"),
        (np.zeros(4, np.int32), r"tokens have shape \(4,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(SMALL.init, jax.random.key(0), tokens)


def test_new_head_is_drawn_and_rest_is_file_s(save):
    """As for fine-tuning: the file has another head, or that of masked words alone."""
    tensors = normal(roberta_layout(SMALL.clone(classes=7)))
    path = save(tensors)
    with pytest.raises(ValueError, match="shapes by classifier.out_proj.bias"):
        roberta.load_roberta(path, SMALL)
    params = roberta.load_roberta(path, SMALL, key=jax.random.key(5))["params"]
    assert params["head"]["out_proj"]["kernel"].shape == (32, 3)
    again = roberta.load_roberta(path, SMALL, key=jax.random.key(5))["params"]
    np.testing.assert_array_equal(
        again["head"]["dense"]["kernel"], params["head"]["dense"]["kernel"]
    )
    words = tensors["roberta.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(params["words"]["embedding"], words)

    pretrained = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
    pretrained["lm_head.bias"] = np.zeros(50, np.float32)
    pretrained["roberta.pooler.dense.bias"] = np.zeros(32, np.float32)
    pretrained["roberta.embeddings.position_ids"] = np.arange(20)[None]
    params = roberta.load_roberta(save(pretrained), SMALL, key=jax.random.key(5))
    assert run(params, TOKENS).shape == (3, 3)
    with pytest.raises(ValueError, match="lacks classifier.dense.bias"):
        roberta.load_roberta(save(pretrained), SMALL)


def test_files_that_do_not_fit_are_refused_by_name(save):
    name = "roberta.encoder.layer.1.output.dense.weight"
    good = normal(roberta_layout(SMALL))
    for change, message in [
        ({name: None}, f"lacks {name}"),
        ({"roberta.extra": np.ones(2, np.float32)}, "holds the unknown roberta.extra"),
        ({name: good[name].T.copy()}, "output.dense.weight float32 .64, 32."),
        ({name: good[name].astype(np.int32)}, "output.dense.weight int32"),
        ({name: np.full_like(good[name], np.nan)}, "numbers that are not finite"),
    ]:
        tensors = {key: item for key, item in (good | change).items() if item is not None}
        with pytest.raises(ValueError, match=message):
            roberta.load_roberta(save(tensors), SMALL)


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give a safetensors file"):
        weights.read_tensors(tmp_path / "nothing.safetensors")
    pytest.importorskip("safetensors", reason="needs dpjax[pretrained]")
    (tmp_path / "other").write_bytes(b"no such thing as this")
    with pytest.raises(ValueError, match="cannot be read .*; give a whole safetensors file"):
        weights.read_tensors(tmp_path / "other")


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_files_in_float8_are_refused(tmp_path, kind):
    pytest.importorskip("safetensors", reason="needs dpjax[pretrained]")
    header = f'{{"head": {{"dtype": "{kind}", "shape": [4], "data_offsets": [0, 4]}}}}'.encode()
    path = tmp_path / "narrow.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=f"holds head of dtype {kind}.*save it as float32"):
        weights.read_tensors(path)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_half_precision_files_become_float32(save, kind):
    tensors = normal(roberta_layout(SMALL))
    halves = {name: tensor.astype(jnp.dtype(kind)) for name, tensor in tensors.items()}
    params = roberta.load_roberta(save(halves), SMALL)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    name = "roberta.embeddings.word_embeddings.weight"
    want = halves[name].astype(np.float32)
    np.testing.assert_array_equal(params["params"]["words"]["embedding"], want)
