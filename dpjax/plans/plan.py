"""The plan of a run: its parts, calibrated together, and what they guarantee.

Only the plan calibrates. It is made once from one frozen config and audits itself: the guarantee
it states is computed again from the very factor that colours the noise, so parts that disagree
are refused before any training.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from dpjax import _html, _validate
from dpjax._validate import fixed
from dpjax.accounting import finite, forecast, losses, parties
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.loss import AmplifiedLoss
from dpjax.algorithms.dsgd import DSGD
from dpjax.mechanism import design as design_
from dpjax.plans import calibration, compatibility, custom, identity
from dpjax.plans.calibration import Calibrated, Target
from dpjax.plans.config import Config
from dpjax.plans.export import Export
from dpjax.plans.noise import Correlated, check_design
from dpjax.plans.optimizers import NOISE_ARRAYS, noise_arrays
from dpjax.protocols import Arrays, Counts, Method, Privatizer, Sampler
from dpjax.topology import mixing as mixing_
from dpjax.topology.mixing import Mixing
from dpjax.transforms import rounds as rounds_

__all__ = ["Config", "Plan", "make"]

_RESERVED = {"mixing", "factor", "polynomial", "noise_grid", "noise_scale", "noise_scales"}
_RESERVED |= {*NOISE_ARRAYS}
"""Names of arrays that no optimizer may have."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A config made concrete; refused when its parts disagree.

    Guarantee: `Guarantee` in ``guarantee``, against the attacker and for the gradients that it
    names, which are the config's; it assumes that the run clips and samples as the config says and
    adds the noise of ``noise``, fresh in every round and independently for every coordinate, as
    `dpjax.engine.run` does.

    Attributes:
        target: The config on its network, with the agents' numbers of records.
        noise: The noise as it will run; None when non-private.
        guarantee: What the run guarantees.

    Raises:
        ValueError: If the audit fails.

    Example:
        >>> import numpy as np
        >>> from dpjax.learning import samplers
        >>> from dpjax.plans import optimizers, plan, protect
        >>> config = plan.Config(
        ...     protect=protect.Protect("replace_agent", clip_norm=1.0), rounds=100,
        ...     sampler=samplers.Random(1), optimizer=optimizers.Sgd(0.05),
        ... )
        >>> free = plan.make(config, np.full((3, 3), 1 / 3))
        >>> free.agents, free.guarantee.epsilon, sorted(free.arrays)
        (3, inf, ['mixing', 'step_size'])
    """

    target: Target
    noise: Calibrated | None
    guarantee: Guarantee

    def __post_init__(self) -> None:
        """Audit the parts against each other, on copies that nobody can change afterwards."""
        noise: Any = self.noise
        has_fields = dataclasses.is_dataclass(noise)
        if has_fields:
            fields = {field.name: getattr(noise, field.name) for field in dataclasses.fields(noise)}
            arrays = {name: fixed(v) for name, v in fields.items() if isinstance(v, np.ndarray)}
            noise = dataclasses.replace(noise, **arrays)
        stated = self.guarantee
        names = compatibility.custom_names(type(self), stated)
        if names:
            stated = stated.replace(custom=tuple(dict.fromkeys(stated.custom + names)))
        _validate.assign(self, noise=noise, guarantee=stated)
        # A second computation on purpose, from the very arrays that run.
        calibration.audit(self.target, noise, stated)
        config = self.config
        target = self.target
        if compatibility.custom_names(config.sampler):
            times = custom.check_sampler(target)
            if noise is not None and target.amplification is not None:
                custom.check_amplified(target, noise, stated.loss, times)
        if noise is not None and compatibility.custom_names(config.noise, noise):
            custom.check_noise_draws(target, noise)

    def __repr__(self) -> str:
        """One line: design, network's size, guarantee, what its noise does, who shares a seed."""
        affords = math.inf if self.why_no_forecast else self.forecast(1).affords()
        remarks = ""
        if math.isfinite(affords):
            remarks = f"; noise allows for {_validate.counted(affords, 'parameter')}"
        scales = np.zeros(0) if self.noise is None else self.noise.arrays.get("noise_scales", ())
        # Messages of size 1 have this spacing in float32, which swallows finer noise.
        below = np.flatnonzero((np.asarray(scales) > 0) & (np.asarray(scales) < 2.0**-23))
        if below.size:
            remarks += (
                f"; from round {below[0] + 1:,} on its scale is below 1.2e-7, which float32 "
                "numbers of size 1 do not keep: use float64"
            )
        if self.guarantee.secrets in ("shared", "group"):
            remarks += "; agents who share its seed are NOT protected from each other"
        if self.grid is not None:
            remarks += (
                f"; rounded to a grid of {self.grid.spacing:.3g}, which adds "
                f"{self.grid.share:.2g} of itself to the network's mean noise variance"
            )
        agents = _validate.counted(self.agents, "agent")
        return f"Plan({self.config.label}, {agents}, {self.guarantee.caption()}{remarks})"

    def _repr_html_(self) -> str:
        """The line of `repr`, and who is protected from whom, for notebooks."""
        return f"<p>{_html.escape(repr(self))}</p>{self.protection()._repr_html_()}"

    @property
    def config(self) -> Config:
        """What the plan was made from."""
        return self.target.config

    @property
    def mixing(self) -> Mixing:
        """[n, n] or [P, n, n] mixing matrix, float64, dense or a ``scipy.sparse.csr_array``."""
        return self.target.mixing

    @property
    def counts(self) -> np.ndarray | None:
        """[n] records of each agent, which those of a run must equal.

        The sampler must know them for secret batches, whose loss depends on them, and full ones;
        else they may be None.
        """
        return self.target.counts

    @property
    def agents(self) -> int:
        """Number of agents n."""
        return self.target.agents

    def protection(self) -> parties.Protection:
        """Who is protected from whom: a row for each party, printed as a table.

        Guarantee: that of `dpjax.accounting.guarantee.Guarantee.protection`. Of a phase of several
        it is about that phase alone; the guarantee of its run is about all.

        Returns:
            Rows (party, epsilon, delta, why): an outsider, other participants (of the own group
            and of others, where these differ), a stated coalition, an aggregator or server, and
            whoever runs this process or holds the seed. Epsilon is None where a party is not
            protected from.
        """
        return parties.table(self.guarantee, compatibility.method(self.method).unprotected)

    @property
    def factor(self) -> np.ndarray:
        """[n, q] map of a round's normals to the agents' noisy sums; zero when non-private.

        Float32 F [n, n] for correlated noise, as the run uses it: the covariance is F F'. Of a
        sparse mixing matrix, independent noise has the diagonal [n] of it.

        Raises:
            ValueError: For noise that is not Gaussian, or another in each round.
        """
        if self.noise is None:
            n = self.agents
            return np.zeros(n if scipy.sparse.issparse(self.mixing) else (n, n), np.float32)
        if self.noise.factor is None:
            raise ValueError(
                f"noise is {type(self.config.noise).__name__}, which no one factor says (or none "
                "that memory holds); read plan.noise.arrays"
            )
        return self.noise.factor

    @property
    def strategy(self) -> np.ndarray | None:
        """[T, T] float64 C over rounds, lower triangular; None is the identity."""
        return None if self.noise is None else self.noise.strategy

    @property
    def design(self) -> design_.Design | None:
        """The design over agents; None where there is no optimised one."""
        return None if self.noise is None else self.noise.design

    @property
    def method(self) -> Method:
        """What agents compute and send, on the network."""
        return self.target.method

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Which records take part; it knows how many there are where it must."""
        return self.target.sampler

    @functools.cached_property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        """For each agent i the others whose messages it receives: all j with W_ij != 0, ascending.

        Of a schedule, W_ij may be 0 in some rounds.
        """
        # A link counts if any round uses it.
        schedule = self.mixing.ndim == 3
        links = scipy.sparse.csr_array(self.mixing.any(axis=0) if schedule else self.mixing)
        rows = np.split(links.indices, links.indptr[1:-1])
        return tuple(tuple(sorted({*row.tolist()} - {i})) for i, row in enumerate(rows))

    @functools.cached_property
    def arrays(self) -> Arrays:
        """What may differ between plans of one call, by name; runs round to their models' dtype."""
        optimizer = self.config.optimizer
        noise = self.noise
        arrays = {"mixing": self.mixing}
        if noise is not None:
            arrays |= noise.arrays
            in_sums = compatibility.in_sums(self.method)
            arrays |= noise_arrays(
                optimizer, noise.factor, noise.strategy, self.target.divisor, in_sums=in_sums
            )
        clashes = optimizer.arrays().keys() & (_RESERVED | arrays.keys())
        if clashes:
            raise ValueError(
                f"optimizer has an array {min(clashes)!r}, which is the plan's; name it otherwise"
            )
        arrays |= optimizer.arrays()
        # A sparse matrix is read-only already.
        constant = {
            name: array if scipy.sparse.issparse(array) else fixed(array)
            for name, array in arrays.items()
        }
        return types.MappingProxyType(constant)

    @functools.cached_property
    def privatizer(self) -> Privatizer | None:
        """How the noise of a run is drawn; None when non-private."""
        return None if self.noise is None else self.noise.privatizer(self.target)

    def covariance(self) -> np.ndarray:
        """Covariance F F' [n, n] of one coordinate's noise over agents, in float64.

        Of a factor that is a diagonal [n], the variances [n].
        """
        factor = self.factor.astype(np.float64)
        # Of many agents the square array need not fit in memory.
        return np.square(factor) if factor.ndim == 1 else factor @ factor.T

    @property
    def applied_strategy(self) -> np.ndarray | None:
        """[T, T] C with its coefficients rounded as the run applies it; None without one.

        In float32, in a release in float64. Accounting of a run's messages
        (`dpjax.accounting.views`) is about this one.
        """
        # A view of C as it was designed would be of other noise.
        kind = np.float64 if self.config.release else np.float32
        return None if self.strategy is None else rounds_.applied(self.strategy, kind)

    @functools.cached_property
    def grid(self) -> finite.Grid | None:
        """The grid that a release rounds its noisy sums to, and what it adds; else None."""
        if not self.config.release or self.noise is None:
            return None
        return self.noise.grid(self.target)

    @property
    def _colour(self) -> Any:
        """The map of normals to noise; of a polynomial of W one that holds no array [n, n]."""
        return self.factor if self.noise is None else self.noise.operator

    @property
    def why_no_forecast(self) -> str:
        """Why there is no forecast; "" for clipped gradients under noise of one Gaussian scale."""
        gap = self.config.protect.gradient_gap
        if gap is not None:
            return f"gradient_gap is {gap:g}"
        return "" if self._colour is not None else f"noise is {type(self.config.noise).__name__}"

    def forecast(self, parameters: int, *, counts: Counts | None = None) -> forecast.Forecast:
        """Noise in the average model against the largest drift of clipped gradients.

        And that in agents' own models around it. Reads the plan and no data; see
        `dpjax.accounting.forecast`. It is of models that gossip mixes by W once a round, and knows
        no other exchange of a method.

        Args:
            parameters: d, entries of one agent's model.
            counts: [n] records of each agent, which fill the sampler's batches; None takes the
                plan's, or full batches where it has none.

        Returns:
            The forecast: ``ratio``, ``disagreement``, ``level``, ``affords()``, ``statement()``;
            its ratio is 0 for a non-private plan.

        Raises:
            ValueError: For a number of parameters below 1, counts that are not one an agent, or
                noise of which none is known.
        """
        if self.why_no_forecast:
            raise ValueError(
                f"{self.why_no_forecast}, of which no forecast is known: give a plan of clipped "
                "gradients (clip_norm) with Gaussian noise of one scale, as designs of plans.noise"
            )
        config = self.config
        loss = self.guarantee.loss
        budget = config.budget
        mu = self.guarantee.mu
        sampled = None
        accountant: Any = "gdp" if budget is None else budget.accountant
        if isinstance(loss, AmplifiedLoss):
            mu = loss.unamplified
            sampled = loss
        elif isinstance(loss, losses.Concentrated):
            # Of real noise that has this rho: what is forecast is no guarantee.
            mu = math.sqrt(2 * loss.rho)
            accountant = "rdp"
        assert mu is not None
        counts = self.counts if counts is None else counts
        return forecast.forecast(
            parameters,
            factor=self._colour,
            reach=forecast.weights(self.mixing, config.rounds),
            step_sizes=config.optimizer.relative(config.rounds),
            patterns=config.turns,
            clip_norm=config.protect.clip_norm,
            relation=config.protect.relation,
            batch_size=self.sampler.divisor,
            mu=mu,
            sampled=sampled,
            # Without noise neither is read.
            delta=0.5 if budget is None else budget.delta,
            accountant=accountant,
            strategy=self.strategy,
            budgets=None if budget is None or budget.each is None else budget.allowed_mu(),
            fill_share=1.0 if counts is None else self._fill_share(counts),
            spread=self._disagreement,
            records=math.inf if counts is None else int(np.min(counts)),
        )

    @functools.cached_property
    def _disagreement(self) -> float:
        """Noise in agents' models around their average; 0 of methods that gossip no models."""
        config = self.config
        # What others do with their messages is no product with W.
        if self.noise is None or not isinstance(config.method, DSGD):
            return 0.0
        return forecast.disagreement(
            self._colour,
            self.mixing,
            config.optimizer.relative(config.rounds),
            self.strategy,
            config.method.gossip_steps,
        )

    def _fill_share(self, counts: Counts) -> np.ndarray:
        """How much of each batch is records, [T, n] or [n]."""
        records = _validate.finite_array("counts", counts, ndim=1)
        if len(records) != self.agents:
            raise ValueError(
                f"counts has {len(records)} entries for {self.agents} agents; give [n]"
            )
        # One gradient an agent is clipped, however many records are behind it.
        if self.config.protect.clips == "agent":
            return np.ones(self.agents)
        return self.sampler.fill_share(records, self.config.rounds)

    def save(
        self,
        path: str | os.PathLike[str],
        labels: Sequence[object] | None = None,
        guarantee: Guarantee | None = None,
    ) -> Path:
        """Write design, terms and instructions to an .npz file for a loop of one's own.

        See `dpjax.plans.export`, which states what it guarantees.

        Args:
            path: Where to; ``.npz`` is appended when there is no suffix.
            labels: [n] names of the sites; None numbers them from 0.
            guarantee: The total over all phases so far, of which this plan is the last
                (`Guarantee.within`); None states the plan's own.

        Returns:
            The path written.

        Raises:
            ValueError: For a non-private plan or a release, labels that are not n different ones,
                or a guarantee whose last phase is another.
        """
        return self.export(guarantee).save(path, labels)

    def export(self, total: Guarantee | None = None) -> Export:
        """What `save` writes, for a loop of one's own.

        Args:
            total: As ``guarantee`` in `save`.

        Raises:
            ValueError: As `save`, labels aside.
        """
        return Export(self, total)

    def fingerprint(self) -> str:
        """SHA-256 of config, mixing, noise, strategy and counts that it needs, in hexadecimal.

        Raises:
            ValueError: For a field of the config whose text would be another in each process.
        """
        config = json.dumps(identity.described(self.config), sort_keys=True)
        digest = hashlib.sha256(config.encode())
        if scipy.sparse.issparse(self.mixing):
            digest.update(mixing_.fingerprint(self.mixing).encode())
        else:
            digest.update(np.ascontiguousarray(self.mixing).data)
        for name, array in sorted({} if self.noise is None else self.noise.arrays.items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.strategy is not None:
            digest.update(np.ascontiguousarray(self.strategy).data)
        # Other samplers run alike with and without counts.
        if self.counts is not None and self.config.sampler.needs_counts:
            digest.update(np.ascontiguousarray(self.counts).data)
        return digest.hexdigest()


def make(
    config: Config,
    mixing: Any,
    *,
    counts: Any = None,
    design: design_.Design | None = None,
    strategy: np.ndarray | None = None,
) -> Plan:
    """Make the plan of a config on a network.

    Args:
        config: The mechanism.
        mixing: [n, n] matrix of a connected graph, or [P, n, n], a schedule; its rows sum to 1, or
            what the method asks for. For many agents a sparse one, as
            ``mixing.metropolis_hastings(graph, sparse=True)``: independent noise and that of a
            polynomial of W then need no array [n, n]; other noise needs some, and is refused where
            memory does not hold them.
        counts: [n] records of each agent (`Partition.counts`), or the partition, whose names then
            stand in messages: needed where the sampler must know them, as for secret batches
            that amplify and for full ones. A run refuses other ones.
        design: A design made earlier for the same mixing matrix, budget and horizon (a saved
            one, say); made here when None.
        strategy: [T, T] C over rounds made earlier, in place of the one that the config's noise
            makes, for the designs that have one; made here when None, once for a mixing matrix and
            a participation, whatever the budget. It goes by the design's name; one of your own
            keeps its name as ``noise.Covariance(matrix, name, strategy=C)``.

    Returns:
        The plan, audited.

    Raises:
        ValueError: If the mixing matrix is unfit, counts are missing or do not fit the sampler,
            the design is another network's or budget's, the noise has no such strategy, or the
            method shows what no noise was added to.

    Warns:
        UserWarning: For a delta above one over the number of protected agents, clients or records,
            these where ``counts`` says how many there are, or of a batch of ``Random`` an agent.

    Example:
        >>> from dpjax.learning import samplers
        >>> from dpjax.plans import noise, optimizers, plan, protect
        >>> config = plan.Config(
        ...     noise=noise.Independent(), budget=protect.Budget(10.0, delta=1e-5), rounds=100,
        ...     protect=protect.Protect("replace_agent", clip_norm=1.0),
        ...     sampler=samplers.Random(1), optimizer=optimizers.Sgd(0.05),
        ... )
        >>> from dpjax.topology import graphs, mixing
        >>> private = plan.make(config, mixing.metropolis_hastings(graphs.ring(6)))
        >>> round(private.guarantee.epsilon, 6), private.guarantee.attacker
        (10.0, 'outsider')
        >>> round(float(private.factor[0, 0]), 2)
        10.0
    """
    target = Target(config, mixing, counts)
    # Designs that have no such parts are not asked for them.
    pieces: dict[str, Any] = {"design": design, "strategy": strategy}
    pieces = {name: piece for name, piece in pieces.items() if piece is not None}
    if pieces and not isinstance(config.noise, Correlated):
        raise ValueError(
            f"{' and '.join(pieces)} is given for noise {config.label!r}, which has none"
        )
    if design is not None and not isinstance(design, design_.Design):
        raise _validate.refusal("design", design, "give one that dp.design or Design.load returned")
    if config.noise is None:
        return Plan(target, None, Guarantee.none(config.rounds))
    check_design(config.noise)
    # Before the noise is made, which may take minutes.
    calibration.check_delta(config, target.agents, target.counts)
    ideal = target
    if config.release:
        # The reserve pays for what finite precision adds, which only a run knows.
        smaller = dataclasses.replace(config, budget=target.budget.without_reserve())
        # A copy: network and counts were checked, and a budget's share is one for as many agents.
        ideal = copy.copy(target)
        _validate.assign(ideal, config=smaller)
    with compatibility.called(config.noise, "noise.calibrate"):
        noise = config.noise.calibrate(ideal, **pieces)
    return Plan(target, noise, calibration.guarantee_of(target, noise))
