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
        module: The layer, of no model.
        params: Its parameters' names, and their numbers among the model's.
    """

    path: tuple[str, ...]
    leaves: tuple[int, ...]
    given: Any
    out: Any
    product: products.Product
    module: nn.Module
    params: dict[str, int]


_MARK = "dpjax.models.taps"


def _numbered(of_call: Callable[..., Any]) -> Callable[..., Any]:
    """An interceptor of calls of known layers, numbered as they come: paths are not theirs alone.

    A model may apply another one, whose layers have paths of their own, and layers may share one.

    Args:
        of_call: ``of_call(number, module, call, x)``.
    """
    numbers = itertools.count()

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or kwargs or len(args) != 1:
            return call(*args, **kwargs)
        if not products.known(module):
            return call(*args)
        return of_call(next(numbers), module, call, args[0])

    return intercept


def marking(
    calls: dict[int, Call], places: Mapping[tuple[str, ...], int], leaves: Sequence[Array]
) -> Callable[..., Any]:
    """Return an interceptor that notes calls of known layers and marks where they begin and end.

    Args:
        calls: Gets them, by number.
        places: The numbers of parameters, by their places.
        leaves: The parameters.
    """

    def of_call(number: int, module: nn.Module, call: Any, x: Any) -> Any:
        given = checkpoint_name(x, f"{_MARK} {number} begins")
        out = checkpoint_name(call(given), f"{_MARK} {number} ends")
        product = products.product(module, given, out)
        values = module.variables.get("params", {})
        found = {name: places.get(("params", *module.path, name), -1) for name in values}
        # Not values that a lifted transform has made of the parameters.
        own = all(leaf >= 0 and values[name] is leaves[leaf] for name, leaf in found.items())
        shape_in, shape_out = (
            jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (given, out)
        )
        if product is not None and own:
            numbers = tuple(found[name] for name in product.names)
            bare = module.clone(parent=None, name=None)
            calls[number] = Call(module.path, numbers, shape_in, shape_out, product, bare, found)
        return out

    return _numbered(of_call)


def alone(program: Any, number: int, call: Call) -> bool:
    """Whether a call is in the program itself, once, as it is, and alone uses its parameters.

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
    return _plain(program, ends[0], ends[1], call)


def _plain(program: Any, begin: int, end: int, call: Call) -> bool:
    """Whether the program between two marks is the layer's own.

    It is not where the model has interceptors that change what comes into its layers or out.
    """
    first, last = program.eqns[begin].outvars[0], program.eqns[end].invars[0]
    given = [program.invars[leaf] for leaf in call.params.values()] + [first]
    shapes = [
        jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype, weak_type=each.aval.weak_type)
        for each in given
    ]

    def layer(*inputs: Any) -> Any:
        *values, x = inputs
        return call.module.apply({"params": dict(zip(call.params, values, strict=True))}, x)

    own = jax.make_jaxpr(layer)(*shapes).jaxpr
    # Printed, variables have names by the order in which they come.
    between = own.replace(invars=given, outvars=[last], eqns=program.eqns[begin + 1 : end])
    return str(own) == str(between)


def tapped(
    apply: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    numbers: Sequence[int],
    zeros: list[Array],
) -> tuple[Any, list[Array]]:
    """Return outputs with zeros added to those of layers, and what came into these.

    Args:
        apply: ``apply(params, x)``.
        params: Of one agent.
        x: One example, with an axis of length one.
        numbers: Of the layers' calls, as `marking` counts them.
        zeros: One a layer, like its output.
    """
    inputs: list[Any] = [None] * len(numbers)
    places = {number: place for place, number in enumerate(numbers)}

    def of_call(number: int, module: nn.Module, call: Any, x: Any) -> Any:
        del module
        place = places.get(number)
        if place is None:
            return call(x)
        inputs[place] = x
        return call(x) + zeros[place]

    with nn.intercept_methods(_numbered(of_call)):
        return apply(params, x), inputs


def name_of(part: Any) -> str:
    """Return a name on the way to a parameter.

    Args:
        part: Of a path of ``jax.tree_util``.
    """
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
