"""A training run whose every round crosses the protocol, with clients that leave at all stages."""

import dataclasses
import math

import jax
import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.algorithms.exchange import Masked  # noqa: E402
from dpjax.engine.run import run  # noqa: E402
from dpjax.plans import plan  # noqa: E402
from dpjax.plans.integers import Discrete  # noqa: E402
from dpjax.plans.protect import Budget  # noqa: E402
from dpjax.secagg import local, tcp, transport  # noqa: E402
from dpjax.secagg.terms import Abort  # noqa: E402
from tests.plans.test_aggregate import COMPLETE, DELTA, N, T, config, task  # noqa: E402

LEAVES = transport.taking_turns(N, 2)
PART = Discrete(5, dropouts=2, colluders=1)
LIMITS = tcp.Limits(enrol=0.5, stage=20.0, send=5.0)


def made(missing=()):
    given = config(
        part=PART, aggregate=Masked(2, missing), budget=Budget(8.0, DELTA, accountant="zcdp")
    )
    return plan.make(given, COMPLETE)


ONE = made(transport.absent(LEAVES, T))
TERMS = transport.terms_of(ONE.noise.code, dropouts=2, colluders=1)


def models(one, **options):
    found = run(one, task(), seeds=[0], eval_every=T, **options)
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(found.params)])


@pytest.fixture(scope="module")
def compiled():
    """The models of the run in jit, under masks, with the same clients missing."""
    return models(ONE)


@pytest.mark.parametrize("over", ["memory", "tcp"])
def test_a_run_over_the_protocol_has_the_models_of_the_run_under_masks(compiled, over):
    sums = transport.SecureSums(TERMS, LEAVES, over=over, limits=LIMITS, skip=over == "tcp")
    found, planned = models(ONE, transport=sums), transport.absent(LEAVES, T)
    # Whoever left before its vector went out is missing; in "unmask" it is in the sum.
    assert all(set(gone) <= set(late) for gone, late in zip(planned, sums.missing(), strict=True))
    # Over TCP a client may be late on a machine with other work: it is missing, too.
    on_time = sums.missing() == planned
    assert on_time or over == "tcp"
    wanted = compiled if on_time else models(made(sums.missing()))
    np.testing.assert_array_equal(found, wanted)
    assert [each.round for each in sums.crossed] == list(range(T))
    assert {stage for t in range(T) for stage in LEAVES(t).values()} == set(local.STAGES)
    size = TERMS.vector_bytes()
    for each in sums.crossed:
        assert each.aborted or each.received > len(each.survivors) * size and each.sent > 0


def test_sums_modulo_too_few_bits_are_other_models(compiled):
    """The twin: an overflow of which nobody is told."""
    narrow = dataclasses.replace(TERMS, bits=TERMS.bits - 5)
    off = models(ONE, transport=transport.SecureSums(narrow, LEAVES, over="memory")) - compiled
    assert np.abs(off).max() > 1e-3


def too_many(round):
    """Three clients in the fifth round, one more than there may."""
    return {0: "mask", 1: "share", 2: "mask"} if round == 4 else {}


def test_an_aborted_round_ends_the_run_and_is_not_asked_for_again(tmp_path):
    one = made()
    sums = transport.SecureSums(TERMS, too_many, over="memory")
    with pytest.raises(Abort, match="3 clients sent a vector") as stopped:
        models(one, transport=sums, checkpoint=tmp_path)
    notes = " ".join(stopped.value.__notes__)
    assert "spent=(4,)" in notes and "round 4 (from 0) was not delivered" in notes
    assert sums.crossed[-1].aborted and sums.crossed[-1].survivors == ()
    # Its vectors may have gone out: the very same message is not summed again.
    with pytest.raises(ValueError, match="was asked for before"):
        models(one, transport=sums, checkpoint=tmp_path)
    left = transport.SecureSums(TERMS, too_many, over="memory", spent=(4,))
    went_on = models(one, transport=left, checkpoint=tmp_path)
    assert [each.round for each in left.crossed] == list(range(5, T))
    # Who was there in rounds before is not told as who was there in these.
    with pytest.raises(ValueError, match="round 0 crossed in another process"):
        left.missing()
    # As where the run was told beforehand to go on without such a round, and in jit.
    skipped = transport.SecureSums(TERMS, too_many, over="memory", skip=True)
    np.testing.assert_array_equal(models(one, transport=skipped), went_on)
    assert skipped.missing()[4] == tuple(range(N)) and not skipped.missing()[5]
    np.testing.assert_array_equal(models(made(skipped.missing())), went_on)


def test_no_message_is_summed_twice_though_the_process_is_another(tmp_path):
    """Two sums of the same messages over different survivors show a single one: the twin does."""
    rows = np.random.default_rng(0).integers(0, 2**TERMS.bits, (N, TERMS.length), np.uint32)
    gone = {0: "mask"}

    def asked(leaves, **options):
        sums = transport.SecureSums(TERMS, lambda round: leaves, over="memory", **options)
        return sums(rows, 0), sums

    (first, everybody), _ = asked({}, journal=tmp_path / "rounds.jsonl")
    (again, present), second = asked(gone, journal=tmp_path / "rounds.jsonl")
    np.testing.assert_array_equal(again, first)
    assert present == everybody == N and not second.crossed
    with pytest.raises(ValueError, match="round 0 crossed in another process"):
        second.missing()
    (other, fewer), twin = asked(gone)
    assert len(twin.crossed) == 1 and fewer == N - 1
    np.testing.assert_array_equal((first - other) & (2**TERMS.bits - 1), rows[0])
    # Another message under that round's number is of another run.
    with pytest.raises(ValueError, match="journal holds another message of round 0"):
        second(rows + np.uint32(1), 0)
    with pytest.raises(ValueError, match="of a run of other terms"):
        transport.SecureSums(
            dataclasses.replace(TERMS, length=4), over="memory", journal=tmp_path / "rounds.jsonl"
        )


def test_a_run_that_goes_on_knows_its_aborted_rounds_from_its_journal(tmp_path):
    one, file = made(), tmp_path / "rounds.jsonl"

    def sums():
        return transport.SecureSums(TERMS, too_many, over="memory", journal=file)

    with pytest.raises(Abort):
        models(one, transport=sums(), checkpoint=tmp_path / "state")
    # Killed while it wrote: what was cut short was not followed by a message.
    with open(file, "ab") as raw:
        raw.write(b'{"round": 5, "mess')
    left = sums()
    went_on = models(one, transport=left, checkpoint=tmp_path / "state")
    assert [each.round for each in left.crossed] == list(range(5, T))
    skipped = transport.SecureSums(TERMS, too_many, over="memory", skip=True)
    np.testing.assert_array_equal(models(one, transport=skipped), went_on)
    # Begun again without its checkpoint: the same sums, and nothing crosses.
    whole = sums()
    np.testing.assert_array_equal(models(one, transport=whole), went_on)
    assert not whole.crossed
    file.write_text("{}")
    with pytest.raises(ValueError, match="which is none"):
        sums()
    with pytest.raises(ValueError, match="cannot be written"):
        transport.SecureSums(TERMS, journal=tmp_path)
    with pytest.raises(ValueError, match="journal is 3; name a file"):
        transport.SecureSums(TERMS, journal=3)


def test_sums_of_fewer_than_the_noise_is_for_are_refused():
    terms = transport.terms_of(ONE.noise.code, dropouts=3, colluders=1)
    fewer = transport.SecureSums(terms, over="memory")
    with pytest.raises(ValueError, match="sums of 3 of 6 agents.* is for sums of 4 or more"):
        models(ONE, transport=fewer)
    assert not fewer.crossed
    # One that does not say so is stopped by the first such sum, before models move by it.
    with pytest.raises(ValueError, match=r"a sum of 3 agents in round 0 \(from 0\)"):
        models(ONE, transport=lambda message, round: (message[0], np.float32(3)))


def test_terms_for_fewer_colluders_than_the_noise_is_for_are_refused():
    """With the knowledge of more clients than the graph is for, the server opens single vectors."""
    terms = transport.terms_of(ONE.noise.code, dropouts=2, colluders=0)
    sums = transport.SecureSums(terms, over="memory")
    with pytest.raises(ValueError, match="terms for 0 colluders.* noise is for 1.*colluders=1"):
        models(ONE, transport=sums)
    assert not sums.crossed
    with pytest.raises(TypeError, match="colluders"):
        transport.terms_of(ONE.noise.code, dropouts=2)


def test_terms_of_a_plan_with_many_colluders_keep_every_vector_of_a_client_closed():
    """Sixty clients, twenty of whom collude, counted here over all rings."""
    code = dataclasses.replace(ONE.noise.code, clients=60)

    def exposed(colluders):
        """Clients with t or more of twenty colluders among their k neighbours, on average."""
        k, t = transport.terms_of(code, dropouts=2, colluders=colluders).graph(60)[:2]
        near = sum(math.comb(20, x) * math.comb(39, k - x) for x in range(t, k + 1))
        return 40 * near / math.comb(59, k)

    assert exposed(20) < 2**-40
    assert exposed(0) > 1  # The broken copy: terms that assume nobody, as they did by default.


def test_terms_are_those_of_the_noise():
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
    for wrong in ({"terms": None}, {"spent": 4}, {"leaves": 3}, {"limits": 2.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; give"):
            transport.SecureSums(**{"terms": TERMS} | wrong)
    with pytest.raises(ValueError, match="give at least one of"):
        transport.taking_turns(N, 1, ())
    with pytest.raises(ValueError, match="stages is 'late'"):
        transport.taking_turns(N, 1, ("late",))
