"""Layer-wise norms (ghost clipping): weighted sums of per-example gradients, from their norms.

Per-example gradients of dense layers, convolutions and embeddings are products, see
`dpjax.models.products`, whose norm costs less than they do where there are few positions; then the
weighted sum over examples is one product too, and no example's gradient is formed. All other
parameters have plain gradients, one an example.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import VariableDict
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from dpjax import _agents, _numerics, _validate
from dpjax.models import products
from dpjax.protocols import Updates

__all__ = ["Gradients"]

ROUTES = ("norm", "formed", "plain")
"""A layer's gradients: never formed; formed by a product; by the backend's own differentiation."""

_HELD = 2**24
"""Numbers of all examples that a CPU takes at once."""

_COARSE = 0.008
"""Share of the clip norm that products of one position may cost: in float64 they take 1.4 to 2.6
times as long on a CPU. Below it are batches of 256."""

_Weights = Callable[[Array], Array]
_Apply = Callable[..., Array]
_Shaped = Array | jax.ShapeDtypeStruct


class _Call(NamedTuple):
    """A layer's call, as the trace of one example met it.

    Attributes:
        number: Of the call, in the order of the trace.
        path: Of the module.
        leaves: Which of the model's parameters its product gives, by number.
        input: Shape and dtype of its input, of one example.
        out: Of its output.
        product: How the gradient follows.
        module: The layer, of no model.
        params: Its parameters' names, and their numbers among the model's.
    """

    number: int
    path: tuple[str, ...]
    leaves: tuple[int, ...]
    input: jax.ShapeDtypeStruct
    out: jax.ShapeDtypeStruct
    product: products.Product
    module: nn.Module
    params: dict[str, int]


_MARK = "dpjax.models.layer_norms"


def _numbered(of_call: Callable[..., Array]) -> Callable[..., Array]:
    """An interceptor of calls of known layers, numbered as they come: paths are not theirs alone.

    A model may apply another one, whose layers have paths of their own, and layers may share one.

    Args:
        of_call: ``of_call(number, module, call, x)``.
    """
    numbers = itertools.count()

    def intercept(
        call: _Apply,
        args: tuple[Array, ...],
        kwargs: dict[str, object],
        context: nn.module.InterceptorContext,
    ) -> Array:
        module = context.module
        is_layer = products.known(module) and context.method_name == "__call__"
        # With more arguments, as a mask, a call is no product.
        if not is_layer or kwargs or len(args) != 1:
            return call(*args, **kwargs)
        return of_call(next(numbers), module, call, args[0])

    return intercept


def _alone(program: Any, call: _Call) -> bool:
    """Whether a call is in the program itself, once, as it is, and alone uses its parameters.

    Args:
        program: Of one example, its first inputs the parameters.
        call: What was noted.
    """
    # Of all equations these alone have a name that is a mark.
    names = [str(equation.params.get("name", "")) for equation in program.eqns]
    ends = []
    for side, shape in (("begins", call.input), ("ends", call.out)):
        mark = f"{_MARK} {call.number} {side}"
        if names.count(mark) != 1:
            return False
        index = names.index(mark)
        # Another shape, where a vmap inside the module runs it for several inputs.
        if program.eqns[index].outvars[0].aval.shape != shape.shape:
            return False
        ends.append(index)
    for leaf in call.leaves:
        variable = program.invars[leaf]
        uses = [i for i, equation in enumerate(program.eqns) if variable in equation.invars]
        inside = all(ends[0] < i < ends[1] for i in uses)
        # What nobody uses has no product, and another use adds to the gradient.
        if not uses or not inside or variable in program.outvars:
            return False
    return _plain(program, ends[0], ends[1], call)


def _plain(program: Any, begin: int, end: int, call: _Call) -> bool:
    """Whether the program between two marks is the layer's own.

    It is not where the model has interceptors that change what comes into its layers or out.
    """
    first = program.eqns[begin].outvars[0]
    last = program.eqns[end].invars[0]
    invars = [program.invars[leaf] for leaf in call.params.values()] + [first]
    shapes = []
    for aval in [variable.aval for variable in invars]:
        shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type))

    def layer(*inputs: Array) -> Any:
        *values, x = inputs
        return call.module.apply({"params": dict(zip(call.params, values, strict=True))}, x)

    isolated = jax.make_jaxpr(layer)(*shapes).jaxpr
    # Printed, variables have names by the order in which they come.
    equations = program.eqns[begin + 1 : end]
    between = isolated.replace(invars=invars, outvars=[last], eqns=equations)
    return str(isolated) == str(between)


@dataclass(frozen=True, eq=False)
class Gradients:
    """A weighted sum of per-example gradients whose weights depend on the gradients' norms.

        sum_b w_b grad loss(apply(params, x_b), y_b),   w = weights(norms)

    A layer's gradient is A' D: what came in at t positions, and the derivatives by what came out.
    Its norm is had from the t x t products A A' and D D' where 2 t^2 <= p d, the entries of the
    kernel; else the gradient is formed, by one product an example.

    Layers are found by reading the model's program: dense layers, 2-D convolutions (flax's and
    those of `dpjax.models.conv`) and embeddings that are called once, whose kernel nobody else
    uses, and that no ``nn.remat``, ``nn.scan``, ``nn.vmap`` and the like surrounds. Whatever is
    not found to be so has a plain gradient an example.

    Guarantee: norms are not below those of the summed terms, but for a relative rounding that
    `dpjax.transforms.clipping.slack` covers, or are infinite or nan; an example of such a norm, or
    of weight 0, adds exactly zero. Before it is rounded, the sum is wrong by at most `error` times
    the summed norms of its terms, whatever the order of additions: formed gradients are added up in
    float64, and so are products, but for those of one position an example where `_COARSE` allows
    for the parameters' precision.

    Attributes:
        apply: ``apply(params, x) -> outputs`` of examples [b, ...], each of which depends on its
            own example alone; ``model.apply`` of a flax module.
        loss: ``loss(outputs, y)`` of one example.
        routes: By the layer's place, as ``"block_0/qkv"``: "norm", "formed" or "plain", in place of
            the rule. Which is fastest depends on the device.
        coefficients: Where parameters are of several points, leaves [points, ...], what each of an
            example's gradients is multiplied by before they are added up to one; else None.

    Reference:
        Goodfellow (2015), Efficient per-example gradient computations.
        Li, Tramer, Liang, Hashimoto (2022), Large Language Models Can Be Strong Differentially
        Private Learners.
        Bu, Mao, Xu (2022), Scalable and Efficient Training of Large Convolutional Neural Networks
        with Differential Privacy, for the rule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.models import layer_norms, losses, mlp
        >>> model = mlp.MLP(hidden=(4,), outputs=2)
        >>> x, y = jnp.ones((3, 5)), jnp.array([0, 1, 1])
        >>> params = model.init(jax.random.key(0), x)
        >>> gradients = layer_norms.Gradients(model.apply, losses.cross_entropy)
        >>> gradients.chosen(params, x)
        {'Dense_0': 'norm', 'Dense_1': 'norm'}
        >>> total = gradients(params, x, y, lambda norms: jnp.minimum(1, 0.1 / norms))
    """

    apply: Callable[..., Any]
    loss: Callable[[Array, Array], Array]
    routes: Mapping[str, Literal["norm", "formed", "plain"]] = field(default_factory=dict)
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse routes that there are not."""
        if not isinstance(self.routes, Mapping):
            raise _validate.refusal("routes", self.routes, "give {'layer': 'norm'}")
        for layer, route in self.routes.items():
            _validate.one_of(f"routes[{layer!r}]", route, ROUTES)

    def __call__(self, params: VariableDict, x: Array, y: Array, weights: _Weights) -> Updates:
        """Return the sum.

        Args:
            params: Of one agent.
            x: [B, ...] examples.
            y: [B] labels.
            weights: From the [B] norms to the [B] weights, from 0 to 1.

        Returns:
            A tree like params.
        """
        return self._rounded(params, x, y, weights, by_layer=False)

    def by_layer(self, params: VariableDict, x: Array, y: Array, weights: _Weights) -> Updates:
        """Return the sum in which every layer has a weight of its own.

        Args:
            params: Of one agent.
            x: [B, ...] examples.
            y: [B] labels.
            weights: From [B, layers] norms to weights; layers as `_numerics.layer_numbers` says.

        Returns:
            A tree like params.
        """
        return self._rounded(params, x, y, weights, by_layer=True)

    def _rounded(
        self, params: VariableDict, x: Array, y: Array, weights: _Weights, *, by_layer: bool
    ) -> Updates:
        # Without the error, for which the clip leaves room where it knows it.
        total = self.wide(
            params, x, y, lambda norms, _: weights(norms), by_layer=by_layer, places=len(x)
        )
        return _numerics.rounded_sum(total, self.like(params))

    def at_points(self, coefficients: Sequence[float]) -> "Gradients":
        """Return the same of linear combinations of gradients at several points.

        A' D of a layer is then one product of all points' positions.

        Args:
            coefficients: One a point.
        """
        factors = _validate.finite_array("coefficients", coefficients, ndim=1)
        return dataclasses.replace(self, coefficients=tuple(map(float, factors)))

    def chosen(self, params: VariableDict, x: _Shaped) -> dict[str, str]:
        """Return the layers that were found, each with what is done about its gradient.

        Args:
            params: Of one agent.
            x: [B, ...] examples.
        """
        return {"/".join(call.path): self._route(call) for call in self._calls(params, x)}

    def at_once(self, params: VariableDict, x: Array) -> int | None:
        """Return how many examples to take at once where nobody says, by memory; None is all.

        Args:
            params: Of one agent.
            x: [B, ...] examples.
        """
        if jax.default_backend() != "cpu":
            return None
        numbers = 1
        for call in self._calls(params, x):
            numbers += self._positions(call) * sum(call.product.shape)
            if self._route(call) != "norm":
                numbers += math.prod(call.product.shape)
        # As few passes as memory allows, as even as they can be.
        passes = -(-len(x) // max(1, _HELD // numbers))
        if passes == 1:
            return None
        return -(-len(x) // passes)

    def like(self, params: VariableDict) -> VariableDict:
        """Return a tree of the sum's shapes and dtypes.

        Args:
            params: Of one agent, arrays or shapes.
        """
        if self.coefficients is None:
            return params
        return _numerics.shapes(params)

    def error(self, params: VariableDict, x: _Shaped, places: int) -> float:
        """Return how wrong the sum may be before it is rounded, over the summed norms of its terms.

        Args:
            params: Of one agent, arrays or shapes.
            x: [B, ...] examples of one call, arrays or shapes.
            places: Examples of all calls whose sums are added up.
        """
        calls = self._calls(params, x)
        return self._error(calls, len(x), places, _unit(jax.tree.leaves(params)))

    def _error(self, calls: list[_Call], records: int, places: int, unit: float) -> float:
        """How wrong the sum may be: the worst of the products, and passes added up in float64.

        A product over examples is compared with the summed lengths of its terms. Several positions
        may cancel: |a_1||d_1| + |a_2||d_2| + ... is at most 2 / sqrt(u) times the norm's bound,
        which `products.square_bound` adds that much to, and float64 has digits for both.
        """
        worst = 0.0
        for call in calls:
            if self._route(call) != "norm":
                continue
            count = self._positions(call)
            # One position cannot cancel.
            cancelled = 1.0 if count <= 1 else 2 / math.sqrt(unit)
            bound = (records * count + 4) * _numerics.UNIT_ROUNDOFF * cancelled
            if _single(count, records, places, unit):
                bound = (records + 4) * unit
            worst = max(worst, bound)
        return worst + _numerics.sum_error(places)

    def wide(
        self,
        params: VariableDict,
        x: Array,
        y: Array,
        weights: Callable[[Array, float], Array],
        *,
        by_layer: bool,
        places: int,
    ) -> Updates:
        """Return the sum in float64.

        Args:
            params: Of one agent.
            x: [B, ...] examples.
            y: [B] labels.
            weights: From the [B] norms, or [B, layers], and `error` to weights.
            by_layer: Whether every layer has a weight of its own.
            places: Examples of all calls whose sums are added up.
        """
        calls = self._calls(params, x)
        points = [params]
        if self.coefficients is not None:
            numbers = range(len(self.coefficients))
            points = [jax.tree.map(lambda leaf, j=j: leaf[j], params) for j in numbers]
        leaves, tree = jax.tree.flatten(points[0])
        layer = _numerics.layer_numbers(points[0])
        unit = _unit(leaves)
        error = self._error(calls, len(x), places, unit)
        parts = [self._differentiated(point, calls, x, y) for point in points]
        formed, pairs = products.combined_points(self.coefficients, [part[:2] for part in parts])
        # A record is lost where it is at any of the points.
        lost = jax.tree.map(lambda *terms: sum(terms), *(part[2] for part in parts))

        def summed(formed: Updates, factors: Updates, lost: Updates) -> list[Array]:
            zeros = jnp.zeros(len(x), _numerics.wide_dtype(leaves))
            squares = [zeros] * (max(layer, default=-1) + 1)
            for number, gradient in formed.items():
                square = jax.vmap(_numerics.square_sum)(gradient.reshape(len(x), -1))
                squares[layer[number]] += square
            for number, arrays in factors.items():
                bound = functools.partial(products.square_bound, pairs[number][0])
                squares[layer[number]] += jax.vmap(bound)(*arrays)
            for number, infinite in lost.items():
                squares[layer[number]] += infinite
            stacked = jnp.stack(squares, axis=1)
            norms = jnp.sqrt(stacked if by_layer else jnp.sum(stacked, axis=1))
            # A record of an infinite norm, or of none, has no share in the sum.
            shares = jnp.where(jnp.isfinite(norms), weights(norms, error), 0)
            if not by_layer:
                shares = shares[:, None]
            shares = jnp.broadcast_to(shares, stacked.shape)
            sums = {}
            for number, gradient in formed.items():
                # Finite ones need no second look, which is a pass over the largest arrays.
                finite = number in lost and gradient.ndim == 3 and self.coefficients is None
                sums[number] = _weighted(shares[:, layer[number]], gradient, finite=finite)
            for number, (rows, derivative, _) in factors.items():
                single = _single(rows.shape[1], len(x), places, unit)
                weight = shares[:, layer[number], None, None]
                product = pairs[number][0]
                sums[number] = _contracted(product, rows, derivative, weight, single=single)
            with _numerics.double_precision():
                return [sums[i].reshape(leaf.shape) for i, leaf in enumerate(leaves)]

        # The norm must be of the very numbers that are added up.
        arrays = {number: pair[1:] for number, pair in pairs.items()}
        sums = _numerics.from_memory(summed, formed, arrays, lost)
        return jax.tree.unflatten(tree, sums)

    def _differentiated(
        self, params: VariableDict, calls: list[_Call], x: Array, y: Array
    ) -> tuple[Updates, Updates, Updates]:
        """By a parameter's number: gradients that are formed, products that are not, what is lost.

        Of a product whose entries might not be finite zeros are left, and its square is infinite.
        """
        leaves, tree = jax.tree.flatten(params)
        wide = _numerics.wide_dtype(leaves)
        zeros = {call.number: jnp.zeros(call.out.shape, call.out.dtype) for call in calls}
        plain: list[Array | None] = list(leaves)
        for call in calls:
            for number in call.leaves:
                plain[number] = None

        def example(plain: Updates, zeros: Updates, x: Array, y: Array) -> Updates:
            inputs = {}

            def of_call(number: int, module: nn.Module, call: _Apply, x: Array) -> Array:
                if number not in zeros:
                    return call(x)
                inputs[number] = x
                # The derivative by these zeros is that by what comes out.
                return call(x) + zeros[number]

            merged = [leaves[i] if leaf is None else leaf for i, leaf in enumerate(plain)]
            with nn.intercept_methods(_numbered(of_call)):
                outputs = self.apply(jax.tree.unflatten(tree, merged), x[None])
            return self.loss(outputs[0], y), inputs

        def differentiated(x: Array, y: Array) -> Updates:
            return jax.grad(example, (0, 1), has_aux=True)(plain, zeros, x, y)

        (gradients, derivatives), inputs = _agents.vmap_isolated(differentiated, x, y)
        formed = {}
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                formed[number] = gradient.astype(wide)
        pairs = {}
        lost = {}
        for call in calls:
            product = call.product
            activation = inputs[call.number]
            if not product.reads:
                # As the layer rounds what it multiplies; sizes are judged in the wide dtype.
                activation = activation.astype(call.out.dtype)
                activation = activation.astype(wide)
            derivative = derivatives[call.number].astype(wide)
            activation, derivative, finite = jax.vmap(_bounded)(activation, derivative)
            first = call.leaves[0]
            lost[first] = jnp.where(finite, 0, jnp.asarray(jnp.inf, wide))
            rows = jax.vmap(product.rows)(activation)
            flat = derivative.reshape(*rows.shape[:2], -1)
            if self._route(call) == "norm":
                pairs[first] = product, rows, flat, activation
                continue
            of_kernel = jax.vmap(product.gradient)(rows, flat)
            values = [leaves[number] for number in call.leaves]
            formed |= zip(call.leaves, product.parameters(of_kernel, values), strict=True)
        return formed, pairs, lost

    def _calls(self, params: VariableDict, x: _Shaped) -> list[_Call]:
        """The layers whose gradients are products, by reading the program of one example."""
        params = self.like(params)
        places = {}
        for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            places[jax.tree_util.keystr(path, simple=True, separator="/")] = number
        for route in self.routes:
            if not any(f"{name}/".startswith(f"params/{route}/") for name in places):
                raise ValueError(f"routes names {route!r}, where no parameters are; see `chosen`")
        leaves, tree = jax.tree.flatten(params)
        calls = []

        def example(leaves: list[Array], x: Array) -> Array:
            def of_call(number: int, module: nn.Module, call: _Apply, x: Array) -> Array:
                # The marks show in the program where the layer begins and ends.
                marked = checkpoint_name(x, f"{_MARK} {number} begins")
                out = checkpoint_name(call(marked), f"{_MARK} {number} ends")
                product = products.product(module, marked)
                values = module.variables.get("params", {})
                indices = {}
                # Not values that a lifted transform has made of the parameters.
                direct = True
                for name, value in values.items():
                    index = places.get("/".join(("params", *module.path, name)), -1)
                    direct = direct and index >= 0 and value is leaves[index]
                    indices[name] = index
                if product is not None and direct:
                    numbers = tuple(indices[name] for name in product.names)
                    bare = module.clone(parent=None, name=None)
                    before, after = _numerics.shapes((marked, out), dropped=0)
                    calls.append(
                        _Call(number, module.path, numbers, before, after, product, bare, indices)
                    )
                return out

            with nn.intercept_methods(_numbered(of_call)):
                return self.apply(jax.tree.unflatten(tree, leaves), x[None])

        values = _numerics.shapes(leaves, dropped=0)
        program = jax.make_jaxpr(example)(values, _numerics.shapes(x)).jaxpr
        routed = [call for call in calls if self._route(call) != "plain"]
        return [call for call in routed if _alone(program, call)]

    def _positions(self, call: _Call) -> int:
        """Positions of one example, of all points."""
        points = len(self.coefficients or (1,))
        return points * math.prod(call.out.shape) // call.product.shape[1]

    def _route(self, call: _Call) -> str:
        positions = self._positions(call)
        rule = "formed"
        if call.product.pays(positions):
            rule = "norm"
        route = self.routes.get("/".join(call.path), rule)
        if route == "norm" and not call.product.by_norm(positions):
            return "formed"
        return route


def _bounded(activation: Array, derivative: Array) -> tuple[Array, Array, Array]:
    """One example's input and derivative, and whether no entry of their product overflows.

    Zeros where one might: infinity times a weight of zero is nan. Of an input of whole numbers,
    which are those of rows, the size says nothing.
    """
    # Finiteness first: the largest of many numbers need not be nan where one of them is.
    bounded = jnp.isfinite(derivative).all()
    derivative = jnp.where(bounded, derivative, 0)
    top = jnp.max(jnp.abs(derivative), initial=0)
    if jnp.issubdtype(activation.dtype, jnp.floating):
        # By itself alone: what many models share, as a batch, stays shared.
        finite = jnp.isfinite(activation).all()
        activation = jnp.where(finite, activation, 0)
        largest = jnp.max(jnp.abs(activation), initial=0)
        bounded &= finite
        top = top * jnp.maximum(largest, 1)
    # An eighth leaves room for the rounding of the sums.
    limit = jnp.finfo(top.dtype).max / 8
    bounded &= top * derivative.size < limit
    return activation, jnp.where(bounded, derivative, 0), bounded


def _unit(leaves: Sequence[Array]) -> float:
    """Half the spacing, at 1, of the numbers that gradients are computed in."""
    return float(jnp.finfo(_numerics.wide_dtype(leaves)).eps) / 2


def _single(positions: int, records: int, places: int, unit: float) -> bool:
    """Whether a product over examples may be taken in the parameters' precision.

    Of one position the product of the lengths of input and derivative is the gradient's length, and
    a sum over m examples, in any order, is wrong by (m + 1) u of the summed lengths at most.
    """
    return positions == 1 and 2 * places * (records + 4) * unit <= _COARSE


def _contracted(
    product: products.Product, rows: Array, derivative: Array, weight: Array, *, single: bool
) -> Array:
    """The weighted sum over examples of a layer's products, in float64."""
    flat = rows.reshape(-1, *rows.shape[2:])
    kind = derivative.dtype if single else jnp.float64
    with _numerics.double_precision():
        scaled = derivative.astype(kind) * weight.astype(kind)
        # What combines several points may have made a derivative infinite.
        scaled = jnp.where(weight > 0, scaled, 0)
        if jnp.issubdtype(flat.dtype, jnp.floating):
            flat = flat.astype(kind)
        total = product.gradient(flat, scaled.reshape(-1, scaled.shape[-1]))
        return total.astype(jnp.float64)


def _weighted(
    weights: Float[Array, " b"], gradients: Float[Array, "b ..."], *, finite: bool
) -> Array:
    """The weighted sum, in float64, of formed gradients; of weight zero they may be infinite."""
    weights = weights.reshape(-1, *[1] * (gradients.ndim - 1))
    if not finite:
        gradients = jnp.where(weights > 0, gradients, 0)
    with _numerics.double_precision():
        return _numerics.row_sum(weights.astype(jnp.float64) * gradients.astype(jnp.float64))
