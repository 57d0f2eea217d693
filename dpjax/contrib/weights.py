"""Parameters from safetensors files in the layouts of public PyTorch models."""

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray

from dpjax import _files

__all__ = ["load_parameters"]

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
"""PyTorch's names of flax's parameters; others keep their own."""

_DTYPES = re.compile("BF16|F(16|32|64)|[IU](8|16|32|64)|BOOL")


def read_tensors(path: _files.PathLike) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file.

    Args:
        path: The file, on this machine; nothing is fetched.

    Returns:
        Each tensor by its name: numbers of 16, 32 or 64 bits as float32, integers as they are.

    Raises:
        ValueError: Without the package safetensors, for a file that is none, or a tensor of
            another dtype (of 8 bits, say).

    Example:
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from dpjax.contrib import weights
        >>> save_file({"head.bias": np.zeros(3, np.float32)}, "some.safetensors")
        >>> weights.read_tensors("some.safetensors")["head.bias"].shape
        (3,)
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist; give a safetensors file on this machine")
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ValueError(
            "safetensors is not installed, and files of weights need it: pip install safetensors"
        ) from None
    with _files.reading(path, "give a whole safetensors file"):
        with safetensors.safe_open(str(path), framework="np") as file:
            for name in file.keys():
                # numpy lacks eight-bit floats, and would fail without naming the tensor.
                kind = file.get_slice(name).get_dtype()
                if not _DTYPES.fullmatch(kind):
                    raise ValueError(
                        f"{path} holds {name} of dtype {kind}, which is not supported; save it as "
                        "float32, float16 or bfloat16"
                    )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {
        name: tensor if tensor.dtype.kind in "iub" else np.asarray(tensor, np.float32)
        for name, tensor in tensors.items()
    }


def load_parameters(
    path: _files.PathLike,
    model: nn.Module,
    example: Any,
    name: Callable[[tuple[str, ...]], str],
    *,
    head: str,
    key: PRNGKeyArray | None = None,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Return a model's parameters, read from a file that names them otherwise.

    Kernels of dense layers are turned round, [out, in] to [in, out], those of convolutions from
    [o, i, h, w] to [h, w, i, o].

    Args:
        path: A safetensors file.
        model: The module.
        example: An input, of which only shape and dtype count.
        name: From where a parameter's layer is, ``("block_0", "proj")``, to the layer's name in the
            file; for a parameter of no layer, to its own name.
        head: The layer that a new start replaces.
        key: Draws that layer's parameters; None reads them.
        ignored: Beginnings of names in the file that the model has no use for.

    Returns:
        ``{"params": ...}``, numpy float32.

    Raises:
        ValueError: For tensors that are missing, unknown, not finite or of another shape, by name.
    """
    tensors = read_tensors(path)
    shapes = jax.eval_shape(model.init, jax.random.key(0), example)["params"]
    shapes = flatten_dict(shapes)
    params = {}
    names = {parts: _public(parts, name) for parts in shapes}
    if key is not None:
        # Only the head is kept: compiled, the rest of the model is never drawn.
        fresh = jax.jit(lambda key: model.init(key, example)["params"][head])(key)
        for parts, leaf in flatten_dict(fresh).items():
            params[(head, *parts)] = np.asarray(leaf)
    stored = {parts: public for parts, public in names.items() if parts not in params}
    unknown = tensors.keys() - set(names.values())
    _refuse(path, "lacks", set(stored.values()) - tensors.keys())
    _refuse(path, "holds the unknown", [e for e in unknown if not e.startswith(tuple(ignored))])
    mismatched = []
    for parts, public in stored.items():
        original = tensors[public]
        tensor = _turned(parts[-1], original)
        params[parts] = tensor
        if tensor.shape != shapes[parts].shape or tensor.dtype != np.float32:
            mismatched.append(f"{public} {original.dtype} {original.shape}")
        elif not np.isfinite(tensor).all():
            mismatched.append(f"{public} with numbers that are not finite")
    _refuse(path, f"does not fit {model.__class__.__name__}'s shapes by", mismatched)
    return {"params": unflatten_dict(params)}


def _public(parts: tuple[str, ...], name: Callable[[tuple[str, ...]], str]) -> str:
    """The file's name of a parameter."""
    leaf = _LEAVES.get(parts[-1])
    if leaf is None:
        return name(parts)
    return f"{name(parts[:-1])}.{leaf}"


def _turned(leaf: str, tensor: np.ndarray) -> np.ndarray:
    """PyTorch's order of axes as flax's."""
    if leaf != "kernel" or tensor.ndim not in (2, 4):
        return tensor
    # PyTorch has outputs first; of convolutions then inputs, height and width.
    return np.ascontiguousarray(tensor.T if tensor.ndim == 2 else tensor.transpose(2, 3, 1, 0))


def _refuse(path: _files.PathLike, fault: str, names: Iterable[str]) -> None:
    """Raise ValueError that lists the first names, if there are any."""
    names = sorted(names)
    if names:
        rest = ""
        if len(names) > 8:
            rest = f" and {len(names) - 8} more"
        raise ValueError(
            f"{path} {fault} {', '.join(names[:8])}{rest}; give a file of this model, or a model "
            "of the file's sizes (a key draws a new head)"
        )
