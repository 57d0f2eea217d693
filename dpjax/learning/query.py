"""How gradients are read: one clipped gradient an agent, or a sum of clipped ones of records."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from dpjax import _agents, _numerics, _validate
from dpjax._programs import compiled
from dpjax.learning.parameters import Params, merge
from dpjax.protocols import Answer, Batch, Models, Updates
from dpjax.transforms import clipping

__all__ = ["RecordQuery"]


class Keyed(NamedTuple):
    """Records with the keys that their variants are drawn with.

    Attributes:
        x: [..., *record].
        words: [..., 2] a threefry key's words for each.
    """

    x: Array
    words: UInt32[Array, "*r 2"]


_Records: TypeAlias = Array | Keyed
"""One record, or a batch of them."""

Augment: TypeAlias = Callable[[PRNGKeyArray, Array], Array]
"""A random variant of one record, from a public key."""

_Weights: TypeAlias = tuple[float, ...] | None
_Coefficients: TypeAlias = Sequence[float] | None
_Loss: TypeAlias = Callable[..., Array]
_Encoder: TypeAlias = Callable[[Updates], Updates] | None
_Sum: TypeAlias = Callable[..., Updates]
_Walk: TypeAlias = tuple[Params, Updates]
_Passes: TypeAlias = tuple[Array, Updates]


@runtime_checkable
class _LayeredSum(Protocol):
    """A model's sum of weighted gradients that also has a weight for each layer, or point."""

    def __call__(self, params: Params, x: Array, y: Array, weights: _Loss) -> Updates:
        """The sum."""

    def by_layer(self, params: Params, x: Array, y: Array, weights: _Loss) -> Updates:
        """The sum with weights of every layer."""

    def at_points(self, coefficients: tuple[float, ...]) -> _Sum:
        """The sum of gradients at several points, added up with coefficients."""


@dataclass(frozen=True)
class Augmentation:
    """How variants of a record are made, and how many.

    Attributes:
        augment: ``augment(key, x) -> x`` of one record.
        number: K.
    """

    augment: Augment
    number: int

    def of(self, record: Keyed) -> Array:
        """Return the variants of one record, [K, *record].

        Args:
            record: One record with its key.
        """
        key = jax.random.wrap_key_data(record.words, impl=_numerics.THREEFRY)
        numbers = jnp.arange(self.number)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
        return jax.vmap(self.augment, in_axes=(0, None))(keys, record.x)

    def averaged(self, loss: _Loss) -> _Loss:
        """Return ``loss(params, record, y)`` as the mean over a record's variants.

        Args:
            loss: ``loss(params, x, y) -> scalar`` of one example.
        """

        def mean(params: Params, record: Keyed, y: Array) -> Array:
            losses = jax.vmap(loss, in_axes=(None, 0, None))(params, self.of(record), y)
            return jnp.mean(losses)

        return mean

    def spread(self, records: Keyed, *others: Array) -> tuple[Array, ...]:
        """Return the variants of a batch as its records, [B K, ...], and others K times each.

        Args:
            records: B of them with their keys.
            others: Arrays [B, ...].
        """
        x = jax.vmap(self.of)(records)
        variants = x.reshape(-1, *x.shape[2:])
        return variants, *(jnp.repeat(other, self.number, axis=0) for other in others)


def keyed(key: PRNGKeyArray | None, x: Array, rows: Int[Array, "*r"]) -> _Records:
    """Return records with their keys; as they are where no key is given.

    Args:
        key: The round's, for variants.
        x: [..., *record] records.
        rows: [...] where each stands among all.
    """
    if key is None:
        return x
    # By the record's number, not its place in the batch: whatever else was drawn, a record has the
    # same variants in a round. Words, since a batch's leaves are masked and padded as numbers.
    words = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(key, row)))
    return Keyed(x, words(rows.reshape(-1)).reshape(*rows.shape, 2))


def augmentation_of(
    augment: Augment | None, multiplicity: int, record: Array
) -> Augmentation | None:
    """Return what a problem's augmentation makes, or None where it has none.

    Args:
        augment: As in `dpjax.learning.problem.Problem`.
        multiplicity: K.
        record: One example, or its shape and dtype.

    Raises:
        ValueError: For no function, one that does not keep shape and dtype, a multiplicity without
            it, or no number.
    """
    number = _validate.integer("augmentation_multiplicity", multiplicity)
    if augment is None:
        if number != 1:
            raise ValueError(
                f"augmentation_multiplicity is {number} without augment, so that all variants are "
                "alike; give augment"
            )
        return None
    shape = jax.eval_shape(jnp.asarray, record)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=_numerics.THREEFRY))
    remedy = "give a function of a key and of one record that returns a record like it"
    try:
        variant = jax.eval_shape(augment, key, shape)
    except Exception as error:
        raise ValueError(
            f"augment is {_validate.shown(augment)}, which fails on a record of {shape.shape} "
            f"{shape.dtype}: {_validate.said(error)}; {remedy}"
        ) from error
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), variant)
    if form != (shape.shape, shape.dtype):
        raise ValueError(
            f"augment turns a record of {shape.shape} {shape.dtype} into {variant}; {remedy}"
        )
    return Augmentation(augment, number)


def _locally_trained(loss: _Loss, steps: int, step_size: float) -> _Loss:
    """Return a loss with the mean gradient along plain steps x_{j+1} = x_j - step_size grad f(x_j).

    Its gradient at x_0 is (x_0 - x_K) / (K step_size).

    Args:
        loss: ``loss(params, *data) -> scalar``, of a batch or one example.
        steps: K.
        step_size: Of each.
    """

    def trained(params: Params, *data: _Records) -> Any:
        start = jax.lax.stop_gradient(params)

        def step(_: Array, state: _Walk) -> _Walk:
            x, total = state
            gradient = jax.grad(loss)(x, *data)
            x = jax.tree.map(lambda p, g: p - step_size * g, x, gradient)
            return x, jax.tree.map(jnp.add, total, gradient)

        zeros = optax.tree.zeros_like(start)
        # One gradient is one, to the bit.
        _, total = jax.lax.fori_loop(0, steps, step, (start, zeros))
        mean = jax.tree.map(lambda leaf: leaf * (1 / steps), total)
        # Linear in params, so that its gradient is the mean.
        products = jax.tree.map(lambda m, p: jnp.sum(m * p), mean, params)
        return sum(jax.tree.leaves(products))

    return trained


@dataclass(frozen=True)
class AgentQuery:
    """The clipped gradient of an agent's mean loss: what "replace_agent" protects.

    Guarantee: the answer of one agent has a ``norm`` of at most ``clip_norm``, exactly, whatever
    its data and however its mean gradient was rounded, since the clip comes last. Replacing all of
    its data moves the answer by at most twice that, and no other agent's at all. An agent without
    records in a batch returns a zero gradient, whatever ``encode`` makes of one; so leaving an
    agent out moves its answer by at most ``clip_norm``. Padding moves nothing. An infinite clip
    norm bounds nothing: that gradients are close is then an assumption, which the guarantee states.

    Attributes:
        loss: ``loss(params, x, y) -> scalar`` of one example.
        batch_loss: The mean loss of a batch, where that is faster.
        clip_norm: Clip norm C; infinity does not clip.
        clipping: "flat" or "automatic".
        augmentation: Variants in the place of each record, whose keys the batch then has; or None.
        per_layer: Whether every one of L layers is clipped by itself, to C / sqrt(L).
        weights: Of the gradients at several points, which are added up; or None.
        norm: Which norm is bounded, "l2" or "l1".
        walk: (K, step size) of local steps, whose mean gradient takes the place of one; or None.
        one_by_one: Whether agents are taken one after the other.
    """

    loss: _Loss
    batch_loss: _Loss | None
    clip_norm: float
    clipping: clipping.Clipping
    augmentation: Augmentation | None = None
    per_layer: bool = False
    weights: _Weights = None
    norm: Literal["l2", "l1"] = "l2"
    walk: tuple[int, float] | None = None
    one_by_one: bool = False

    # One gradient an agent is clipped as it is rounded.
    rounds_sums = False
    metrics = ("gradient_norm", "clip_fraction")

    def __call__(self, models: Models, batch: Batch, encode: _Encoder = None) -> Answer:
        """Answer for every agent; see `dpjax.protocols.Query`."""
        loss = self._mean_loss
        if self.walk is not None:
            loss = _locally_trained(loss, *self.walk)
        encode = _combining(self.weights, encode)
        clip = clipping.per_agent(
            self.clip_norm, method=self.clipping, per_layer=self.per_layer, norm=self.norm
        )

        def answered(models: Models, batch: Batch) -> tuple[Updates, Array, Array]:
            # The clip comes last: what rounds before it moves no bound.
            gradients = _agents.each_agent(
                jax.grad(loss), models, batch, sequential=self.one_by_one
            )
            if encode is not None:
                gradients = _agents.vmap_isolated(encode, gradients)
            clipped, _ = clip.update(gradients, optax.EmptyState())
            if batch[-1] is not None:
                clipped = _numerics.masked(jnp.all(batch[-1], axis=1), jnp.zeros_like, clipped)
            norms = clipping.norms(gradients, self.norm)
            return clipped, norms, self._exceeded(gradients, norms)

        clipped, *diagnostics = _agents.in_blocks(answered, models, batch)
        values = (jnp.mean(diagnostic).astype(jnp.float32) for diagnostic in diagnostics)
        return Answer(clipped, dict(zip(self.metrics, values, strict=True)))

    def merging(self, frozen: Params) -> "AgentQuery":
        """The query of models that lack these leaves, whose gradients are not taken.

        Args:
            frozen: Values of one model, None in the places of trained ones.
        """
        return self._with_losses(lambda loss: _merging(loss, frozen))

    def points(self, weights: _Coefficients = None) -> "AgentQuery":
        """The query at several models of an agent; see `dpjax.protocols.Query`."""
        return dataclasses.replace(self._with_losses(_over_points), weights=_plain(weights))

    def local_steps(self, steps: int, step_size: float) -> "AgentQuery":
        """The query of local training; see `dpjax.protocols.Query`."""
        return dataclasses.replace(self, walk=(steps, step_size))

    def _with_losses(self, change: Callable[[_Loss], _Loss]) -> "AgentQuery":
        batch_loss = None if self.batch_loss is None else change(self.batch_loss)
        return dataclasses.replace(self, loss=change(self.loss), batch_loss=batch_loss)

    def _exceeded(self, gradients: Updates, norms: Float[Array, " n"]) -> Bool[Array, " n"]:
        """Whose gradient, or a layer of it, is longer than it may be."""
        if not self.per_layer:
            return norms > self.clip_norm
        leaves = jax.tree.leaves(gradients)
        layers = _numerics.layer_groups(gradients)
        # C / sqrt(L) each, so that the whole is C at most.
        share = _numerics.layer_share(self.clip_norm, len(layers))
        layer_norms = []
        for layer in layers:
            layer_leaves = [leaves[i] for i in layer]
            layer_norms.append(jax.vmap(optax.tree.norm)(layer_leaves))
        return jnp.any(jnp.stack(layer_norms) > share, axis=0)

    def _mean_loss(self, params: Params, batch: Batch) -> Array:
        x, y, padding = batch
        if self.augmentation is not None:
            # As many of each record: the mean over variants is the mean over records' means.
            x, y = self.augmentation.spread(x, y)
            padding = None if padding is None else jnp.repeat(padding, self.augmentation.number)
        if self.batch_loss is not None and padding is None:
            return self.batch_loss(params, x, y)
        if padding is not None:
            # Padding holds records of others, whose loss may have no finite gradient: times zero
            # that is nan, of which the clip would make zero. A loss may be undefined at zero, so
            # the agent's first record stands in.
            first = jnp.argmin(padding)
            x, y = _numerics.masked(padding, lambda leaf: leaf[first], (x, y))
        losses = jax.vmap(self.loss, in_axes=(None, 0, 0))(params, x, y)
        if padding is None:
            return jnp.mean(losses)
        # Over the agent's own records, however many; without any the gradient is zero.
        count = jnp.maximum(jnp.sum(~padding), 1).astype(losses.dtype)
        return jnp.sum(jnp.where(padding, 0, losses)) / count


@dataclass(frozen=True)
class RecordQuery:
    """The sum of the clipped gradients of a batch's records.

    Guarantee: zeroing a record out moves its agent's answer, as it is computed and rounded, by an
    L2 norm of at most ``clip_norm``, replacing it by at most twice that, and padding adds zero. For
    this each record is clipped to C / (1 + r), see `share`.

    Attributes:
        loss: ``loss(params, x, y) -> scalar`` of one example.
        weighted: A model's own sum of weighted gradients, or None.
        clip_norm: Clip norm C.
        clipping: "flat" or "automatic".
        microbatch: Records a pass of the clipped sum; None chooses by cost.
        augmentation: Variants over which a record's loss is averaged, before its gradient is
            clipped; the batch then has the records' keys. None is the record itself. No model's own
            sum knows of them.
        per_layer: Whether every one of L layers is clipped by itself, to C / sqrt(L).
        weights: Of the gradients at several points, which are added up; or None.
        capacity: Records that are gathered at a time from a batch of any size, an
            `UngatheredBatch`, whose places it divides; None takes gathered batches. Microbatches
            with no agent's record are left out, which changes no sum. How many there are shows in
            the time of a round, which no attacker here sees.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.learning.query import RecordQuery
        >>> query = RecordQuery(lambda params, x, y: params @ x, None, 1.0, "flat", None)
        >>> x = jnp.array([[[3.0, 4.0], [0.25, 0.0]]])  # one agent's two records
        >>> total = query(jnp.zeros((1, 2)), (x, jnp.zeros((1, 2)), None)).total
        >>> [round(float(entry), 3) for entry in total[0]]
        [0.85, 0.8]
    """

    loss: _Loss
    weighted: _Sum | _LayeredSum | None
    clip_norm: float
    clipping: clipping.Clipping
    microbatch: int | None
    augmentation: Augmentation | None = None
    per_layer: bool = False
    weights: _Weights = None
    capacity: int | None = None

    rounds_sums = True
    metrics = ()

    def __post_init__(self) -> None:
        """Refuse a sum that would leave the variants out."""
        if self.augmentation is not None and self.weighted is not None:
            raise ValueError(
                "weighted is given with an augmentation, which it leaves out; give None"
            )

    @property
    def one_by_one(self) -> bool:
        """Whether single gradients are formed: no model's sum, which may know no layers."""
        needs_layers = self.per_layer or self.microbatch is not None
        layered = isinstance(self.weighted, _LayeredSum)
        return self.weighted is None or (needs_layers and not layered)

    def __call__(self, models: Models, batch: Batch, encode: _Encoder = None) -> Answer:
        """Answer for every agent; see `dpjax.protocols.Query`."""
        wide = self._wide if self.capacity is None else self._in_passes
        total = wide(models, batch, encode, self._places(batch))
        # A model's own sum has combined the points already.
        weights = self.weights if encode is not None or self.one_by_one else None
        combined = _combining(weights, encode)
        like = models if combined is None else jax.eval_shape(jax.vmap(combined), models)
        return Answer(_numerics.rounded_sum(total, like))

    def share(self, models: Models, batch: Batch) -> float:
        """The share r of the clip norm by which rounding of an answer lowers a record's.

        Args:
            models: Shapes of every agent's parameters.
            batch: Shapes of a batch.
        """
        places = self._places(batch)
        x = batch[0]
        # Of one agent: agents' sums are rounded apart.
        params = _numerics.shapes(models)
        if self.one_by_one:
            return clipping.rounding_share(places, params)
        # A batch that is not gathered holds all records, without an axis of agents.
        leading = () if self.capacity is None else (self.capacity,)
        records = _numerics.shapes(x, *leading)
        return clipping.weighted_share(self.weighted, params, records, places, self.microbatch)

    def _places(self, batch: Batch) -> int:
        """Records of an agent in a whole batch, padding included."""
        return (batch[1] if self.capacity is None else batch.rows).shape[1]

    def _wide(self, models: Models, batch: Batch, encode: _Encoder, places: int) -> Updates:
        """The sum over some of ``places`` records of every agent, in float64."""
        if encode is None and not self.one_by_one:
            settings = self.weighted, self.clip_norm, self.clipping, self.per_layer, self.microbatch
            of_agent: _Sum = functools.partial(_summed, settings, places)
        else:
            loss = self.loss
            if self.augmentation is not None:
                loss = self.augmentation.averaged(loss)
            clipped_sum = clipping.wide_per_example(
                loss,
                self.clip_norm,
                method=self.clipping,
                microbatch=self.microbatch,
                encode=_combining(self.weights, encode),
                per_layer=self.per_layer,
            )

            def of_agent(*data: _Records) -> Updates:
                return clipped_sum(*data, places)

        return _agents.each_agent(lambda params, data: of_agent(params, *data), models, batch)

    def _in_passes(
        self, models: Models, batch: "UngatheredBatch", encode: _Encoder, places: int
    ) -> Updates:
        """The sum over a batch that is gathered ``capacity`` records at a time, in float64."""
        assert self.capacity is not None
        size = self.capacity
        positions = batch.rows if batch.positions is None else batch.positions

        def of_microbatch(number: Array) -> Updates:
            cut = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=number * size, slice_size=size, axis=1
            )
            rows = cut(batch.rows)
            x, y = _agents.gathered(cut(positions), batch.x, batch.y)
            part = keyed(batch.key, x, rows), y, cut(batch.padding)
            return self._wide(models, part, encode, places)

        # Records come first in every agent's batch: behind the last one there is only padding.
        used = jnp.max(jnp.sum(~batch.padding, axis=1, dtype=jnp.int32))

        # Passes beyond the largest batch would add zeros: leaving them out changes no bit.
        def more(carry: _Passes) -> Array:
            return carry[0] * size < used

        def add(carry: _Passes) -> _Passes:
            number, total = carry
            return number + 1, _numerics.wide_sum(total, of_microbatch(number))

        first = jnp.int32(0)
        start = first, _numerics.wide_zeros(jax.eval_shape(of_microbatch, first))
        return jax.lax.while_loop(more, add, start)[1]

    def merging(self, frozen: Params) -> "RecordQuery":
        """The query of models that lack these leaves, whose gradients are not taken.

        Args:
            frozen: Values of one model, None in the places of trained ones.
        """
        # A model's own sum is of all its leaves.
        return dataclasses.replace(self, loss=_merging(self.loss, frozen), weighted=None)

    def points(self, weights: _Coefficients = None) -> "RecordQuery":
        """The query at several models of an agent; see `dpjax.protocols.Query`."""
        plain = _plain(weights)
        weighted = None
        # A model's own sum knows of linear combinations at most.
        if plain is not None and isinstance(self.weighted, _LayeredSum):
            weighted = self.weighted.at_points(plain)
        loss = _over_points(self.loss)
        return dataclasses.replace(self, loss=loss, weighted=weighted, weights=plain)

    def local_steps(self, steps: int, step_size: float) -> "RecordQuery":
        """The query of local training; see `dpjax.protocols.Query`."""
        if self.augmentation is not None:
            raise ValueError(
                "augment is given with local steps, which would see other variants in each; give "
                "one variant, or no local steps"
            )
        # A model's own sum knows of one model.
        loss = _locally_trained(self.loss, steps, step_size)
        return dataclasses.replace(self, loss=loss, weighted=None)


@compiled(static=2, inline=True)
def _summed(
    settings: tuple[Any, ...],
    places: int,
    params: Params,
    x: Array,
    y: Array,
    is_padding: Bool[Array, " b"] | None,
) -> Updates:
    """A model's own clipped sum; traced once, however many programs of a run hold it."""
    return clipping.wide_clipped_sum(*settings)(params, x, y, is_padding, places)


def _merging(loss: _Loss, frozen: Params) -> _Loss:
    return lambda params, x, y: loss(merge(params, frozen), x, y)


def _over_points(loss: _Loss) -> _Loss:
    """The sum of losses at points [points, ...], whose gradient is all of theirs."""

    def total(points: Params, x: _Records, y: Array) -> Any:
        # One by one: mapped over parameters, convolutions are products of groups, and slow.
        number = jax.tree.leaves(points)[0].shape[0]
        models = [jax.tree.map(lambda leaf, j=j: leaf[j], points) for j in range(number)]
        return sum(loss(params, x, y) for params in models)

    return total


def _plain(weights: _Coefficients) -> _Weights:
    return None if weights is None else tuple(map(float, weights))


def _combining(weights: _Weights, encode: _Encoder) -> _Encoder:
    """What stands before the clip where gradients at several points are added up first."""
    if weights is None:
        return encode

    def combined(gradients: Updates) -> Updates:
        def of_leaf(leaf: Array) -> Array | int:
            return sum(weight * leaf[j] for j, weight in enumerate(weights))

        total = jax.tree.map(of_leaf, gradients)
        return total if encode is None else encode(total)

    return combined


class UngatheredBatch(NamedTuple):
    """A batch that is not gathered yet.

    Attributes:
        x: All records.
        y: Their labels.
        rows: [n, places] which of them are in an agent's batch, those first.
        padding: [n, places] True where a place holds no record.
        key: The round's, for variants of records; None where there are none.
        positions: [n, places] where ``x`` and ``y`` have these rows; None where they lie in order.
    """

    x: Array
    y: Array
    rows: Int[Array, "n places"]
    padding: Bool[Array, "n places"]
    key: PRNGKeyArray | None = None
    positions: Int[Array, "n places"] | None = None
