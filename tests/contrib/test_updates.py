"""One site's noisy updates: clip, noise, count of rounds, and the loss that is stated."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import special

from dpjax import _files
from dpjax.contrib import updates
from dpjax.contrib.updates import SiteUpdates

TERMS = dict(rounds=20, clip_norm=1.0, noise_multiplier=2.4, delta=1e-5)
RELATIONS = ("zero_out_client", "replace_client")


def made(**changes):
    return SiteUpdates(**(TERMS | changes))


@pytest.fixture
def entropy(monkeypatch):
    """The system's entropy from a counter, so that statistics are the same in every test run."""
    numbers = itertools.count(1)
    monkeypatch.setattr(updates, "_secret", lambda: next(numbers).to_bytes(32, "big"))
    return numbers


def deviation_of(value, folder, entries=300_000):
    """Of what is sent of an update of zeros."""
    sent = value.noisy({"w": np.zeros(entries)}, folder)["w"]
    return np.sqrt(np.mean(np.square(sent)))


def fits(value, measured, entries=300_000):
    """Whether a deviation is that of the noise and of the grid, by five standard errors."""
    variance = (value.noise_multiplier * value.clip_norm) ** 2 + value.spacing**2 / 12
    return abs(measured**2 / variance - 1) < 5 * np.sqrt(2 / entries)


def exact_norm_squared(flat):
    return sum(Fraction(float(value)) ** 2 for value in flat)


# The noise.


@pytest.mark.parametrize(("clip_norm", "multiplier"), [(1.0, 2.4), (0.3, 2.2), (50.0, 9.0)])
def test_noise_has_stated_deviation(clip_norm, multiplier, tmp_path, entropy):
    value = made(clip_norm=clip_norm, noise_multiplier=multiplier)
    measured = deviation_of(value, tmp_path)
    assert fits(value, measured)
    assert not fits(value, 1.5 * measured) and not fits(value, measured / 1.5)


@pytest.mark.mutant
def test_noise_without_clip_norm_is_caught(tmp_path, entropy, monkeypatch):
    broken = property(lambda self: self.noise_multiplier)
    monkeypatch.setattr(SiteUpdates, "deviation", broken)
    value = made(clip_norm=0.3, noise_multiplier=2.2)
    assert not fits(value, deviation_of(value, tmp_path))


def on_grid(sent, spacing):
    """Whether all are whole multiples of it, none with the sign of what was rounded to zero."""
    complete = (np.round(sent / spacing) * spacing == sent).all()
    return bool(complete and not np.signbit(sent[sent == 0]).any())


def sent_of(value, folder):
    x = np.full((100, 100), 1e-3, np.float32)
    return value.noisy({"w": x}, folder)["w"]


def test_what_is_sent_lies_on_grid(tmp_path, entropy):
    sent = sent_of(made(), tmp_path)
    assert sent.dtype == np.float32 and made().spacing == 0.25
    assert (sent == 0).sum() > 100 and on_grid(sent, 0.25)


@pytest.mark.mutant
@pytest.mark.parametrize("broken", ["no_grid", "sign_of_zero"])
def test_numbers_off_grid_are_caught(broken, tmp_path, entropy, monkeypatch):
    def released(self, clipped):
        noise = updates.SiteNoise(updates._secret(), run=updates._secret(), holder="site")
        (normals,) = noise.normals(round=0, group=0, rows=1, entries=len(clipped))
        noisy = clipped + self.deviation * normals
        return noisy if broken == "no_grid" else np.round(noisy / self.spacing) * self.spacing

    monkeypatch.setattr(SiteUpdates, "_released", released)
    assert not on_grid(sent_of(made(), tmp_path), 0.25)


def repeats(value, folder):
    """Whether two rounds differ by what their updates differ by, so that the noise is the same."""
    first = value.noisy({"w": np.zeros(1000)}, folder)["w"]
    second = value.noisy({"w": np.zeros(1000)}, folder)["w"]
    return bool((np.abs(first - second) < 0.01 * value.deviation).mean() > 0.5)


def test_noise_is_fresh_from_system_in_every_round_and_draw(tmp_path, monkeypatch):
    sizes = []
    system = updates.secrets.token_bytes
    monkeypatch.setattr(updates.secrets, "token_bytes", lambda n: sizes.append(n) or system(n))
    made().noisy({"w": np.zeros(3)}, tmp_path / "system")
    assert sizes.count(32) == 2  # a secret, and the name of its only run
    assert not repeats(made(), tmp_path / "fresh")
    # Draws of one round have numbers of their own.
    monkeypatch.setattr(updates, "_DRAW", 500)
    sent = made().noisy({"w": np.zeros(1000)}, tmp_path / "draws")["w"]
    assert (sent[:500] != sent[500:]).mean() > 0.5


@pytest.mark.mutant
def test_one_secret_for_all_rounds_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "_secret", lambda: b"s" * 32)
    assert repeats(made(), tmp_path)


# The clip.


def vectors():
    rng = np.random.default_rng(0)
    for scale in (1e-200, 1e-3, 0.9999999, 1.0, 7.0, 1e8, 1e300):
        for size in (1, 2, 7, 64):
            yield scale * rng.normal(size=size)
            unit = rng.normal(size=size)
            yield scale * unit / np.linalg.norm(unit)


def longest(clip, clip_norm):
    """The largest exact squared norm after a clip, over the squared clip norm."""
    bound = Fraction(clip_norm) ** 2
    return max(exact_norm_squared(clip(x, clip_norm)) / bound for x in vectors())


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 3.0])
def test_exact_norm_after_clip_is_at_most_clip_norm(clip_norm):
    largest = longest(updates._clipped, clip_norm)
    assert 1 - 1e-12 < largest <= 1
    # What is shorter stays as it is.
    short = np.array([0.05, -0.05])
    assert (updates._clipped(short, clip_norm) == short).all()
    assert (updates._clipped(np.zeros(3), clip_norm) == 0).all()


@pytest.mark.mutant
def test_clips_that_leave_too_much_are_caught():
    def plain(x, clip_norm):
        return x * min(1.0, clip_norm / max(np.linalg.norm(x), 1e-300))

    def each_number(x, clip_norm):
        return np.clip(x, -clip_norm, clip_norm)

    with np.errstate(all="ignore"):
        assert longest(plain, 0.1) > 1
    assert longest(each_number, 0.1) > 1
    assert longest(lambda x, clip_norm: np.nan_to_num(x), 0.1) > 1


def test_all_layers_are_clipped_as_one_vector(tmp_path, monkeypatch):
    monkeypatch.setattr(SiteUpdates, "_released", lambda self, clipped: clipped)
    update = {"a": np.full((2, 3), 3.0, np.float32), "b": np.full(4, -2.0), "c": np.float32([1.0])}
    sent = made().noisy(update, tmp_path)
    assert list(sent) == list(update)
    norm = np.sqrt(sum(np.square(array).sum() for array in update.values()))
    for name, array in update.items():
        assert sent[name].shape == array.shape and sent[name].dtype == array.dtype
        np.testing.assert_allclose(sent[name], array / norm, rtol=1e-6)


def furthest(clip):
    """How much further apart two updates are after a clip, at most."""
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(2000):
        x = rng.normal(size=3) * rng.choice([0.2, 1.0, 4.0])
        y = x + rng.normal(size=3) * rng.choice([0.01, 0.5])
        largest = max(largest, np.linalg.norm(clip(x, 1.0) - clip(y, 1.0)) / np.linalg.norm(x - y))
    return largest


def test_clip_moves_no_two_updates_apart():
    assert 0.99 < furthest(updates._clipped) <= 1 + 1e-9


@pytest.mark.mutant
def test_clip_that_moves_updates_apart_is_caught():
    assert furthest(lambda x, clip_norm: clip_norm * x / np.linalg.norm(x)) > 1.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_update_that_is_not_finite_counts_as_zero(bad, tmp_path, entropy):
    sent = made().noisy({"w": np.array([bad, 1.0, 2.0])}, tmp_path)["w"]
    assert np.isfinite(sent).all() and (updates._clipped(np.array([bad, 1.0]), 1.0) == 0).all()


# What is stated.


def delta_of(mu, epsilon):
    """The privacy profile of a Gaussian, by the closed form that `gdp` does not use."""
    tail = np.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
    return special.ndtr(-epsilon / mu + mu / 2) - tail


def faults(value, stated):
    """Relations and rounds at which a stated epsilon is below or far above the exact one."""
    places = []
    for relation, shift in (("zero_out_client", 1), ("replace_client", 2)):
        for rounds in (1, 7, 20):
            mu = shift * np.sqrt(rounds) / value.noise_multiplier
            epsilon = stated(value, relation, rounds)
            if delta_of(mu, epsilon) > value.delta or delta_of(mu, 0.999 * epsilon) < value.delta:
                places.append((relation, rounds))
    return places


@pytest.mark.parametrize("clip_norm", [0.01, 1.0, 30.0])
def test_epsilon_is_exact(clip_norm):
    assert not faults(made(clip_norm=clip_norm), SiteUpdates.epsilon)
    assert made().epsilon("replace_client", 0) == 0


@pytest.mark.mutant
def test_wrong_losses_are_caught():
    def other_relation(value, relation, rounds):
        return value.epsilon("zero_out_client", rounds)

    def one_round(value, relation, rounds):
        return value.epsilon(relation, 1)

    def in_full(value, relation, rounds):
        return value.epsilon(relation)

    for broken in (other_relation, one_round, in_full):
        assert faults(made(), broken)


def test_a_plan_of_epsilon_10_by_relation():
    """What the examples compare: 10 by a Renyi bound; exact 9.17 or 22.2 by relation."""
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(TERMS["noise_multiplier"]), TERMS["rounds"])
    assert round(accountant.get_epsilon(TERMS["delta"]), 2) == 9.84
    assert [f"{made().epsilon(relation):.3g}" for relation in RELATIONS] == ["9.17", "22.2"]
    text = made().statement()
    assert "epsilon 9.17 if all data of this site are zeroed out\n" in text
    assert "epsilon 22.2 if all data of this site are replaced by any others\n" in text
    assert "After 20 of at most 20 rounds, at delta 1e-05" in text and "server may see each" in text
    assert "no smaller loss is stated of one record" in text
    assert "After 3 of at most 20" in made().statement(3) and "epsilon 3.02" in made().statement(3)


def test_record_s_loss_is_stated_for_a_bound_alone():
    with pytest.raises(ValueError, match="record_bound is missing; state how far"):
        made().epsilon("zero_out_record")
    value = made(record_bound=0.25)
    # A quarter of the shift is a quarter of mu, and what finite precision adds is small.
    for record, client in (("zero_out_record", 0.25), ("replace_record", 0.5)):
        mu = client * np.sqrt(20) / 2.4
        epsilon = value.epsilon(record)
        assert delta_of(mu, epsilon) <= 1e-5 < delta_of(mu, 0.998 * epsilon)
    assert "moves no update by more than 0.25" in value.statement()
    assert "nothing here checks it" in " ".join(value.statement().split())
    # The clip bounds the record, too.
    loose = made(record_bound=100.0)
    assert loose.epsilon("zero_out_record") == loose.epsilon("replace_client")


def test_finite_precision_is_paid_for():
    small, large = made(entries=1000), made(entries=10**9)
    assert small.epsilon("replace_client") < large.epsilon("replace_client") < 22.19
    # Too little noise for the cells of its grid: a number would be false.
    weak = made(noise_multiplier=1.0)
    assert 20 < weak.epsilon("zero_out_client") < 40
    assert weak.epsilon("replace_client") == np.inf and "epsilon inf if all" in weak.statement()
    with pytest.raises(ValueError, match="noise_multiplier is 0.3; .* give more noise"):
        made(noise_multiplier=0.3)
    with pytest.raises(ValueError, match="no 1,000,000,000,000 numbers in 20 rounds"):
        made(entries=10**12)


# The count.


def rounds_on_disk(folder):
    return len(list(folder.glob("round-*")))


def test_restarted_client_goes_on_counting(tmp_path):
    for number in range(1, 4):
        # Another object each time, as after a restart.
        made(rounds=3).noisy({"w": np.zeros(3)}, tmp_path)
        assert made(rounds=3).spent(tmp_path) == rounds_on_disk(tmp_path) == number
    assert SiteUpdates.of_folder(tmp_path) == made(rounds=3)


def test_rounds_beyond_total_are_refused_before_noise_is_drawn(tmp_path, monkeypatch):
    value = made(rounds=2)
    for _ in range(2):
        value.check_left(tmp_path)
        value.noisy({"w": np.zeros(3)}, tmp_path)
    monkeypatch.setattr(updates, "_secret", lambda: pytest.fail("noise was drawn"))
    for _ in range(2):
        with pytest.raises(ValueError, match="rounds is 2, of which .* has counted 2"):
            value.noisy({"w": np.zeros(3)}, tmp_path)
        with pytest.raises(ValueError, match="nothing more may be sent"):
            value.check_left(tmp_path)
    assert value.spent(tmp_path) == 2


KILLED = """
import os, sys
import numpy as np
from dpjax.contrib import updates
if sys.argv[2] == "late":  # the broken copy: it counts after the noise is drawn
    count = updates.SiteUpdates._count
    released = updates.SiteUpdates._released
    def late(self, clipped):
        sent = released(self, clipped)
        count(self, sys.argv[1])
        return sent
    updates.SiteUpdates._released = late
    updates.SiteUpdates._count = lambda self, folder: None
updates._secret = lambda: os.kill(os.getpid(), 9)
updates.SiteUpdates(20, 1.0, 2.4, 1e-5).noisy({"w": np.zeros(3)}, sys.argv[1])
"""


def counted_by_killed(folder, options):
    """Rounds that a process has counted which was killed as it drew the noise."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), options], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return made().spent(folder)


def test_killed_process_has_counted_its_round(tmp_path):
    assert counted_by_killed(tmp_path, "first") == 1
    made().noisy({"w": np.zeros(3)}, tmp_path)
    assert made().spent(tmp_path) == 2


@pytest.mark.mutant
def test_count_after_noise_is_caught(tmp_path):
    assert counted_by_killed(tmp_path, "late") == 0


def passed(folder, monkeypatch, rounds=5, clients=8, tries=2):
    """How many rounds processes of one folder get, all at the same time."""
    value = made(rounds=rounds)
    spent = updates.SiteUpdates.spent

    def late(self, folder):
        count = spent(self, folder)
        # Others look before this one counts.
        time.sleep(0.02)
        return count

    monkeypatch.setattr(updates.SiteUpdates, "spent", late)
    start = threading.Barrier(clients)
    done = []

    def client():
        start.wait()
        for _ in range(tries):
            try:
                value._count(folder)
            except ValueError:
                continue
            done.append(1)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done)


def test_no_round_is_counted_once_for_two(tmp_path, monkeypatch):
    assert passed(tmp_path, monkeypatch) == 5 == made(rounds=5).spent(tmp_path)


def test_round_counted_meanwhile_is_not_passed_over(tmp_path, monkeypatch):
    value = made(rounds=5)
    for _ in range(4):
        value._count(tmp_path)
    counts = iter((4, 5, 5))
    # Another process counts the last round after this one has looked.
    monkeypatch.setattr(updates.SiteUpdates, "spent", lambda self, folder: next(counts))
    value._count(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("round-*"))[-1] == "round-000005"


@pytest.mark.mutant
def test_count_that_two_may_share_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "create", _files.replace)
    assert passed(tmp_path, monkeypatch) > 5


def test_folder_of_another_plan_is_refused(tmp_path):
    made().noisy({"w": np.zeros(3)}, tmp_path)
    for changes in ({"noise_multiplier": 3.0}, {"rounds": 21}, {"record_bound": 0.1}):
        with pytest.raises(ValueError, match="counts rounds of another plan"):
            made(**changes).noisy({"w": np.zeros(3)}, tmp_path)
    assert made().spent(tmp_path) == 1
    (tmp_path / "plan.json").write_text(json.dumps({"rounds": 2}))
    with pytest.raises(ValueError, match="plan.json cannot be read"):
        SiteUpdates.of_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="name"):
        SiteUpdates.of_folder(tmp_path / "none")


# Refusals.


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({}, "update has 0 numbers"),
        ({"w": np.zeros(11)}, "update has 11 numbers, and entries is 10"),
        ({"w": np.zeros(3), "num_batches_tracked": np.zeros(1, int)}, "tracked of int64; send"),
        ({"w": [0.0]}, "update has w of list; send NumPy arrays"),
    ],
)
def test_updates_that_do_not_fit_are_refused_uncounted(update, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(entries=10).noisy(update, tmp_path)
    assert made().spent(tmp_path) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds is 0; give a whole number"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; give a finite number above 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0; give a finite number above 0"),
        ({"delta": 1.0}, "delta is 1.0; give a number strictly"),
        ({"record_bound": 0.0}, "record_bound is 0.0; give a finite number above 0"),
        ({"entries": 0}, "entries is 0; give a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_unknown_relation_and_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="relation is 'replace_site'"):
        made().epsilon("replace_site")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="folder is .* cannot be written"):
        made().noisy({"w": np.zeros(3)}, tmp_path / "file")
