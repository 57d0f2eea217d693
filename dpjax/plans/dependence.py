"""What a method's messages depend on, shown from the program that computes them.

A jaxpr is followed from its inputs: an output depends on every input of every equation on the way,
whatever the values. That is more than the truth (x - x depends on x) and never less.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from dpjax.plans.compatibility import packaged
from dpjax.protocols import Answer, Emission, Method, Optimizer, PublicState, Query, Round

__all__: list[str] = []


_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
"""Equations whose inputs and outputs are those of the program that they hold."""
_HOST = {"pure_callback", "io_callback", "debug_callback", "debug_print"}
"""Equations that hand inputs to the host, where nobody follows them."""


class _Shown(NamedTuple):
    """What leaves an agent, in the order in which it is judged."""

    public: Any
    message: Any
    sent: Any
    released: Any
    asked: Any


def reached(jaxpr: core.Jaxpr, marked: Sequence[bool], handed: Any = None) -> list[bool]:
    """Return which outputs of a jaxpr depend on marked inputs.

    Args:
        jaxpr: A jaxpr; constants are not marked.
        marked: One an input.
        handed: List for the names of equations that hand marked values to the host.

    Returns:
        One an output.
    """
    known: dict[Any, bool] = dict(zip(jaxpr.invars, marked, strict=True))

    def of(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and known.get(atom, False)

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        none = [False] * len(equation.outvars)
        outputs = _outputs(equation, inputs, handed) if any(inputs) else none
        known.update(zip(equation.outvars, outputs, strict=True))
        if any(inputs):
            # What is written to in place may hold any of it from here on.
            known.update((atom, True) for atom in equation.invars if _written(atom))
    return [of(atom) for atom in jaxpr.outvars]


def _outputs(equation: Any, marked: list[bool], handed: Any) -> list[bool]:
    """Which outputs of one equation depend on its marked inputs."""
    name, parameters = equation.primitive.name, equation.params
    if name in _HOST and handed is not None:
        handed.append(name)
    if any(_written(atom) for atom in equation.invars):
        return [True] * len(equation.outvars)
    if name == "scan":
        fixed, carried = parameters["num_consts"], parameters["num_carry"]
        body, kept = parameters["jaxpr"].jaxpr, marked[fixed:][:carried]
        return _repeated(body, marked[:fixed], kept, marked[fixed + carried :], handed)
    if name == "while":
        tests, fixed = parameters["cond_nconsts"], parameters["body_nconsts"]
        start = marked[tests + fixed :]
        body, test = parameters["body_jaxpr"].jaxpr, parameters["cond_jaxpr"].jaxpr
        ended = _repeated(body, marked[tests:][:fixed], start, [], handed)
        stops = reached(test, [*marked[:tests], *ended], handed)
        return [each or stops[0] for each in ended]
    if name == "cond":
        chosen, operands = marked[0], marked[1:]
        each = [reached(branch.jaxpr, operands, handed) for branch in parameters["branches"]]
        return [chosen or any(outputs) for outputs in zip(*each, strict=True)]
    inner = [one for one in map(_open, parameters.values()) if one is not None]
    # Of others the inner program may mean something else: a reduction's combines two numbers.
    if name in _CALLS and len(inner) == 1:
        (one,) = inner
        if len(one.invars) == len(marked) and len(one.outvars) == len(equation.outvars):
            return reached(one, marked, handed)
    return [True] * len(equation.outvars)


def _repeated(
    body: core.Jaxpr, fixed: list[bool], carried: list[bool], others: list[bool], handed: Any
) -> list[bool]:
    """Outputs of a loop: what is carried, until nothing is added, and what is stacked."""
    while True:
        outputs = reached(body, [*fixed, *carried, *others], handed)
        new = [a or b for a, b in zip(carried, outputs, strict=False)]
        if new == carried:
            return new + outputs[len(carried) :]
        carried = new


def _written(atom: Any) -> bool:
    """Whether an input is a reference, which equations may write to."""
    return "Ref" in type(atom.aval).__name__


def _open(value: Any) -> core.Jaxpr | None:
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, core.Jaxpr) else None


def check(
    method: Method,
    arrays: Any,
    *,
    query: Query,
    optimizer: optax.GradientTransformation,
    divisor: float,
    models: Any,
    batch: Any,
    coded: bool = False,
) -> None:
    """Refuse a method that sends, or calls released, what noise has not been added to.

    Data are followed over any number of rounds: a model that absorbed a gradient as it is may be
    kept, and then may be sent as a private payload alone. The noisy payload counts as safe, and a
    message as safe to send on: how much noise there is, is for accounting. That knows how far one
    answer of the query can move, so the payload must be one, as it was given; a method whose
    payload is something else has a ``sensitivity`` of its own. Gradients must be asked at models
    that follow from messages; a method whose sensitivity says how far others move says so, too
    (``asks_own``).

    Args:
        method: What agents compute, keep and send.
        arrays: One plan's arrays.
        query: How gradients are read.
        optimizer: What turns noisy means into updates.
        divisor: What sums are divided by.
        models: Agent-stacked models, or their shapes.
        batch: A batch, or its shapes.
        coded: Whether noise gives the payload another form, of whole numbers.

    Raises:
        ValueError: Naming the first leaf of a message, of what is public or of what is released
            that depends on data past the noise, or a leaf of these, of models or of memory that is
            a key; for a payload that is no answer of the query.
    """
    watched = _Watched(query)

    payload = jax.eval_shape(method.payload, models)

    def context(arrays: Any, key: Any, round: Any, batch: Any) -> Round:
        opened = _opening(payload) if coded and key is not None else None
        return Round(arrays, batch, watched, optimizer, divisor, key, round, opened)

    def start(arrays: Any, models: Any, key: Any) -> Any:
        return method.start(context(arrays, key, 0, None), models)

    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = jax.eval_shape(start, arrays, models, key)
    noisy = _whole(payload) if coded else payload
    _check_keys({"models": models, "memory": memory})

    def one(kept: Any, batch: Any, arrays: Any, key: Any, round: Any, noisy: Any) -> Any:
        public_state, ctx = PublicState(*kept), context(arrays, key, round, batch)
        watched.clear()
        emission = method.emit(ctx, public_state)
        if method.sensitivity is None:
            _check_answer(emission.private, watched.totals)
        _check_payload(emission.private, payload)
        with _explained(method):
            hidden = Emission((), emission.public, emission.carry)
            message, carry = method.send(ctx, public_state, hidden, noisy)
            received = method.exchange(arrays, round, message)
            new = method.absorb(ctx, public_state, carry, received.value)
            released = method.released(PublicState(*new))
        # Gradients at an agent's own model move with it, which such a method's sensitivity says.
        own = method.sensitivity is not None and method.asks_own
        asked = () if own else list(watched.asked)
        shown = _Shown(emission.public, message, received.sent, released, asked)
        return tuple(new), shown

    round = jax.ShapeDtypeStruct((), jnp.int32)
    inputs = ((models, memory), batch, arrays, key, round, noisy)
    closed, shapes = jax.make_jaxpr(one, return_shape=True)(*inputs)
    _check_keys(dict(zip(("models", "memory"), shapes[0], strict=True)))
    _check_keys(shapes[1]._asdict())
    sizes = [len(jax.tree.leaves(part)) for part in inputs]
    kept = [False] * sizes[0]
    paths = jax.tree_util.tree_leaves_with_path(shapes[1])
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    while True:
        others = [True] * sizes[1] + [False] * sum(sizes[2:])
        # A loss of one's own may print what it likes; a method, and its encoders, may not.
        handed = list[str]() if isinstance(query, _Toy) else None
        outputs = reached(closed.jaxpr, [*kept, *others], handed)
        if handed:
            raise ValueError(
                f"method has a {handed[0]} that gets what depends on data past the noise; leave "
                "it out of what agents compute"
            )
        new = [a or b for a, b in zip(kept, outputs[: len(kept)], strict=True)]
        for name, shows in zip(names, outputs[len(kept) :], strict=True):
            if shows:
                raise ValueError(
                    f"method shows {name}, which depends on data otherwise than through the noisy "
                    "payload; put it into Emission.private, keep it with the agent, or ask the "
                    "query at models and by encoders that know no data"
                )
        if new == kept:
            return
        kept = new


def _whole(payload: Any) -> Any:
    """Shapes of a payload as whole numbers: one array of all its entries."""
    leaves = jax.tree.leaves(payload)
    size = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return jax.ShapeDtypeStruct((leaves[0].shape[0], size), jnp.uint32)


def _opening(payload: Any) -> Callable[[Any], Any]:
    """What makes a payload's form of a sum of whole numbers: here, each entry of its own."""
    leaves, structure = jax.tree.flatten(payload)

    def opened(total: Any) -> Any:
        parts, start = [], 0
        for leaf in leaves:
            size = math.prod(leaf.shape[1:])
            part = total[start : start + size].astype(leaf.dtype)
            parts.append(part.reshape(leaf.shape[1:]))
            start += size
        return jax.tree.unflatten(structure, parts)

    return opened


@functools.lru_cache(maxsize=64)
def check_method(
    method: Method, optimizer: Optimizer, mixing: tuple[int, ...], coded: bool = False
) -> None:
    """`check` a method on a small model, once for a method, an optimizer and a network's size.

    Args:
        method: What agents compute, keep and send.
        optimizer: What turns noisy means into updates.
        mixing: Shape of the mixing matrix or schedule, [n, n] or [P, n, n].
        coded: As in `check`.

    Raises:
        ValueError: As `check`.
    """
    arrays: dict[str, Any] = {"mixing": jax.ShapeDtypeStruct(mixing, jnp.float32)}
    arrays |= {name: jnp.asarray(value) for name, value in optimizer.arrays().items()}
    entries = max(2, method.entries)
    models = {"w": jax.ShapeDtypeStruct((mixing[-1], entries), jnp.float32)}
    batch = jax.ShapeDtypeStruct((mixing[-1], 1), jnp.float32)
    check(
        method,
        arrays,
        query=_Toy(),
        optimizer=optimizer.chain(arrays),
        divisor=1.0,
        models=models,
        batch=batch,
        coded=coded,
    )


@contextlib.contextmanager
def _explained(method: Method) -> Iterator[None]:
    """Say in one line what a method of a user's own is given where it fails."""
    try:
        yield
    except Exception as error:
        if packaged(type(method)):
            raise
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"method is {type(method).__name__}, which fails between send and released: {first}; "
            "send gets the noisy payload as its last argument, Emission.private is withheld from "
            "it, and it returns (message, carry); absorb returns (models, memory)"
        ) from error


class _Watched:
    """A query that remembers its answers while a program is traced."""

    def __init__(self, query: Query):
        self.query, self.metrics = query, query.metrics
        self.totals, self.asked = list[Any](), list[Any]()
        self.combined = False

    def clear(self) -> None:
        """Forget what was asked."""
        self.totals.clear()
        self.asked.clear()

    def __call__(
        self, models: Any, batch: Any, encode: Callable[[Any], Any] | None = None
    ) -> Answer:
        answer = self.query(models, batch, encode)
        self.totals.append(answer.total)
        # A model or an encoder that knows other records moves all terms by one of them.
        encoded: Any = ()
        if encode is not None:
            axes = 2 if self.combined else 1
            one = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[axes:], leaf.dtype), models)
            _check_hands(jax.make_jaxpr(encode)(one).jaxpr)
            encoded = encode(one)
        self.asked.append({"models": models, "encoded": encoded})
        return answer

    def points(self, weights: Sequence[float] | None = None) -> "_Watched":
        """At several models, remembered together."""
        wide = _Watched(self.query.points(weights))
        wide.combined = weights is not None
        wide.totals, wide.asked = self.totals, self.asked
        return wide

    def along(self, steps: int, step_size: float) -> "_Watched":
        """Of local training, remembered together."""
        local = _Watched(self.query.along(steps, step_size))
        local.combined, local.totals, local.asked = self.combined, self.totals, self.asked
        return local


class _Toy:
    """A query of any model whose answer depends on all of the batch."""

    metrics = ()

    def __init__(self, combined: bool = False):
        self.combined = combined

    def __call__(
        self, models: Any, batch: Any, encode: Callable[[Any], Any] | None = None
    ) -> Answer:
        total = jax.tree.map(lambda leaf: leaf * jnp.sum(batch), models)
        if self.combined:
            total = jax.tree.map(lambda leaf: leaf.sum(1), total)
        return Answer(total if encode is None else jax.vmap(encode)(total))

    def points(self, weights: Sequence[float] | None = None) -> "_Toy":
        """Itself: any shapes will do, and sums in the place of weighted ones."""
        return _Toy(weights is not None)

    def along(self, steps: int, step_size: float) -> "_Toy":
        """Itself: shapes stay."""
        del steps, step_size
        return self


def _check_hands(encoder: core.Jaxpr) -> None:
    """Refuse an encoder that hands a gradient to the host; a loss of one's own may."""
    handed = list[str]()
    reached(encoder, [True] * len(encoder.invars), handed)
    if handed:
        raise ValueError(
            f"method has a {handed[0]} that gets what depends on data before the clip, in its "
            "encoder; leave it out of what agents compute"
        )


def _check_keys(slots: dict[str, Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state has a key in {jax.tree_util.keystr(path)}, which checkpoints hold, other "
                "agents see, or every plan has of its own; keys belong to the privatizer's state "
                "alone, the secret slot"
            )


def _check_answer(payload: Any, totals: list[Any]) -> None:
    """Refuse a payload that is not one answer, the very arrays."""
    leaves = jax.tree.leaves(payload)
    for total in totals:
        answers = jax.tree.leaves(total)
        if len(answers) == len(leaves) and all(map(operator.is_, leaves, answers)):
            return
    raise ValueError(
        f"method emits a private payload that is none of the {len(totals)} answers of the query as "
        "it was given, so that nothing says how far one record can move it; emit the answer's "
        "total, encode before the clip, or state a sensitivity"
    )


def _check_payload(payload: Any, expected: Any) -> None:
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (payload, expected)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"payload says {shapes[1]}, emit gives {shapes[0]}; make Method.payload of the shapes "
            "that are emitted"
        )
