"""What a method's messages depend on, shown from the program that computes them.

A jaxpr is followed from its inputs: an output depends on every input of every equation on the way,
whatever the values. That is more than the truth (x - x depends on x) and never less.
"""

import collections
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from dpjax import _numerics
from dpjax.plans import compatibility
from dpjax.protocols import (
    Answer,
    Arrays,
    Batch,
    Emission,
    Memory,
    Message,
    Method,
    Models,
    Optimizer,
    PublicState,
    Round,
    Updates,
)
from dpjax.transforms.lowpass import SHARES

__all__ = ()


_Marks: TypeAlias = list[bool]
"""Which of some inputs or outputs depend on data."""
_Atom: TypeAlias = core.Var | core.Literal

_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
"""Equations whose inputs and outputs are those of the program that they hold."""
_HOST = {"debug_print", "infeed", "outfeed"}
"""Equations that hand inputs to the host, where nobody follows them, beside each callback."""

# A mean by 1 is the very sum, and no other divisor may pass for it.
_DIVISOR = 2.0

_Shown = collections.namedtuple("_Shown", "public message sent released models_and_encoders")
"""What leaves an agent, in the order in which it is judged."""


class _OnHost(ValueError):
    """What depends on data is handed to the host."""


def reached(jaxpr: core.Jaxpr, marked: Sequence[bool]) -> _Marks:
    """Return which outputs of a jaxpr depend on marked inputs.

    Args:
        jaxpr: A jaxpr; constants are not marked, but references among them are.
        marked: One an input.

    Returns:
        One an output.

    Raises:
        ValueError: For a marked value that is handed to the host.
    """
    # References from outside may hold what an earlier round has written.
    depends: dict[_Atom, bool] = {
        constant: True for constant in jaxpr.constvars if _written(constant)
    }
    depends.update(zip(jaxpr.invars, marked, strict=True))

    def of(atom: _Atom) -> bool:
        # Literals are no keys: those of arrays have no hash.
        return not isinstance(atom, core.Literal) and depends.get(atom, False)

    for equation in jaxpr.eqns:
        inputs = [of(atom) for atom in equation.invars]
        if any(inputs):
            depends.update(zip(equation.outvars, _outputs(equation, inputs), strict=True))
            # What is written to in place may hold any of it from here on.
            depends.update((atom, True) for atom in equation.invars if _written(atom))
    return [of(atom) for atom in jaxpr.outvars]


def _outputs(equation: core.JaxprEqn, marked: _Marks) -> _Marks:
    """Which outputs of one equation depend on its marked inputs."""
    _check_host(equation, within=False)
    try:
        outputs = None if any(map(_written, equation.invars)) else _followed(equation, marked)
    except _OnHost:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        # Another version of JAX, with another layout of its parameters.
        outputs = None
    if outputs is not None and len(outputs) == len(equation.outvars):
        return outputs
    # Its programs may mean anything, or data decide which one is run.
    _check_host(equation, within=True)
    return [True] * len(equation.outvars)


def _check_host(equation: core.JaxprEqn, within: bool) -> None:
    name = equation.primitive.name
    if name in _HOST or "callback" in name:
        raise _OnHost(
            f"method has a {name} that gets what depends on data past the noise; leave it out of "
            "what agents compute"
        )
    for program in _programs(equation.params.values()) if within else ():
        for equation in program.eqns:
            _check_host(equation, within)


def _written(atom: _Atom) -> bool:
    """Whether it is a reference, which equations write to in place."""
    return "Ref" in type(atom.aval).__name__


def _programs(values: Iterable[Any]) -> list[core.Jaxpr]:
    """The programs among an equation's parameters, one by one or in tuples."""
    programs = []
    for value in jax.tree.leaves([*values]):
        if isinstance(value, core.ClosedJaxpr):
            value = value.jaxpr
        if isinstance(value, core.Jaxpr):
            programs.append(value)
    return programs


def _followed(equation: core.JaxprEqn, marked: _Marks) -> _Marks | None:
    """Outputs of an equation whose programs are known to mean what its name says, or None.

    How many inputs of a loop are constant, carried or stacked is read off shapes, since the
    parameters that count them differ between versions of JAX.
    """
    name = equation.primitive.name
    parameters = equation.params
    width = len(equation.outvars)
    programs = _programs(parameters.values())
    if name == "scan":
        (body,) = programs
        stacked, outputs = (
            [outside.aval.ndim - inside.aval.ndim for outside, inside in zip(*pairs, strict=True)]
            for pairs in ((equation.invars, body.invars), (equation.outvars, body.outvars))
        )
        carried = outputs.count(0)
        others = stacked.count(1)
        fixed = len(marked) - carried - others
        in_order = [0] * (fixed + carried) + [1] * others, [0] * carried + [1] * (width - carried)
        return _loop(body, fixed, carried, marked) if (stacked, outputs) == in_order else None
    # How often a loop runs may depend on what it carries, and then all of it does.
    if name == "while":
        test, body = _programs([parameters["cond_jaxpr"], parameters["body_jaxpr"]])
        tests = len(test.invars) - width
        ended = _loop(body, len(body.invars) - width, width, marked[tests:])
        return None if any(reached(test, [*marked[:tests], *ended])) else ended
    # Which branch is taken is an input, too: marked, it marks all outputs.
    if name == "cond" and not marked[0]:
        branches = [reached(branch, marked[1:]) for branch in _programs(parameters["branches"])]
        return [any(outputs) for outputs in zip(*branches, strict=True)]
    # Of others the inner program may mean something else: a reduction's combines two numbers.
    if name in _CALLS:
        (program,) = programs
        return reached(program, marked)
    return None


def _loop(body: core.Jaxpr, fixed: int, carried: int, marked: _Marks) -> _Marks:
    """Outputs of a loop: what is carried, until nothing is added, and what is stacked."""
    inside = [atom.aval.str_short() for atom in body.invars[fixed:][:carried]]
    if fixed < 0 or inside != [atom.aval.str_short() for atom in body.outvars[:carried]]:
        raise ValueError("what a loop carries has another shape where it comes out")
    start = marked[fixed:][:carried]
    others = marked[fixed + carried :]
    while True:
        outputs = reached(body, [*marked[:fixed], *start, *others])
        new = [a or b for a, b in zip(start, outputs, strict=False)]
        if new == start:
            return new + outputs[carried:]
        start = new


@functools.lru_cache(maxsize=64)
def check_dependence(
    method: Method,
    optimizer: Optimizer,
    mixing: tuple[int, ...],
    integer_encoded: bool = False,
    models: Any = (),
) -> None:
    """Refuse a method that sends, or calls released, what noise has not been added to.

    It is traced once for a method, an optimizer, a network's size and a model's: a method may treat
    leaves by their names and shapes, so a custom one is traced again for those of a run. Data are
    followed over any number of rounds: a model that absorbed a gradient as it is may be
    kept, and then may be sent as a private payload alone. The noisy payload counts as safe, and a
    message as safe to send on: how much noise there is, is for accounting. That knows how far one
    answer of the query can move, so the payload must be one, as it was given; a method whose
    payload is something else has a ``sensitivity`` of its own. Gradients must be asked at models
    that follow from messages; a method whose sensitivity says how far others move says so, too
    (``reads_private_models``).

    Args:
        method: What agents compute, keep and send.
        optimizer: What turns noisy means into updates.
        mixing: Shape of the mixing matrix or schedule, [n, n] or [P, n, n].
        integer_encoded: Whether noise gives the payload another form, of whole numbers.
        models: Structure of all agents' models in a run, then the shapes of its leaves: so it has a
            hash. Without any a small toy is taken.

    Raises:
        ValueError: Naming the first leaf of a message, of what is public or of what is released
            that depends on data past the noise, or a leaf of these, of models or of memory that is
            a key; for a payload that is no answer of the query.
    """
    if type(method).emit is Method.emit or method.exchange is None:
        raise ValueError(
            f"method is {type(method).__name__}, which lacks emit or exchange; write both, or "
            "inherit dpjax.algorithms.dsgd.DSGD, which has them"
        )
    n = mixing[-1]
    # Shapes are enough: what depends on what does not follow from numbers.
    like = jax.ShapeDtypeStruct
    arrays: dict[str, Any] = {"mixing": like(mixing, jnp.float32)}
    arrays |= {name: jnp.asarray(value) for name, value in optimizer.arrays().items()}
    if getattr(optimizer, "uses_noise", False) and compatibility.in_sums(method):
        arrays[SHARES] = like((n,), jnp.float32)
    toy: Models = {"w": like((n, max(2, method.min_entries)), jnp.float32)}
    if models:
        structure, *leaves = models
        toy = structure.unflatten(leaves)
    batch = like((n, 1, 1), jnp.float32), like((n, 1), jnp.float32), like((n, 1), jnp.bool)
    query = _Query()
    chain = optimizer.chain(arrays)
    noisy = payload = jax.eval_shape(method.payload, toy)

    def opened(total: Message) -> Updates:
        # Every entry of a decoded sum may depend on all of what was summed.
        of_all = jnp.sum(total)
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape[1:], of_all, leaf.dtype), payload)

    decode = None
    if integer_encoded:
        entries = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(payload))
        noisy = like((n, entries), jnp.uint32)
        decode = opened

    def start(arrays: Arrays, models: Models, key: Array) -> Memory:
        ctx = Round(arrays, None, query, chain, _DIVISOR, key, jnp.int32(0), decode)
        with compatibility.called(method, "method.start"):
            return method.start(ctx, models)

    def round_of(
        state: PublicState, batch: Batch, arrays: Arrays, key: Array, round: Array, noisy: Updates
    ) -> tuple[PublicState, _Shown]:
        ctx = Round(arrays, batch, query, chain, _DIVISOR, key, round, decode)
        return _round(method, ctx, state, noisy, payload)

    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = jax.eval_shape(start, arrays, toy, key)
    _check_keys(models=toy, memory=memory)
    inputs = (PublicState(toy, memory), batch, arrays, key, like((), jnp.int32), noisy)
    closed, (state, outgoing) = jax.make_jaxpr(round_of, return_shape=True)(*inputs)
    _check_keys(**state._asdict(), **outgoing._asdict())
    _check_shapes("method or optimizer turns a state of {} into {}: keep shapes", inputs[0], state)
    names = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(outgoing)
    ]
    states = len(jax.tree.leaves(inputs[0]))
    data = [True] * len(jax.tree.leaves(batch))
    public = [False] * len(jax.tree.leaves(inputs[2:]))
    marked: _Marks = []
    new = [False] * states
    # Data in the state of one round may reach a message of the next: until nothing is added.
    while new != marked:
        marked = new
        outputs = reached(closed.jaxpr, marked + data + public)
        leak = next(itertools.compress(names, outputs[states:]), None)
        if leak is not None:
            raise ValueError(
                f"method shows {leak}, which depends on data by another way than the noisy "
                "payload. Put it into Emission.private, keep it with the agent, or ask the "
                "query at models and by encoders that know no data"
            )
        new = [a or b for a, b in zip(marked, outputs[:states], strict=True)]


def _round(
    method: Method, ctx: Round, public_state: PublicState, noisy: Updates, payload: Updates
) -> tuple[PublicState, _Shown]:
    """The state after a round, and what leaves an agent in it."""
    with compatibility.called(method, "method.emit"):
        emission = method.emit(ctx, public_state)
    query: Any = ctx.query
    _check_payload(method, emission.private, payload, query.totals)
    hidden = Emission((), emission.public, emission.carry)
    text = (
        "method.send (which gets the noisy payload as its last argument, Emission.private is "
        "withheld from it, and returns (message, carry)), exchange"
    )
    with compatibility.called(method, text):
        message, carry = method.send(ctx, public_state, hidden, noisy)
        received = method.exchange(ctx.arrays, ctx.round, message)
    with compatibility.called(method, "method.absorb (which returns (models, memory)) or released"):
        state = PublicState(*method.absorb(ctx, public_state, carry, received.value))
        released = method.released(state)
    # Gradients at an agent's own model move with it, which such a method's sensitivity says.
    says_distance = method.sensitivity is not None and method.reads_private_models
    read = [] if says_distance else query.read
    return state, _Shown(emission.public, message, received.sent, released, read)


class _Query:
    """A query of any model whose answer depends on all of the batch; it remembers its answers."""

    metrics = ("gradient_norm", "clip_fraction")

    combined = False

    def __init__(self) -> None:
        self.totals = list[Updates]()
        self.read = list[Models]()

    def __call__(
        self, models: Models, batch: Batch, encode: Callable[[Updates], Updates] | None = None
    ) -> Answer:
        # Any number that depends on every record, and on each through every entry.
        data = sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(batch))
        total = jax.tree.map(lambda leaf: leaf * jnp.asarray(data, leaf.dtype), models)
        if self.combined:
            total = jax.tree.map(lambda leaf: leaf.sum(1), total)
        # A model or an encoder that knows other records moves all terms by one of them.
        encoded: Updates = ()
        if encode is not None:
            term = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), total)
            encoded = encode(term)
            total = jax.vmap(encode)(total)
        self.totals.append(total)
        self.read.append({"models": models, "encoded": encoded})
        # What a query reports has seen the data without noise.
        return Answer(total, dict.fromkeys(self.metrics, jnp.asarray(data)))

    def points(self, weights: Sequence[float] | None = None) -> "_Query":
        """At several models, remembered together: any shapes will do, sums for weighted ones."""
        wide = copy.copy(self)
        wide.combined = weights is not None
        return wide

    def local_steps(self, steps: int, step_size: float) -> "_Query":
        """Of local training, remembered together: shapes stay."""
        del steps, step_size
        return self


def _check_keys(**slots: Memory) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(slots):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"state has a key in {jax.tree_util.keystr(path)}, which checkpoints hold, other "
                "agents see, or every plan has of its own; keys belong to the privatizer's state "
                "alone, the secret slot"
            )


def _check_payload(
    method: Method, emitted: Updates, payload: Updates, totals: list[Updates]
) -> None:
    """Refuse a payload of other shapes, or that is not one answer, the very arrays."""
    arrays = [[*map(id, jax.tree.leaves(tree))] for tree in (emitted, *totals)]
    if method.sensitivity is None and arrays[0] not in arrays[1:]:
        raise ValueError(
            f"method emits a private payload that is none of the {len(totals)} answers of the "
            "query as it was given, so nothing says how far one record can move it. Emit the "
            "answer's total, encode before the clip, or state a sensitivity"
        )
    _check_shapes("emit gives {}, payload says {}: make them one", emitted, payload)


def _check_shapes(text: str, *trees: Memory) -> None:
    shapes = [_numerics.shapes(tree, dropped=0) for tree in trees]
    if shapes[0] != shapes[1]:
        raise ValueError(text.format(*shapes))
