"""A plan as a file for a training loop of one's own, readable with NumPy alone.

The file is an .npz whose entries are

    how_to_use      what to do in each round, in words
    epsilon, delta, relation, unit, attacker, rounds, clip_norm, mu, accountant
    labels          [n] names of the sites; row and column i of every matrix is labels[i]
    mixing          [n, n] W, or a schedule [P, n, n]
    factor          [n, n] F: site i adds row i of F Z_t, Z_t [n, d] standard normals
    seed_group      [n] sites with the same number draw from one secret seed
    messages        "float64" where noise is too large for float32 messages, else "float32"
    strategy        [T, T] C over rounds, where the design has one
    participation   (epochs, separation), where the guarantee is for records in a fixed order
    phase           which phase this is, where the guarantee is a total over phases

beside what `dpjax.mechanism.design.Design.load` reads, so that a plan can be made from it again.
"""

import os
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from dpjax import _validate
from dpjax.accounting import parties, wording
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import delta_text
from dpjax.algorithms.dsgd import DSGD
from dpjax.learning.samplers import Full
from dpjax.mechanism import strategy as strategy_
from dpjax.plans import calibration, noise
from dpjax.transforms import rounds as rounds_

__all__ = ()

_TEXT = Path(__file__).with_name("how_to_use.txt")
"""Paragraphs of the instructions, each with its name above it."""


@dataclass(frozen=True, eq=False)
class Export:
    """What a file tells a loop of one's own.

    Guarantee: the plan's, for a loop that does what ``how_to_use`` says: at most ``rounds`` rounds,
    gradients clipped at ``clip_norm`` in the stated unit, noise from seeds that the attacker does
    not know, each used once. Nothing in the file is secret.

    Attributes:
        plan: The plan, its noise with a design over agents.
        total: The total over all phases so far, of which the plan is the last
            (`Guarantee.within`); None states the plan's own.
    """

    plan: Any
    total: Guarantee | None = None

    def __post_init__(self) -> None:
        """Refuse what a file cannot tell, and a total of other phases."""
        config = self.plan.config
        refused = {
            f"plan is {config.label}, which has no noise design over agents; write noise.scales "
            "where it is by schedule": self.plan.design is None,
            "plan is of a sparse mixing matrix, which files do not hold; make it of "
            "mixing.toarray()": scipy.sparse.issparse(self.plan.mixing),
            "plan is a release, whose noise this package draws and hardens; save the plan of the "
            "same config with release=False for a loop of your own": config.release,
            f"plan has sampler {config.sampler}, whose secret batches (coin flips, say) or clients "
            "a loop of your own would have to draw; use Random, Full or Cyclic": (
                config.sampler.amplification() is not None or self.plan.guarantee.unit == "client"
            ),
            f"plan has method {type(config.method).__name__}, whose rounds a file cannot tell; "
            "save a plan of DSGD": type(config.method) is not DSGD,
        }
        _validate.refuse(refused)
        # A total of other phases would state this plan's noise for another run.
        total = self.total
        if total is not None and (
            not isinstance(total, Guarantee) or total.phases[-1:] != (self.plan.guarantee,)
        ):
            raise ValueError(
                f"guarantee is {_validate.shown(total)}, whose last phase is not this plan's; "
                "give plan.guarantee.within(total) for the first phase, "
                "earlier.followed_by(plan.guarantee, planned=False) for a later one"
            )

    @property
    def stated(self) -> Guarantee:
        """What the file states."""
        return self.plan.guarantee if self.total is None else self.total

    def save(self, path: str | os.PathLike[str], labels: Sequence[object] | None = None) -> Path:
        """Write an .npz file with the design, terms and instructions, complete or not at all.

        Args:
            path: Where to; ``.npz`` is appended when there is no suffix.
            labels: [n] names of the sites, in the order of the mixing matrix; None numbers them
                from 0.

        Raises:
            ValueError: For labels that are not n different ones.
        """
        plan = self.plan
        n = plan.agents
        guarantee = plan.guarantee
        stated = self.stated
        names = [str(i) for i in range(n)] if labels is None else [*map(_validate.name, labels)]
        if len(names) != n or len(set(names)) != n:
            raise ValueError(f"labels is {names!r} for {n} sites; give {n} different names")
        strategy = plan.strategy
        entries: dict[str, Any] = {
            "how_to_use": self.instructions(),
            "labels": np.array(names),
            "epsilon": np.asarray(stated.per_agent_epsilon or stated.epsilon),
            "mixing": plan.mixing,
            "factor": plan.factor.astype(np.float64),
            "seed_group": calibration.groups(plan.factor),
            "messages": "float64" if self.precision else "float32",
            "mu": stated.mu,  # A total may be of another kind than mu.
            "accountant": str(stated.accountant),
            "phase": len(stated.phases) or None,
            "rounds": guarantee.rounds,
            "clip_norm": guarantee.clip_norm,
            "strategy": None if strategy is None else rounds_.applied(strategy, np.float64),
            "participation": guarantee.participation,
        }
        for name in ("delta", "relation", "unit", "attacker"):
            entries[name] = getattr(stated, name)
        # NumPy has no entry for nothing: what is missing does not apply.
        entries = {name: entry for name, entry in entries.items() if entry is not None}
        return plan.design.save(path, entries=entries)

    def instructions(self) -> str:
        """What a training loop has to do for the guarantee to be its own, in words."""
        plan = self.plan
        guarantee = plan.guarantee
        stated = self.stated
        config = plan.config
        shape = plan.mixing.shape
        n = shape[-1]
        own_seeds = len(set(calibration.groups(plan.factor))) == n
        phase = len(stated.phases)
        full_batches = isinstance(plan.sampler, Full)
        of_records = config.protect.clips == "record"
        steps = config.method.gossip_steps
        precision = self.precision
        epochs, separation = config.participation or (0, 0)
        # In the order of the file, each with whether this plan needs it.
        paragraphs = {
            "head": True,
            "coalition": stated.nodes is not None,
            "phase": phase,
            "round": True,
            "record" if of_records else "agent": True,
            "order": epochs,
            "full": full_batches,
            "normals": True,
            "white" if plan.strategy is None else "correlated": True,
            "add": True,
            "divide": of_records,
            "send": True,
            "gossip": steps > 1,
            "precision": precision,
            "seed": True,
            "alone" if own_seeds else "shared": True,
            "count": True,
            "later" if phase > 1 else "first": True,
            "limits": True,
        }
        # A name in brackets, then its paragraph.
        parts = re.split(r"^\[(\w+)\]\n", _TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        texts = dict(zip(parts[::2], parts[1::2], strict=True))
        text = "".join(texts[name] for name, used in paragraphs.items() if used)
        return string.Template(text.rstrip()).substitute(
            sites=n,
            rounds_text=_validate.counted(guarantee.rounds, "round"),
            last=guarantee.rounds - 1,
            label=noise.display_name(config.label),
            statement=wording.statement(stated, process=False),
            phase=phase,
            before=phase - 1,
            epsilon=parties.epsilon_text(guarantee),
            delta=delta_text(guarantee.delta),
            total=parties.epsilon_text(stated),
            clip=config.protect.clip_norm,
            divisor=plan.sampler.divisor,
            size="the largest number of records of any site"
            if full_batches
            else "one number for the run",
            epochs=epochs,
            separation=separation,
            matrix="mixing" if len(shape) == 2 else f"mixing[t mod {shape[0]}]",
            steps=steps,
            precision=precision,
            knows="its own" if own_seeds else "that of its group",
        )

    @property
    def precision(self) -> str | None:
        """That messages need float64, where float32 loses gradients or what noise cancels to.

        Of float32 numbers as large as four deviations of some site's noise two are 2^-23 as far
        apart. That is too far from a thousandth of the clip norm, or of what remains of the noise
        in the average of all sites. None where float32 is enough.
        """
        factor = self.plan.factor.astype(np.float64)
        # Over rounds, a site's noise and what the average keeps of it are larger by these.
        noisy = 1.0
        remaining = 1.0
        if self.plan.strategy is not None:
            inverse = strategy_.inverse_of(self.plan.strategy)
            noisy = float(np.linalg.norm(inverse, axis=1).max())
            remaining = float(np.linalg.norm(inverse.sum(axis=0))) / np.sqrt(len(inverse))
        largest = float(np.linalg.norm(factor, axis=1).max()) * noisy
        mean = float(np.linalg.norm(factor.mean(axis=0))) * remaining
        spacing = 4 * largest * 2.0**-23
        clip_norm = self.plan.config.protect.clip_norm
        if spacing <= min(clip_norm, mean) / 1000:
            return None
        return (
            f"messages need float64: some noise has a deviation of {largest:,.4g}, and float32 "
            f"numbers of that size are {spacing:.2g} apart, more than a thousandth of the clip "
            f"norm {clip_norm:g} or of the noise in the average, {mean:.2g}. Draw, add, send and "
            "average in float64"
        )
