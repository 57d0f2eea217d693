"""A training run whose every round crosses the protocol, with clients that leave at all stages."""

import dataclasses
import errno
import fcntl
import math
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.contrib import departures  # noqa: E402
from dpjax.contrib.masks import Masked  # noqa: E402
from dpjax.engine import host  # noqa: E402
from dpjax.engine.run import run  # noqa: E402
from dpjax.plans import plan  # noqa: E402
from dpjax.plans.protect import Budget  # noqa: E402
from dpjax.plans.sums import Discrete  # noqa: E402
from dpjax.secagg import local, transport  # noqa: E402
from dpjax.secagg.terms import Abort, Limits  # noqa: E402
from dpjax.secagg.transport import Journal  # noqa: E402
from tests.plans.test_aggregate import COMPLETE, DELTA, N, T, config, task  # noqa: E402


@pytest.fixture(autouse=True)
def another_process():
    """Each test begins as a process that has asked for nothing."""
    transport._ASKED.clear()


LEAVES = departures.taking_turns(N, 2)
PART = Discrete(5, dropouts=2, colluders=1)
LIMITS = Limits(enrol=0.5, stage=20.0, send=5.0)


def made(missing=()):
    argument = config(
        part=PART, aggregate=Masked(2, missing), budget=Budget(8.0, DELTA, accountant="zcdp")
    )
    return plan.make(argument, COMPLETE)


ONE = made(departures.absent(LEAVES, T))
TERMS = transport.terms_of(ONE.noise.code, dropouts=2, colluders=1)


def models(value, **options):
    result = run(value, task(), seeds=[0], eval_every=T, **options)
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(result.params)])


@pytest.fixture(scope="module")
def compiled():
    """The models of the run in jit, under masks, with the same clients missing."""
    return models(ONE)


@pytest.mark.parametrize("over", [pytest.param("memory", marks=pytest.mark.slow), "tcp"])
def test_run_over_protocol_equals_masked_run(compiled, over):
    sums = transport.SecureSums(TERMS, LEAVES, over=over, limits=LIMITS, skip=over == "tcp")
    result = models(ONE, transport=sums)
    planned = departures.absent(LEAVES, T)
    # Whoever left before its vector went out is missing; in "unmask" it is in the sum.
    assert all(set(gone) <= set(late) for gone, late in zip(planned, sums.missing(), strict=True))
    # Over a channel a client may be late on a machine with other work: it is missing, too.
    on_time = sums.missing() == planned
    assert on_time or over == "tcp"
    expected = compiled if on_time else models(made(sums.missing()))
    np.testing.assert_array_equal(result, expected)
    assert [value.round for value in sums.crossed] == list(range(T))
    assert {stage for t in range(T) for stage in LEAVES(t).values()} == set(local.STAGES)
    size = TERMS.vector_bytes()
    for item in sums.crossed:
        assert item.aborted or item.received > len(item.survivors) * size and item.sent > 0


@pytest.mark.mutant
def test_sums_modulo_too_few_bits_are_other_models(compiled):
    """The twin: an overflow of which nobody is told."""
    narrow = dataclasses.replace(TERMS, bits=TERMS.bits - 5)
    off = models(ONE, transport=transport.SecureSums(narrow, LEAVES, over="memory")) - compiled
    assert np.abs(off).max() > 1e-3


def too_many(round):
    """Three clients in the fifth round, one more than there may."""
    return {0: "mask", 1: "share", 2: "mask"} if round == 4 else {}


@pytest.mark.slow
def test_aborted_round_ends_run_for_good(tmp_path):
    single = made()
    sums = transport.SecureSums(TERMS, too_many, over="memory")
    with pytest.raises(Abort, match="3 clients sent a vector") as stopped:
        models(single, transport=sums, checkpoint=tmp_path)
    notes = " ".join(stopped.value.__notes__)
    assert "spent=(4,)" in notes and "round 4 (from 0) was not delivered" in notes
    assert sums.crossed[-1].aborted and sums.crossed[-1].survivors == ()
    # Its vectors may have gone out: the very same message is not summed again.
    with pytest.raises(ValueError, match="was asked for before"):
        models(single, transport=sums, checkpoint=tmp_path)
    left = transport.SecureSums(TERMS, too_many, over="memory", spent=(4,))
    went_on = models(single, transport=left, checkpoint=tmp_path)
    assert [item.round for item in left.crossed] == list(range(5, T))
    # Who was there in rounds before is not told as who was there in these.
    with pytest.raises(ValueError, match="round 0 crossed in another process"):
        left.missing()
    # As where the run was told beforehand to go on without such a round.
    transport._ASKED.clear()
    skipped = transport.SecureSums(TERMS, too_many, over="memory", skip=True)
    np.testing.assert_array_equal(models(single, transport=skipped), went_on)
    assert skipped.missing()[4] == tuple(range(N)) and not skipped.missing()[5]


@pytest.mark.slow
def test_run_without_one_round_equals_masked_run():
    skipped = transport.SecureSums(TERMS, too_many, over="memory", skip=True)
    result = models(made(), transport=skipped)
    np.testing.assert_array_equal(models(made(skipped.missing())), result)


ROWS = np.random.default_rng(0).integers(0, 2**TERMS.bits, (N, TERMS.length), np.uint32)


def one_less(round):
    return {0: "mask"}


def secure(leaves=None, **options):
    return transport.SecureSums(TERMS, leaves, over="memory", **options)


def shows_one_client(first, second):
    """Whether two sums are of the same messages but for client 0's."""
    return np.array_equal((first[0] - second[0]) & (2**TERMS.bits - 1), ROWS[0])


def test_no_message_is_summed_twice_by_another_object(monkeypatch):
    """Two sums of the same messages over different survivors show a single one."""
    first = secure()(ROWS, 0)
    for round in (0, 7):
        second = secure(one_less)
        with pytest.raises(ValueError, match=f"round {round}, or its message, was asked for"):
            second(ROWS, round)
        assert not second.crossed
    assert secure(spent=(0,))(ROWS, 0)[1] == 0
    # The broken copy: an object that knows of no other.
    monkeypatch.setattr(transport, "_ASKED", {})
    assert shows_one_client(first, secure(one_less)(ROWS, 0))


def test_no_message_is_summed_twice_by_another_process(tmp_path):
    file = tmp_path / "rounds.jsonl"
    with secure(journal=file) as sums:
        first = sums(ROWS, 0)
    transport._ASKED.clear()
    with secure(one_less, journal=file) as second:
        again, present = second(ROWS, 0)
        np.testing.assert_array_equal(again, first[0])
        assert present == N and not second.crossed
        with pytest.raises(ValueError, match="round 0 crossed in another process"):
            second.missing()
        # Another message under that round's number is of another run.
        with pytest.raises(ValueError, match="journal holds another message of round 0"):
            second(ROWS + np.uint32(1), 0)
    with pytest.raises(ValueError, match=r"journal is .*, which is closed; open it again"):
        second(ROWS, 1)
    # The broken copy: the same without a journal.
    assert shows_one_client(first, secure(one_less)(ROWS, 0))
    with pytest.raises(ValueError, match="of a run of other terms"):
        transport.SecureSums(dataclasses.replace(TERMS, length=4), journal=file)


def both_ask(file, monkeypatch):
    """Two objects on one journal where locks keep nobody out: their sums of one round."""
    monkeypatch.setattr(fcntl, "flock", lambda handle, mode: None)
    with secure(journal=file) as hung, secure(one_less, journal=file) as restarted:
        first = hung(ROWS, 0)
        transport._ASKED.clear()  # Of the other process.
        return first, restarted(ROWS, 0)


def test_one_object_has_journal_and_reads_it_before_it_asks(tmp_path, monkeypatch):
    file = tmp_path / "rounds.jsonl"
    sums = secure(journal=file)
    for name in (file, os.path.relpath(file), tmp_path / "linked.jsonl"):
        if not os.path.exists(name):
            os.symlink(file, name)
        with pytest.raises(ValueError, match="another process uses, or another object of this"):
            secure(one_less, journal=name)
    sums.close()
    secure(journal=file).close()
    first, second = both_ask(file, monkeypatch)
    np.testing.assert_array_equal(first[0], second[0])
    assert second[1] == N
    # The broken copy, with neither: the difference is one client's message.
    monkeypatch.setattr(Journal, "read", once(Journal.read))
    assert shows_one_client(*both_ask(tmp_path / "other.jsonl", monkeypatch))


def once(read):
    """A journal that is read when it is opened alone."""
    return lambda journal: journal.rounds if journal._lines else read(journal)


def test_journal_that_was_moved_or_replaced_is_not_asked_by(tmp_path):
    file = tmp_path / "rounds.jsonl"
    with secure(journal=file) as sums:
        sums(ROWS, 0)
        shutil.copy(file, tmp_path / "copy")
        os.replace(tmp_path / "copy", file)
        with pytest.raises(ValueError, match="deleted, moved or replaced while it was in use"):
            sums(ROWS, 1)
        file.unlink()
        with pytest.raises(ValueError, match="deleted, moved or replaced while it was in use"):
            sums(ROWS, 1)


HOLDS = """
import os, sys, time
from dpjax.secagg.transport import Journal
held = Journal(sys.argv[1], bytes.fromhex(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_journal_is_locked_over_processes_until_kill(tmp_path):
    file = tmp_path / "rounds.jsonl"
    command = [sys.executable, "-c", HOLDS, str(file), TERMS.digest().hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"journal is '{file}', which another process uses"):
            secure(journal=file)
    finally:
        process.kill()
        process.communicate()
    with secure(journal=file) as sums:
        assert sums(ROWS, 0)[1] == N


def test_killed_fork_frees_its_journal(tmp_path):
    """In a process without JAX, whose threads do not go well with forks."""
    code = """
import os, signal, sys, time
from dpjax.secagg.transport import Journal
path, terms = sys.argv[1], bytes(32)
inherited = Journal(path + ".parent", terms)
ready, said = os.pipe()
child = os.fork()
if not child:
    try:
        inherited.read()
    except ValueError as error:
        os.write(said, str(error).encode()[-70:] + b"|")
    held = Journal(path, terms)
    os.write(said, b"held")
    time.sleep(60)
said = b""
while not said.endswith(b"held"):
    said += os.read(ready, 100)
assert b"opened before this process was forked; open it again" in said, said
try:
    Journal(path, terms)
    raise SystemExit("not locked")
except ValueError as error:
    assert "another process uses" in str(error), error
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert Journal(path, terms).rounds == dict()
inherited.read()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rounds.jsonl")], check=True)


def test_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def unsupported(handle, mode):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ValueError, match=r"journal is .* be written \(No locks available\)"):
        secure(journal=tmp_path / "rounds.jsonl")


@pytest.fixture
def noted(tmp_path):
    """A journal of rounds 0 (aborted) and 1, and their sums."""
    file = tmp_path / "rounds.jsonl"
    with secure(too_many_first, journal=file, skip=True) as sums:
        results = [sums(message(t), t) for t in range(2)]
    assert [present for _, present in results] == [0, N]
    return file, results


def too_many_first(round):
    return {} if round else {0: "mask", 1: "mask", 2: "mask"}


def message(t):
    return (ROWS + np.uint32(t)) & np.uint32(2**TERMS.bits - 1)


def test_every_changed_character_of_journal_is_harmless(noted):
    file, result = noted
    complete = file.read_bytes()
    tried = refused = 0
    for place in range(len(complete)):
        # All places, each by one of four changes, and the first and last bytes by all.
        changes = (ord("\n"), ord("7"), complete[place] ^ 1, 0xFF)
        some = 16 < place < len(complete) - 16
        for other in {changes[place % 4]} if some else {*changes} - {complete[place]}:
            if other == complete[place]:
                continue
            tried += 1
            file.write_bytes(complete[:place] + bytes([other]) + complete[place + 1 :])
            if harmless(file, result):
                assert place == len(complete) - 1  # Its last line has no end.
            else:
                refused += 1
    assert refused >= tried - 4 > 0.9 * len(complete)


def harmless(file, result):
    """Whether a journal is read; then no round is asked again, and no sum is another."""
    before = file.read_bytes()
    try:
        journal = Journal(file, TERMS.digest())
    except ValueError as error:
        assert "damaged in line" in str(error)
        assert file.read_bytes() == before
        return False
    reference = dict(journal.rounds)
    journal.close()
    for round, (values, present) in enumerate(result):
        assert round in reference
        if reference[round].values is not None:
            np.testing.assert_array_equal(reference[round].values, values)
            assert reference[round].present == present
    return True


def test_dropped_swapped_and_foreign_lines_are_refused(noted, tmp_path):
    file, result = noted
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    for index in range(3):
        for changed in (
            lines[:index] + lines[index + 1 :],
            [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]],
            [*lines[:index], lines[index], *lines[index:]],
        ):
            file.write_bytes(b"".join(changed))
            assert not harmless(file, result)
    for text in (b"", b"{}", b"{}\n", b"\n", b"\xff" * 9, b'{"round": Infinity}\n'):
        file.write_bytes(text)
        assert not harmless(file, result)


@pytest.mark.mutant
def test_changes_are_noticed_by_digests_alone(noted, monkeypatch):
    """The broken copy: lines whose digests nobody compares give another sum, and ask again."""
    file, result = noted
    complete = file.read_bytes()
    monkeypatch.setattr(transport, "_chained", lambda before, body: "0" * 64)
    end = b', "digest": "'
    bare = b"".join(
        line.partition(end)[0] + end + b"0" * 64 + b'"}\n' for line in complete.splitlines()
    )
    file.write_bytes(bare)
    assert harmless(file, result)
    file.write_bytes(bare.replace(b'"round": 1', b'"round": 7'))
    with pytest.raises(AssertionError):
        harmless(file, result)
    position = bare.index(b'"sum": "') + 10
    file.write_bytes(bare[:position] + bytes([bare[position] ^ 1]) + bare[position + 1 :])
    with pytest.raises(AssertionError):
        harmless(file, result)


def test_line_that_was_cut_short_spends_its_round(noted):
    """Wherever a kill, or a disk, cut it: no round is asked again that may have been opened."""
    file, result = noted
    complete = file.read_bytes()
    lines = complete.splitlines(keepends=True)
    requests, summed = (len(b"".join(lines[:number])) for number in (2, 3))
    starts = {start + length for start in (requests, summed) for length in range(1, 15)}
    for length in {*starts, *range(requests + 1, len(complete), 9)} - {summed}:
        file.write_bytes(complete[:length])
        transport._ASKED.clear()
        with secure(one_less, journal=file) as sums:
            assert [sums(message(t), t)[1] for t in (0, 1)] == [0, 0] and not sums.crossed
            # The next round is new, but where the line may have been of it.
            unread = summed < length < summed + len(b'{"round": 1, ')
            assert sums(message(2), 2)[1] == (0 if unread else N - 1)
        # What was found out is written down.
        with secure(one_less, journal=file) as sums:
            assert sums(message(1), 1)[1] == 0 and not sums.crossed


@pytest.mark.slow
def test_resumed_run_knows_its_aborted_rounds(tmp_path):
    single = made()
    file = tmp_path / "rounds.jsonl"

    def sums():
        return transport.SecureSums(TERMS, too_many, over="memory", journal=file)

    with sums() as first, pytest.raises(Abort):
        models(single, transport=first, checkpoint=tmp_path / "state")
    # Killed while it wrote that the next round is asked for: that round is spent.
    with open(file, "ab") as raw:
        raw.write(b'{"round": 5, "mess')
    with sums() as left:
        went_on = models(single, transport=left, checkpoint=tmp_path / "state")
        assert [item.round for item in left.crossed] == list(range(6, T))
    transport._ASKED.clear()
    skipped = transport.SecureSums(TERMS, too_many, over="memory", skip=True, spent=(5,))
    np.testing.assert_array_equal(models(single, transport=skipped), went_on)
    # Begun again without its checkpoint: the same sums, and nothing crosses.
    with sums() as complete:
        np.testing.assert_array_equal(models(single, transport=complete), went_on)
        assert not complete.crossed
    with pytest.raises(ValueError, match="cannot be written"):
        transport.SecureSums(TERMS, journal=tmp_path)
    with pytest.raises(ValueError, match="journal is 3; name a file"):
        transport.SecureSums(TERMS, journal=3)


def test_sums_of_fewer_than_noise_is_for_are_refused():
    terms = transport.terms_of(ONE.noise.code, dropouts=3, colluders=1)
    fewer = transport.SecureSums(terms, over="memory")
    with pytest.raises(ValueError, match="sums of 3 of 6 agents.* is for sums of 4 or more"):
        models(ONE, transport=fewer)
    assert not fewer.crossed

    # One that does not say so is stopped by the first such sum, before models move by it.
    def own(message, round):
        return message[0], np.float32(3)

    own.colluders = 1
    with pytest.raises(ValueError, match="a sum of 3 agents, less than the 4") as refusal:
        models(ONE, transport=own)
    assert "round 0 (from 0) was not delivered" in refusal.value.__notes__[0]


def test_terms_for_fewer_colluders_than_noise_s_are_refused():
    """With the knowledge of more clients than the graph is for, the server opens single vectors."""
    terms = transport.terms_of(ONE.noise.code, dropouts=2, colluders=0)
    sums = transport.SecureSums(terms, over="memory")
    with pytest.raises(ValueError, match="terms for 0 colluders.* noise is for 1.*colluders=1"):
        models(ONE, transport=sums)
    assert not sums.crossed
    with pytest.raises(TypeError, match="colluders"):
        transport.terms_of(ONE.noise.code, dropouts=2)

    def around(message, round):
        return sums(message, round)

    with pytest.raises(ValueError, match="says no colluders, and the plan's noise is for 1"):
        models(ONE, transport=around)
    for said, text in ((0, "terms for 0 colluders"), ("1", "colluders is '1'")):
        around.colluders = said
        with pytest.raises(ValueError, match=text):
            models(ONE, transport=around)
    assert not sums.crossed
    assert host.local_transport(ONE).colluders == 1, "no message leaves the process"


def test_terms_for_many_colluders_keep_vectors_closed():
    """Sixty clients, twenty of whom collude, counted here over all rings."""
    code = dataclasses.replace(ONE.noise.code, clients=60)

    def exposed(colluders):
        """Clients with t or more of twenty colluders among their k neighbours, on average."""
        k, t = transport.terms_of(code, dropouts=2, colluders=colluders).graph(60)[:2]
        near = sum(math.comb(20, x) * math.comb(39, k - x) for x in range(t, k + 1))
        return 40 * near / math.comb(59, k)

    assert exposed(20) < 2**-40
    assert exposed(0) > 1  # The broken copy: terms that assume nobody, as they did by default.


def test_terms_are_those_of_noise():
    assert (TERMS.clients, TERMS.length, TERMS.bits) == (N, 8, ONE.noise.code.bits)
    assert TERMS.minimum == N - PART.dropouts and TERMS.bound is None
    for clients in (7, 49):
        code = dataclasses.replace(ONE.noise.code, clients=clients)
        for dropouts in range(3):
            assert transport.terms_of(code, dropouts=dropouts, colluders=1).minimum == (
                clients - dropouts
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (np.ones((N, 8), np.float32), "message is float32"),
        (np.ones((N, 7), np.uint32), r"message is uint32\[6, 7\]"),
        ({"w": np.ones((N, 8), np.uint32)}, "message is dict"),
    ],
)
def test_other_messages_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        transport.SecureSums(TERMS, over="memory")(change, 0)


def test_other_terms_and_schedules_are_refused():
    with pytest.raises(ValueError, match="give bound=None"):
        transport.SecureSums(dataclasses.replace(TERMS, bound=1))
    with pytest.raises(ValueError, match="bits 40"):
        transport.SecureSums(dataclasses.replace(TERMS, bits=40))
    with pytest.raises(ValueError, match="over is 'udp'"):
        transport.SecureSums(TERMS, over="udp")
    for invalid in ({"terms": None}, {"spent": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(invalid))} is .*; give"):
            transport.SecureSums(**{"terms": TERMS} | invalid)
    with pytest.raises(ValueError, match="give at least one of"):
        departures.taking_turns(N, 1, ())
    with pytest.raises(ValueError, match="stages is 'late'"):
        departures.taking_turns(N, 1, ("late",))
