"""RoBERTa with a classification head, from a random start or from a file in the public layout."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from dpjax import _files
from dpjax.contrib import weights
from dpjax.contrib.attention import attend
from dpjax.models.layers import Logits

__all__ = ["RoBERTa", "load_roberta"]

_START = nn.initializers.normal(0.02)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)


def _dense(width: int, name: str) -> nn.Dense:
    return nn.Dense(width, kernel_init=_START, name=name)


def _embed(rows: int, width: int, name: str) -> nn.Embed:
    return nn.Embed(rows, width, embedding_init=_START, name=name)


class _Layer(nn.Module):
    """Attention and two dense layers, each added to what came in and followed by a layer norm."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array, visible: Bool[Array, "b t"]) -> Array:
        width = x.shape[-1]
        query, key, value = (_dense(width, name)(x) for name in ("query", "key", "value"))
        attended = _dense(width, "attended")(attend(query, key, value, self.heads, visible))
        x = _norm("attended_norm")(x + attended)
        inner = _dense(self.hidden, "intermediate")(x)
        inner = nn.gelu(inner, approximate=False)
        inner = _dense(width, "output")(inner)
        return _norm("output_norm")(x + inner)


class RoBERTa(nn.Module):
    """An encoder of text with a classification head: RoBERTa-base by default.

    Tokens that equal ``padding`` are looked at by nobody: they change no logit and have no
    gradient, to the bit of a weight that is exactly zero. The head reads the first token: a dense
    layer, tanh, a dense layer. 124,647,170 parameters by default. No dropout, neither in training.

    Attributes:
        classes: Number of logits.
        vocabulary: Number of tokens.
        positions: Rows of the table of positions; texts have at most positions - padding - 1
            tokens.
        width: Channels of a token.
        depth: Number of layers.
        heads: Of attention, a divisor of the width.
        hidden: Channels between the two dense layers.
        padding: The token that fills texts up; positions are counted from the one after it.

    Reference:
        Liu et al. (2019), RoBERTa: A Robustly Optimized BERT Pretraining Approach,
        arXiv 1907.11692.

    Example:
        >>> import jax
        >>> from dpjax.contrib import roberta
        >>> model, x = roberta.RoBERTa(depth=1), jax.ShapeDtypeStruct((2, 6), "int32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 2)
    """

    classes: int = 2
    vocabulary: int = 50265
    positions: int = 514
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    padding: int = 1

    @nn.compact
    def __call__(self, tokens: Int[Array, "b t"]) -> Logits:
        """Return the logits of texts.

        Args:
            tokens: [b, t] numbers of tokens, int32.

        Raises:
            ValueError: For tokens that are no integers, or more than there are positions.
        """
        self._check(tokens)
        visible = tokens != self.padding
        # Numbers of places count from padding + 1, as in the published weights.
        places = jnp.cumsum(visible, axis=-1) * visible + self.padding
        x = _embed(self.vocabulary, self.width, "words")(tokens)
        # One type of text; the published weights have a vector for it.
        x = x + _embed(1, self.width, "types")(jnp.zeros_like(tokens))
        x = x + _embed(self.positions, self.width, "places")(places)
        x = _norm("norm")(x)
        for index in range(self.depth):
            x = _Layer(self.heads, self.hidden, name=f"layer_{index}")(x, visible)
        return _Head(self.classes, name="head")(x[:, 0])

    def _check(self, tokens: Array) -> None:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens are {tokens.dtype}; give integers, as the tokenizer does")
        # Places of words begin behind that of padding.
        longest = self.positions - self.padding - 1
        if tokens.ndim != 2 or tokens.shape[1] > longest:
            raise ValueError(
                f"tokens have shape {tokens.shape}; give [texts, tokens] with at most {longest} "
                "tokens"
            )
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}; give a divisor of width={self.width}")


class _Head(nn.Module):
    """What replaces the head of masked words for classification."""

    classes: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.tanh(_dense(x.shape[-1], "dense")(x))
        return _dense(self.classes, "out_proj")(x)


def load_roberta(
    path: _files.PathLike, model: RoBERTa, *, key: PRNGKeyArray | None = None
) -> dict[str, Any]:
    """Read a model's parameters from a safetensors file in the layout of Hugging Face.

    ``roberta.embeddings...``, ``roberta.encoder.layer.N...`` and ``classifier...``. The head of
    masked words, the pooler and the list of positions are left out.

    Args:
        path: The file, on this machine.
        model: What the file holds.
        key: Draws a new classification head, which pretrained files lack; None reads the file's.

    Returns:
        Parameters for ``model.apply``, float32.

    Raises:
        ValueError: For tensors that are missing, unknown or of another shape, by name.
    """
    example = jnp.zeros((1, 2), jnp.int32)
    unused = ("lm_head.", "roberta.pooler.", "roberta.embeddings.position_ids")
    return weights.load_parameters(
        path, model, example, _name, head="head", key=key, ignored=unused
    )


_EMBEDDINGS = {
    "words": "word_embeddings",
    "types": "token_type_embeddings",
    "places": "position_embeddings",
    "norm": "LayerNorm",
}
_INNER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attended_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def _name(path: tuple[str, ...]) -> str:
    """The layout's name of a layer."""
    if path[0] == "head":
        return f"classifier.{path[1]}"
    if path[0] in _EMBEDDINGS:
        return f"roberta.embeddings.{_EMBEDDINGS[path[0]]}"
    number = path[0].removeprefix("layer_")
    return f"roberta.encoder.layer.{number}.{_INNER[path[1]]}"
