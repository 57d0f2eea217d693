"""One site's update, clipped and with noise: the part that filters for other frameworks share.

    sent = grid(clip(update) + sigma z),   |clip(update)| <= C,   sigma = noise_multiplier C

in each of at most T rounds, with z [d] fresh standard normals. All arrays of the update are one
vector. After t rounds the loss is that of a Gaussian of mu = s sqrt(t) / sigma, which is exact
whatever the server sends in between. A round moves the clipped update by at most

    s = C      where the site's data are zeroed out, so that its update is 0
    s = 2 C    where they are replaced by any others
    s = b, 2 b likewise for one record, if its author states a bound b

Clipping is the projection onto a ball, which moves no two updates apart: a bound b on how far one
record moves the update before the clip holds after it.

Rounds are files of the site's folder, made before a round's noise is drawn. A process that was
killed has counted the round that it was in.

Reference:
    Dong, Roth and Su (2022), Gaussian differential privacy, Corollary 3.3, for the composition.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float

from dpjax import _files, _validate
from dpjax.accounting import budget, finite, gdp
from dpjax.accounting.rounding import UNIT, up
from dpjax.sites.noise import SiteNoise

__all__ = ["SiteUpdates"]

Relation = Literal["zero_out_client", "replace_client", "zero_out_record", "replace_record"]
_Flat = Float[np.ndarray, " d"]

_DRAW = 2**18
"""Normals of one draw, so that a large update does not hold its noise twice."""
_PLAN = "plan.json"
_ROUND = "round-"


@dataclass(frozen=True)
class SiteUpdates:
    """At most so many noisy updates of one site, and what they cost together.

    Guarantee: whatever others send or do, all that `noisy` returned over t rounds is
    (epsilon, delta)-DP with `epsilon` of these rounds, for the relation that it is asked for,
    against the server and everybody else outside the site. It covers what `noisy` returned and
    nothing else: no metrics, no numbers of records. It assumes that the rounds' files stay where
    they are, that ChaCha20 is pseudorandom, and, for a record, that ``record_bound`` is true, which
    nothing here can check. Sums of several sites' updates, or a secure sum of them, are covered
    as well, but have no smaller number here.

    Args:
        rounds: T, the most rounds, over all jobs on the site's data.
        clip_norm: C, of the whole update in L2.
        noise_multiplier: Standard deviation of the noise, over C.
        delta: Delta, in (0, 1).
        record_bound: b, how far the update of any round moves in L2, at most, when one record is
            zeroed out and the server's message is the same; None states nothing of records.
        entries: The most numbers of an update. Its noise of finite precision is paid for.

    Raises:
        ValueError: For numbers out of range, and for noise that would protect nothing.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from dpjax.contrib.updates import SiteUpdates
        >>> updates = SiteUpdates(rounds=20, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)
        >>> [round(updates.epsilon(r), 2) for r in ("zero_out_client", "replace_client")]
        [9.17, 22.18]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sent = updates.noisy({"w": np.zeros((2, 3), np.float32)}, folder)
        ...     sent["w"].shape, updates.spent(folder)
        ((2, 3), 1)
    """

    rounds: int
    clip_norm: float
    noise_multiplier: float
    delta: float
    record_bound: float | None = None
    entries: int = 10**8

    def __post_init__(self) -> None:
        """Check the numbers, and that the noise protects something."""
        _validate.fields(self, _validate.integer, "rounds", "entries", maximum=2**40)
        _validate.fields(self, _validate.spread, "clip_norm", "noise_multiplier")
        _validate.fields(self, _validate.probability, "delta")
        if self.record_bound is not None:
            _validate.fields(self, _validate.positive, "record_bound")
        if np.isinf(self.epsilon("zero_out_client")):
            raise _validate.refusal(
                "noise_multiplier",
                self.noise_multiplier,
                f"noise of finite precision protects no {self.entries:,} numbers in {self.rounds} "
                "rounds then; give more noise, fewer rounds, or entries near the size of the model",
            )

    @classmethod
    def of_folder(cls, folder: _files.PathLike) -> "SiteUpdates":
        """Return the plan whose rounds a folder counts.

        Args:
            folder: The site's.

        Raises:
            ValueError: Where its plan cannot be read.
            FileNotFoundError: Where it has none.
        """
        path = Path(folder) / _PLAN
        with _files.reading(path, "name the folder of a site that has sent an update"):
            return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def deviation(self) -> float:
        """Sigma, the standard deviation of every number's noise."""
        return self.noise_multiplier * self.clip_norm

    @property
    def spacing(self) -> float:
        """Of the grid that noisy updates lie on, a power of two."""
        return finite.release_grid(np.array([self.deviation]), self.rounds).spacing

    def noisy(
        self, update: Mapping[str, np.ndarray], folder: _files.PathLike
    ) -> dict[str, np.ndarray]:
        """Count a round, and return the clipped update with noise.

        An update that is not finite counts as zero: to refuse it would tell that it was.

        Args:
            update: Arrays of floats by name: what training changed, new minus old.
            folder: The site's own, one for one plan and for all jobs on the same data.

        Returns:
            Arrays of the same names, shapes and dtypes.

        Raises:
            ValueError: Before a round is counted: for other arrays, where no round is left, where
                the folder belongs to another plan or cannot be written.
        """
        flat = self._flat(update)
        clipped = _clipped(flat, self.clip_norm)
        self._count(folder)
        noisy = self._released(clipped)
        parts = {}
        start = 0
        for name, array in update.items():
            part = noisy[start : start + array.size]
            # A number that the dtype cannot hold becomes infinite, as anybody could make it.
            with np.errstate(over="ignore"):
                parts[name] = part.reshape(array.shape).astype(array.dtype)
            start += array.size
        return parts

    def spent(self, folder: _files.PathLike) -> int:
        """Return how many rounds a folder has counted.

        Args:
            folder: The site's.
        """
        files = Path(folder).glob(f"{_ROUND}*")
        return max((int(path.name.removeprefix(_ROUND)) for path in files), default=0)

    def check_left(self, folder: _files.PathLike) -> int:
        """Refuse where no round is left, before training that could not be sent.

        Args:
            folder: The site's.

        Returns:
            How many rounds it has counted.

        Raises:
            ValueError: If all rounds are spent.
        """
        spent = self.spent(folder)
        if spent >= self.rounds:
            raise ValueError(
                f"rounds is {self.rounds}, of which {folder} has counted {spent}: nothing more may "
                "be sent of these data; stop here. A plan in a new folder adds its loss to this one"
            )
        return spent

    def epsilon(self, relation: Relation, rounds: int | None = None) -> float:
        """Return epsilon at delta after some rounds, rounded up.

        It is infinite where noise of finite precision would take more than a hundredth of delta,
        as it does at epsilons of 50 and more.

        Args:
            relation: "zero_out_client" or "replace_client" for all data of the site;
                "zero_out_record" or "replace_record", where ``record_bound`` is stated.
            rounds: t; None is all.

        Raises:
            ValueError: For another relation, and for a record without a bound.
        """
        total = self.rounds if rounds is None else rounds
        total = _validate.integer("rounds", total, minimum=0, maximum=self.rounds)
        mu = self._mu(relation, total)
        if total == 0:
            return 0.0
        cost = self._cost(relation, total)
        if cost.delta > finite.LIMIT * self.delta:
            return np.inf
        exact = gdp.epsilon(mu, self.delta - cost.delta)
        return float(np.nextafter(float(exact) + cost.epsilon, np.inf))

    def statement(self, rounds: int | None = None) -> str:
        """Return in words what some rounds cost.

        Args:
            rounds: t; None is all.
        """
        total = self.rounds if rounds is None else rounds
        changes = {
            "zero_out_client": "all data of this site are zeroed out",
            "replace_client": "all data of this site are replaced by any others",
        }
        unit = "The unit is the site with all its records; no smaller loss is stated of one record."
        if self.record_bound is not None:
            changes["zero_out_record"] = "one record is zeroed out"
            changes["replace_record"] = "one record is replaced by any other"
            unit = (
                "The last two hold if zeroing out one record moves no update by more than "
                f"{self.record_bound:g},\nwhich the author of the training states: nothing here "
                "checks it."
            )
        lines = [f"After {total} of at most {self.rounds} rounds, at delta {up(self.delta)}:"]
        for relation, change in changes.items():
            epsilon = self.epsilon(relation, total)  # type: ignore[arg-type]
            lines.append(f"  epsilon {up(epsilon, 3)} if {change}")
        lines.append(unit)
        lines.append(
            "This holds against the server and all others outside the site. The noise is local:\n"
            "the server may see each noisy update, and the number counts on no secure sum."
        )
        return "\n".join(lines)

    def _mu(self, relation: Relation, rounds: int) -> float:
        """The Gaussian-DP parameter of some rounds, rounded up."""
        options = ("zero_out_client", "replace_client", "zero_out_record", "replace_record")
        _validate.one_of("relation", relation, options)
        times = 2 if relation.startswith("replace") else 1
        shift = times * self.clip_norm
        if relation.endswith("record"):
            if self.record_bound is None:
                raise _validate.refusal(
                    "record_bound",
                    None,
                    "state how far one record moves the update of a round, or ask for the site's "
                    "loss: zero_out_client or replace_client",
                )
            # The computed clip is the projection up to its rounding, at both ends.
            rounding = 4 * self.clip_norm * _slack(self.entries)
            shift = min(times * self.record_bound + rounding, 2 * self.clip_norm)
        return float(budget.mu_of(np.array([self.deviation**-2]), shift, rounds)[0])

    def _cost(self, relation: Relation, rounds: int) -> finite.Cost:
        """What finite precision adds to some rounds."""
        return finite.release_cost(
            np.array([self.deviation]),
            rounds,
            spacing=self.spacing,
            parameters=self.entries,
            mu=self._mu(relation, rounds),
            delta=self.delta,
            clip_norm=self.clip_norm,
        )

    def _flat(self, update: Mapping[str, np.ndarray]) -> _Flat:
        """All arrays as one vector of float64."""
        for name, array in update.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
                kind = getattr(array, "dtype", type(array).__name__)
                raise ValueError(
                    f"update has {name} of {kind}; send NumPy arrays of floats alone, and leave "
                    "counters such as num_batches_tracked out"
                )
        size = sum(array.size for array in update.values())
        if not 0 < size <= self.entries:
            raise ValueError(
                f"update has {size} numbers, and entries is {self.entries}; make the plan for the "
                "size of the model"
            )
        return np.concatenate([array.ravel().astype(np.float64) for array in update.values()])

    def _count(self, folder: _files.PathLike) -> None:
        """Count a round on disk, where no other process has counted the same one."""
        place = Path(folder)
        text = json.dumps(asdict(self), indent=1) + "\n"
        with _files.writing("folder", folder):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                _files.create(place / _PLAN, text.encode())
            except FileExistsError:
                if (place / _PLAN).read_text(encoding="utf-8") != text:
                    raise ValueError(
                        f"folder is {str(folder)!r}, which counts rounds of another plan (its "
                        f"{_PLAN}); give that plan's numbers. A new folder adds its loss to that "
                        "one's"
                    ) from None
            while True:
                # Looked at once: another process may count a round at any moment.
                spent = self.check_left(folder)
                try:
                    _files.create(place / f"{_ROUND}{spent + 1:06d}", b"")
                except FileExistsError:
                    continue
                break
            # Or a power failure takes the count, and what was sent is out.
            _files.synchronise(place)
            _files.synchronise(place.absolute().parent)

    def _released(self, clipped: _Flat) -> _Flat:
        """The clipped update with noise, on the grid."""
        # Both from the system, for this round alone: nothing could draw this noise again.
        noise = SiteNoise(_secret(), run=_secret(), holder="site")
        spacing = self.spacing
        sent = np.empty_like(clipped)
        for group, start in enumerate(range(0, len(clipped), _DRAW)):
            part = clipped[start : start + _DRAW]
            (normals,) = noise.normals(round=0, group=group, rows=1, entries=len(part))
            # A power of two: nothing but the nearest multiple is rounded.
            sent[start : start + _DRAW] = np.round((part + self.deviation * normals) / spacing)
        # Or the sign of a zero would tell on which side of it the sum was.
        return sent * spacing + 0.0


def _secret() -> bytes:
    """32 bytes of the operating system's entropy."""
    return secrets.token_bytes(32)


def _slack(entries: int) -> float:
    """Twice the relative rounding of a norm of so many numbers, and of the scaling by it."""
    return (entries + 8) * UNIT


def _clipped(flat: _Flat, clip_norm: float) -> _Flat:
    """Project a vector onto the ball of a radius; one that is not finite counts as zero.

    Guarantee: the exact norm of what is returned is at most ``clip_norm``, in spite of rounding.
    """
    largest = float(np.abs(flat).max())
    if not np.isfinite(largest):
        return np.zeros_like(flat)
    if largest == 0:
        return flat
    # Of numbers up to 1, whose squares do not overflow.
    scaled = flat / largest
    norm = float(np.linalg.norm(scaled)) * (1 + _slack(len(flat)))
    if largest * norm <= clip_norm:
        return flat
    return scaled * (clip_norm / norm)
