"""Calls of layers in the program of one example: which are known, and what came in and out."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from dpjax.models import products

__all__: list[str] = []


class Call(NamedTuple):
    """A layer's call, as the trace of one example met it.

    Attributes:
        path: Of the module.
        leaves: Which of the model's parameters its product gives, by number.
        given: Shape and dtype of its input, of one example.
        out: Of its output.
        product: How the gradient follows.
    """

    path: tuple[str, ...]
    leaves: tuple[int, ...]
    given: Any
    out: Any
    product: products.Product


_MARK = "dpjax.models.taps"


def marking(
    calls: dict[int, Call], places: Mapping[tuple[str, ...], int], leaves: Sequence[Array]
) -> Callable[..., Any]:
    """Return an interceptor that notes calls of known layers and marks where they begin and end.

    Args:
        calls: Gets them, by number.
        places: The numbers of parameters, by their places.
        leaves: The parameters.
    """
    numbers = itertools.count()

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or kwargs or len(args) != 1:
            return call(*args, **kwargs)
        if not products.known(module):
            return call(*args)
        number = next(numbers)
        given = checkpoint_name(args[0], f"{_MARK} {number} begins")
        out = checkpoint_name(call(given), f"{_MARK} {number} ends")
        product = products.product(module, given, out)
        names = () if product is None else product.names
        found = [places.get(("params", *module.path, name), -1) for name in names]
        # Not values that a lifted transform has made of the parameters.
        own = [
            leaf >= 0 and module.get_variable("params", name) is leaves[leaf]
            for leaf, name in zip(found, names, strict=True)
        ]
        shape_in, shape_out = (
            jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (given, out)
        )
        if product is not None and all(own):
            calls[number] = Call(module.path, tuple(found), shape_in, shape_out, product)
        return out

    return intercept


def alone(program: Any, number: int, call: Call) -> bool:
    """Whether a call is in the program itself, once, and alone uses its layer's parameters.

    Args:
        program: Of one example, its first inputs the parameters.
        number: The call's.
        call: What was noted.
    """
    names = [
        str(equation.params["name"]) if equation.primitive.name == "name" else ""
        for equation in program.eqns
    ]
    ends = []
    for side, shape in (("begins", call.given), ("ends", call.out)):
        at = [i for i, name in enumerate(names) if name == f"{_MARK} {number} {side}"]
        # Another shape, where a vmap inside the module runs it for several inputs.
        if len(at) != 1 or program.eqns[at[0]].outvars[0].aval.shape != shape.shape:
            return False
        ends.append(at[0])
    for leaf in call.leaves:
        variable = program.invars[leaf]
        uses = [i for i, each in enumerate(program.eqns) if any(v is variable for v in each.invars)]
        inside = all(ends[0] < i < ends[1] for i in uses)
        if not uses or not inside or any(v is variable for v in program.outvars):
            return False
    return True


def tapped(
    apply: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    paths: Sequence[tuple[str, ...]],
    zeros: list[Array],
) -> tuple[Any, list[Array]]:
    """Return outputs with zeros added to those of layers, and what came into these.

    Args:
        apply: ``apply(params, x)``.
        params: Of one agent.
        x: One example, with an axis of length one.
        paths: Of the layers.
        zeros: One a layer, like its output.
    """
    inputs: list[Any] = [None] * len(paths)
    numbers = {path: number for number, path in enumerate(paths)}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        number = numbers.get(context.module.path)
        if number is None or context.method_name != "__call__":
            return call(*args, **kwargs)
        inputs[number] = args[0]
        return call(*args) + zeros[number]

    with nn.intercept_methods(intercept):
        return apply(params, x), inputs


def name_of(part: Any) -> str:
    """Return a name on the way to a parameter.

    Args:
        part: Of a path of ``jax.tree_util``.
    """
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
