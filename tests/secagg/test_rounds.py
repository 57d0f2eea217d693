"""A secure sum is the survivors' sum, whoever leaves when, or an abort; never another number."""

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from dpjax.secagg import primitives  # noqa: E402
from dpjax.secagg.client import Client  # noqa: E402
from dpjax.secagg.messages import Confirmed  # noqa: E402
from dpjax.secagg.server import SumServer, signed  # noqa: E402
from dpjax.secagg.terms import Abort, Rejected, Terms  # noqa: E402
from tests.secagg.rounds import STAGES, Round, Trusting, terms_for, vectors  # noqa: E402


@pytest.mark.parametrize("clients", [3, 4, 5, 12])
@pytest.mark.parametrize(("bits", "bound"), [(8, 9), (13, 200), (32, 10**8), (64, 2**59)])
def test_sum_of_everybody(clients, bits, bound):
    terms = terms_for(clients, bits=bits, bound=bound)
    ctx = Round(terms, vectors(terms))
    total = ctx.run()
    assert total.values.dtype == np.int64 and total.survivors == tuple(range(clients))
    np.testing.assert_array_equal(total.values, ctx.values.sum(axis=0))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clients", [4, 5, 9])
def test_who_leaves_at_stage_is_made_up_for(clients, stage):
    terms = terms_for(clients, dropout=1 / clients + 1e-6)
    for row in range(clients):
        ctx = Round(terms, vectors(terms), leaves={row: stage})
        if clients == 9 or stage in ("mask", "unmask") or clients > 4:
            np.testing.assert_array_equal(ctx.run().values, ctx.want())
            assert len(ctx.survivors()) == clients - (stage != "unmask")
        else:  # Three clients of whom one more could leave
            np.testing.assert_array_equal(ctx.run().values, ctx.want())


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("stage", ["mask", "unmask"])
def test_three_clients_one_of_whom_leaves(row, stage):
    terms = terms_for(3, dropout=0.34)
    ctx = Round(terms, vectors(terms), leaves={row: stage})
    np.testing.assert_array_equal(ctx.run().values, ctx.want())


@pytest.mark.parametrize("adversary", ["semi_honest", "semi_malicious"])
@hypothesis.given(data=st.data())
def test_any_pattern_of_dropouts_gives_sum_or_abort(adversary, data):
    clients = data.draw(st.integers(4, 14))
    dropout = data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    terms = terms_for(clients, dropout=dropout, adversary=adversary, bits=24, bound=1000)
    rows = st.dictionaries(st.integers(0, clients - 1), st.sampled_from(STAGES), max_size=6)
    leaves = data.draw(rows)
    late = data.draw(st.sets(st.integers(0, clients - 1), max_size=2))
    ctx = Round(terms, vectors(terms, clients), leaves, late, seed=data.draw(st.integers(0, 2**32)))
    lost = len(leaves) + len(late - set(leaves))
    try:
        total = ctx.run()
    except Abort:
        # Within the dropouts a round ends in a sum (but for 2^-20).
        assert lost > clients - terms.minimum
        with pytest.raises(Abort):
            ctx.server.total()
    else:
        np.testing.assert_array_equal(total.values, ctx.want())
        assert len(total.survivors) == len(ctx.survivors()) >= terms.minimum


def test_thresholds_of_graph_that_is_not_complete():
    terms = terms_for(40, dropout=0.1, corrupt=0.05)
    assert 2 < terms.graph(40).degree < 39
    leaves = {3: "enrol", 11: "share", 17: "mask", 29: "unmask"}
    ctx = Round(terms, vectors(terms), leaves)
    np.testing.assert_array_equal(ctx.run().values, ctx.want())
    assert len(ctx.survivors()) == 37


@pytest.mark.parametrize(
    ("leaves", "reported"),
    [
        (dict.fromkeys(range(3), "enrol"), "enrolled is 7"),
        (dict.fromkeys(range(3), "share"), "7 clients shared"),
        (dict.fromkeys(range(3), "mask"), "7 clients sent a vector"),
        (dict.fromkeys(range(8), "unmask"), "fewer than the threshold"),
    ],
)
def test_too_many_dropouts_abort_and_say_why(leaves, reported):
    terms = terms_for(10, dropout=0.2)
    ctx = Round(terms, vectors(terms), leaves)
    with pytest.raises(Abort, match=reported):
        ctx.run()
    # It stays so.
    for act in (ctx.server.draw, ctx.server.deliver, ctx.server.request, ctx.server.total):
        with pytest.raises(Abort, match=reported):
            act()
    assert ctx.server.ready and not ctx.server.waiting


def test_wrong_share_of_seed_or_key_aborts():
    for stage, reported in (("nobody", "seed of survivor"), ("mask", "mask key of dropout")):
        terms = terms_for(6, dropout=0.2)
        ctx = Round(terms, vectors(terms), {0: stage} if stage == "mask" else {})
        ctx.step("share", "share", ctx.enrol())
        ctx.step("mask", "mask", ctx.server.deliver())
        requests = ctx.server.request()
        for row, number in ctx.numbers.items():
            if number not in requests:
                continue
            answer = ctx.clients[row].unmask(requests[number])
            field = "keys" if stage == "mask" else "seeds"
            changed = {
                j: share[:-1] + bytes([share[-1] ^ 1])
                for j, share in getattr(answer, field).items()
            }
            ctx.server.accept(number, answer._replace(**{field: changed}))
        with pytest.raises(Abort, match=reported):
            ctx.server.total()


def test_wrongly_masked_vector_is_detected():
    terms = terms_for(5, bits=40)
    ctx = Round(terms, vectors(terms))
    ctx.step("share", "share", ctx.enrol())
    deliveries = ctx.server.deliver()
    for row, number in ctx.numbers.items():
        masked = ctx.clients[row].mask(deliveries[number])
        if row == 2:
            masked = masked._replace(vector=bytes(len(masked.vector)))
        ctx.server.accept(number, masked)
    ctx.step("unmask", "unmask", ctx.server.request())
    with pytest.raises(Abort, match="beyond survivors times bound"):
        ctx.server.total()


def test_client_that_seals_nonsense_is_alone_with_it():
    class Nonsense(Client):
        def share(self, roster):
            shares = super().share(roster)
            return shares._replace(sealed={j: bytes(len(s)) for j, s in shares.sealed.items()})

    terms = terms_for(6, dropout=0.2)
    ctx = Round(terms, vectors(terms))
    ctx.clients[0] = Nonsense(terms, ctx.values[0])
    # Nobody holds its seed: the round ends, and no sum is given.
    with pytest.raises(Abort, match="seed of survivor 0 has 0 shares"):
        ctx.run()


# Messages that do not belong


@pytest.fixture
def masking():
    """A round in which masked vectors are about to come."""
    terms = terms_for(6, dropout=0.2)
    ctx = Round(terms, vectors(terms))
    ctx.step("share", "share", ctx.enrol())
    ctx.deliveries = ctx.server.deliver()
    return ctx


def test_repeated_late_and_foreign_messages_change_nothing(masking):
    server = masking.server
    deliveries = masking.deliveries
    sent = {row: masking.clients[row].mask(deliveries[n]) for row, n in masking.numbers.items()}
    shares = next(m for m in masking.seen if type(m).__name__ == "Shares")
    with pytest.raises(Rejected, match="does not belong"):
        server.accept(0, shares)  # late
    with pytest.raises(Rejected, match="does not belong"):
        server.accept(6, sent[0])  # nobody's number
    with pytest.raises(Rejected, match="enrolment is closed"):
        server.enrol(next(m for m in masking.seen if type(m).__name__ == "Keys"))
    with pytest.raises(Rejected, match="another aggregation"):
        server.accept(0, sent[0]._replace(nonce=bytes(16)))
    with pytest.raises(Rejected, match="vector has"):
        server.accept(0, sent[0]._replace(vector=sent[0].vector[:-1]))
    for row in range(5):
        server.accept(row, sent[row])
        with pytest.raises(Rejected, match="has sent this before"):
            server.accept(row, sent[row])
        with pytest.raises(Rejected, match="has sent this before"):
            server.accept(row, sent[5])
    requests = server.request()
    with pytest.raises(Rejected, match="does not belong"):
        server.accept(5, sent[5])  # late
    for row in range(5):
        answer = masking.clients[row].unmask(requests[row])
        with pytest.raises(Rejected, match="not what was asked"):
            server.accept(row, answer._replace(keys={**answer.keys, (row + 1) % 5: bytes(33)}))
        server.accept(row, answer)
        with pytest.raises(Rejected, match="has sent this before"):
            server.accept(row, answer)
    np.testing.assert_array_equal(server.total().values, masking.values[:5].sum(axis=0))


def test_weak_used_and_foreign_keys_do_not_enrol():
    terms = terms_for(4)
    server = SumServer(terms)
    keys = Client(terms, vectors(terms)[0]).greet(server.hello)
    assert server.enrol(keys) == 0
    other = Client(terms, vectors(terms)[1]).greet(server.hello)
    bad = [
        (keys, "in use"),
        (other._replace(mask=keys.mask), "in use"),
        (other._replace(mask=keys.channel), "in use"),
        (other._replace(mask=other.channel), "in use"),
        (other._replace(mask=bytes(32)), "low order"),
        (other._replace(channel=bytes(32)), "low order"),
        (other._replace(terms=bytes(32)), "other terms"),
        (other._replace(nonce=bytes(16)), "another aggregation"),
    ]
    for message, reported in bad:
        with pytest.raises(Rejected, match=reported):
            server.enrol(message)
    assert server.enrolled == 1 and server.waiting == {1, 2, 3}


# What clients refuse


def asking(clients=6, dropout=0.34, drops=1, **options):
    """A round in which the request is about to come, and who dropped out."""
    terms = terms_for(clients, dropout=dropout, **options)
    ctx = Round(terms, vectors(terms), dict.fromkeys(range(drops), "mask"))
    ctx.step("share", "share", ctx.enrol())
    ctx.step("mask", "mask", ctx.server.deliver())
    return ctx, next(iter(ctx.server.request().values()))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda s, d: (s | d, d), "0 as survivor and as dropout"),
        (lambda s, d: (s, d | {5}), "5 as survivor and as dropout"),
        (lambda s, d: (s - {3}, d | {3}), "leaves this client out"),
        (lambda s, d: (s - {3}, d), "leaves this client out"),
        (lambda s, d: (frozenset({3}), d | s - {3}), "fewer than the minimum 4"),
        (lambda s, d: (s - {1, 2}, d | {1, 2}), "names 3 survivors, fewer than the minimum 4"),
        (lambda s, d: (s, frozenset()), "neighbour 0 is left out"),
        (lambda s, d: (s - {5}, d), "neighbour 5 is left out"),
        (lambda s, d: (s | {99}, d), "names 99, of 6"),
    ],
)
def test_client_refuses_requests_and_is_over(change, reported):
    result, request = asking()
    client = result.clients[3]
    survivors, dropouts = change(request.survivors, request.dropouts)
    with pytest.raises(Abort, match=reported) as caught:
        client.unmask(request._replace(survivors=survivors, dropouts=dropouts))
    assert caught.value.exposed and client.over
    # Nor does it answer the right one any more.
    with pytest.raises(Abort, match="out of order"):
        client.unmask(request)


def test_client_answers_restarted_server_once():
    result, request = asking()
    answer = result.clients[3].unmask(request)
    near = set(result.server._near[3])
    assert set(answer.seeds) == near - {0} and set(answer.keys) == near & {0}
    # Another story of the same aggregation: what a server that came back may ask.
    other = request._replace(survivors=request.survivors - {1}, dropouts=request.dropouts | {1})
    for again in (request, other):
        with pytest.raises(Abort, match="out of order"):
            result.clients[3].unmask(again)
    # Nothing is left that it could say.
    held = vars(result.clients[3])
    assert not held["_shares"] and held["_values"] is None and held["_mask"] == (b"", b"")


def test_client_refuses_messages_out_of_order():
    result, request = asking()
    with pytest.raises(Abort, match="another aggregation"):
        result.clients[3].unmask(request._replace(nonce=bytes(16)))
    terms = terms_for(6)
    client = Client(terms, vectors(terms)[0])
    with pytest.raises(Abort, match="out of order") as caught:
        client.unmask(request)
    assert not caught.value.exposed
    other = SumServer(terms_for(6, bound=999))
    with pytest.raises(Abort, match="terms are not"):
        Client(terms, vectors(terms)[0]).greet(other.hello)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda r: r._replace(enrolled=7), "enrolled is 7"),
        (lambda r: r._replace(enrolled=2), "enrolled is 2"),
        (lambda r: r._replace(number=6), "numbers clients wrongly"),
        (lambda r: r._replace(number=1), "numbers clients wrongly"),
        (lambda r: r._replace(neighbours=dict(list(r.neighbours.items())[1:])), "3 neighbours"),
        (lambda r: r._replace(neighbours=r.neighbours | {1: r.neighbours[2]}), "key twice"),
        (lambda r: r._replace(neighbours=r.neighbours | {1: bytes(32) + b"x" * 32}), "low order"),
    ],
)
def test_client_refuses_roster_that_its_terms_do_not_give(change, reported):
    terms = terms_for(6, dropout=0.34)
    ctx = Round(terms, vectors(terms))
    roster = ctx.enrol()[0]
    with pytest.raises(Abort, match=reported):
        ctx.clients[0].share(change(roster))


def test_client_refuses_delivery_of_strangers_or_of_too_few(masking):
    delivery = masking.deliveries[0]
    sealed = next(iter(delivery.sealed.values()))
    with pytest.raises(Abort, match="no neighbour"):
        masking.clients[0].mask(delivery._replace(sealed={**delivery.sealed, 0: sealed}))
    with pytest.raises(Abort, match="fewer than the threshold"):
        masking.clients[1].mask(delivery._replace(sealed={0: sealed}))
    assert not masking.clients[1].exposed


# Values and terms


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ([1.0] * 5, "values are float64"),
        ([1] * 4, "values are int64"),
        ([0, 0, 1001, 0, 0], "values hold 1001 at entry 2, beyond bound 1000"),
        ([0, 0, 0, -1001, 0], "values hold -1001 at entry 3"),
        ([True] * 5, "values are bool"),
    ],
)
def test_values_beyond_terms_are_refused(values, reported):
    with pytest.raises(ValueError, match=reported):
        Client(terms_for(3), np.asarray(values))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"clients": 2}, "clients is 2"),
        ({"length": 0}, "length is 0"),
        ({"bits": 65}, "bits is 65"),
        ({"bound": 0}, "bound is 0"),
        ({"bits": 8, "bound": 43}, "bound is 43, and a sum of 3 entries may reach 129"),
        ({"corrupt": 0.34, "dropout": 0.34}, "too many"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"adversary": "malicious"}, "adversary is 'malicious'"),
    ],
)
def test_terms_that_cannot_hold_are_refused(change, reported):
    with pytest.raises(ValueError, match=reported):
        terms_for(**({"clients": 3} | change))
    assert terms_for(3, bits=8, bound=42).minimum == 3


def test_terms_differ_by_their_digest():
    base = terms_for(6)
    others = [
        terms_for(7), terms_for(6, length=6), terms_for(6, bits=33), terms_for(6, bound=999),
        terms_for(6, corrupt=0.17), terms_for(6, dropout=0.17),
        terms_for(6, adversary="semi_malicious"),
    ]  # fmt: skip
    assert len({case.digest() for case in [base, *others]}) == 8
    assert base.digest() == terms_for(6, dropout=0).digest()


def test_residues_are_whole_numbers_around_zero():
    for bits in (2, 7, 32, 64):
        ends = [0, 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1]
        want = [0, 1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), -1]
        assert signed(np.array(ends, np.uint64), bits).tolist() == want


@pytest.mark.parametrize(("bits", "dtype"), [(11, np.uint32), (32, np.uint32), (64, np.uint64)])
def test_without_bound_sums_are_modulo_modulus(bits, dtype):
    terms = terms_for(5, bits=bits, bound=None, dropout=0.2)
    values = np.random.default_rng(bits).integers(0, 2**bits, (5, 5), dtype, endpoint=False)
    values[:, 0] = 2**bits - 1
    ctx = Round(terms, values, {3: "mask"})
    want = [sum(int(values[row, index]) for row in (0, 1, 2, 4)) % 2**bits for index in range(5)]
    total = ctx.run().values
    assert [int(item) % 2**bits for item in total] == want
    assert (total >= -(2 ** (bits - 1))).all() and int(total.max()) < 2 ** (bits - 1)
    assert int(total[0]) == -4
    if bits < 64:
        with pytest.raises(ValueError, match=rf"beyond 0 to {2**bits - 1}; give them modulo"):
            Client(terms, np.full(5, 2**bits))
    with pytest.raises(ValueError, match="values hold -1 at entry 0"):
        Client(terms, np.full(5, -1))


# Broken twins


@pytest.mark.mutant
def test_sum_beyond_its_modulus_is_refused():
    class Unchecked(Terms):
        def _fits(self, bound):
            return True

    options = {"clients": 4, "length": 1, "bits": 8, "bound": 100, "corrupt": 0.0, "dropout": 0.0}
    with pytest.raises(ValueError, match="may reach 400, beyond the 127"):
        Terms(**options)
    total = Round(Unchecked(**options), np.full((4, 1), 100)).run()
    assert total.values[0] == 400 - 512  # the twin wraps around without a word


class Gullible(Client):
    """Answers whatever it is asked, as often as it is asked."""

    def _refuse(self, request):
        self._stage = "unmask"

    def _forget(self):
        pass

    def _enter(self, stage, nonce=None):
        self._stage = stage


def opened(client):
    """The vector of client 5 as a server that lies while unmasking reads it; None if it cannot."""
    terms = terms_for(6, dropout=0.34)
    ctx = Round(terms, vectors(terms), client=client)
    ctx.step("share", "share", ctx.enrol())
    deliveries = ctx.server.deliver()
    sent = {i: ctx.clients[i].mask(deliveries[i]) for i in range(6)}
    for i in range(6):
        ctx.server.accept(i, sent[i])
    request = ctx.server.request()[0]
    pair = request._replace(dropouts=frozenset({5}))
    seeds = {}
    keys = {}
    for i in range(5):
        try:
            answer = ctx.clients[i].unmask(pair)
        except Abort:
            continue
        if i in ctx.server._near[5]:
            seeds[i] = answer.seeds
            keys[i] = answer.keys
    if len(seeds) < ctx.server.graph.threshold:
        return None
    server = ctx.server
    seed = server._rebuilt("seed", seeds, 5)
    private = server._rebuilt("key", keys, 5)
    vector = primitives.unpacked_vector(sent[5].vector, terms.length, terms.bits)
    pair_keys = server._pair_keys(5, private, list(server._near[5]))
    vector = vector - primitives.expand(
        primitives.self_key(seed, 5, server._session), terms.length, 32
    )
    lifted = {j: primitives.expand(key, terms.length, 32) for j, key in pair_keys.items()}
    for j, mask in lifted.items():
        vector = vector - mask if j > 5 else vector + mask
    return signed(vector & primitives.low_bits(32), 32), ctx.values[5]


@pytest.mark.mutant
def test_request_naming_client_twice_opens_nobody():
    assert opened(Client) is None
    read, true = opened(Gullible)
    np.testing.assert_array_equal(read, true)


def test_differing_requests_open_both_secrets_below_thresholds():
    """Half of the neighbours hear that 0 dropped out, half that it survived."""
    for adversary, opens in (("semi_honest", True), ("semi_malicious", False)):
        terms = terms_for(8, dropout=0.25, adversary=adversary)
        ctx = Round(terms, vectors(terms), client=Trusting)
        ctx.step("share", "share", ctx.enrol())
        ctx.step("mask", "mask", ctx.server.deliver())
        request = ctx.server.request()[0]
        other = request._replace(survivors=request.survivors - {0}, dropouts=request.dropouts | {0})
        near = [i for i in range(1, 8) if i in ctx.server._near[0]]
        half = len(near) // 2
        requests = {i: request if index < half else other for index, i in enumerate(near)}
        if not opens:  # The thresholds by themselves: clients that do not compare.
            for i in near:
                ctx.clients[i].confirm(requests[i])
                requests[i] = Confirmed(request.nonce, {})
        answers = [ctx.clients[i].unmask(requests[i]) for i in near]
        seeds = sum(0 in answer.seeds for answer in answers)
        keys = sum(0 in answer.keys for answer in answers)
        assert seeds + keys == len(near)  # one of the two from each
        threshold = ctx.server.graph.threshold
        assert (min(seeds, keys) >= threshold) is opens


def test_secrets_are_drawn_anew_for_every_aggregation():
    terms = terms_for(3)
    clients = [Client(terms, vectors(terms)[0]) for _ in range(4)]
    drawn = [c for client in clients for c in (*client._channel, *client._mask, client._seed)]
    assert len(set(drawn)) == 20
    hellos = {SumServer(terms).hello.nonce for _ in range(4)}
    assert len(hellos) == 4
    assert primitives.key_pair() != primitives.key_pair()


def test_masked_vector_is_uniform_over_aggregations():
    terms = terms_for(3, length=2048, bits=8, bound=1)
    values = np.zeros((3, 2048), np.int64)
    counts = np.zeros(256)
    for _ in range(4):
        ctx = Round(terms, values)
        ctx.run()
        sent = next(m for m in ctx.seen if type(m).__name__ == "MaskedVector")
        counts += np.bincount(np.frombuffer(sent.vector, np.uint8), minlength=256)
    from scipy import stats

    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.slow
def test_thousand_rounds_with_dropouts_at_all_stages():
    """At least 999 of 1,000 rounds within the stated dropouts finish, each with the exact sum."""
    terms = terms_for(20, dropout=0.15, corrupt=0.1, length=16)
    drawn = np.random.default_rng(0)
    finished = 0
    for index in range(1000):
        rows = drawn.choice(20, drawn.integers(0, 4), replace=False)
        leaves = {int(row): str(drawn.choice(STAGES)) for row in rows}
        ctx = Round(terms, vectors(terms, index), leaves, seed=index)
        try:
            total = ctx.run()
        except Abort:
            continue
        np.testing.assert_array_equal(total.values, ctx.want())
        finished += 1
    assert finished >= 999


@pytest.mark.slow
def test_thousand_clients_of_4096_entries():
    terms = terms_for(1000, length=4096, bits=32, bound=2**20, corrupt=0.05, dropout=0.05)
    assert terms.graph(1000)[:2] == (30, 17)
    rows = np.random.default_rng(1).choice(1000, 50, replace=False)
    leaves = {int(row): STAGES[index % 4] for index, row in enumerate(rows)}
    ctx = Round(terms, vectors(terms), leaves)
    total = ctx.run()
    np.testing.assert_array_equal(total.values, ctx.want())
    assert len(total.survivors) == 1000 - sum(stage != "unmask" for stage in leaves.values())
