"""A server that tells clients different dropout sets cannot unmask a single client."""

import copy
import functools
import itertools

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.secagg import primitives  # noqa: E402
from dpjax.secagg.client import Client, request_digest  # noqa: E402
from dpjax.secagg.messages import Confirmed, MaskedVector, Request  # noqa: E402
from dpjax.secagg.terms import Abort, Rejected  # noqa: E402
from tests.secagg.rounds import ALL_STAGES, Round, Trusting, terms_for, vectors  # noqa: E402

TERMS = terms_for(100, dropout=0.2, length=3, adversary="semi_malicious")


def chosen_dropouts(near, target, spare, threshold):
    """Dropouts of each client's request: neighbours of the target, so many of each that its key
    comes out, and no more than may be missing. None where there are no such requests.
    """
    lacking = dict.fromkeys(near[target], threshold)
    left = {}
    for client in range(len(near)):
        reference = [j for j in near[client] if lacking.get(j, 0) > 0 and client != target]
        left[client] = set(sorted(reference, key=lambda j: -lacking[j])[:spare])
        for j in left[client]:
            lacking[j] -= 1
    return None if any(lacking[j] > 0 for j in lacking) else left


def answered(round, left):
    """What clients answer to these dropout sets, all confirmations handed on; and why not."""
    server = round.server
    clients = round.clients
    everybody = frozenset(range(len(clients)))
    text = {}
    answers = {}
    reasons = []
    for number, client in enumerate(clients):
        gone = frozenset(left[number])
        try:
            text[number] = client.confirm(Request(server.hello.nonce, everybody - gone, gone))
        except Abort as abort:  # Who is told of its own death says nothing.
            reasons.append(abort.reason)
    for number in text:
        # The server hands on all that this client takes.
        near = set(server._near[number]) - set(left[number])
        came = {
            j: text[j].confirmations[number]
            for j in near
            if number in getattr(text.get(j), "confirmations", ())
        }
        try:
            answers[number] = clients[number].unmask(Confirmed(server.hello.nonce, came))
        except Abort as abort:
            reasons.append(abort.reason)
    return answers, reasons


def opened(round, target, left):
    """The target's vector as the server computes it from what clients answer; `Abort` if not."""
    server = round.server
    threshold = round.server.graph.threshold
    answers, _ = answered(round, left)

    def rebuilt(kind, owner):
        near = [j for j in server._near[owner] if j in answers]
        text = {j + 1: getattr(answers[j], kind) for j in near}
        shares = {
            x: int.from_bytes(item[owner], "big") for x, item in text.items() if owner in item
        }
        if len(shares) < threshold:
            raise Abort(f"{kind} of {owner} has {len(shares)} shares")
        return primitives.join_shares(dict(list(shares.items())[:threshold])).to_bytes(32, "big")

    terms = server.terms
    session = server._session
    sent = [value for value in round.seen if isinstance(value, MaskedVector)][target]
    total = primitives.unpacked_vector(sent.vector, terms.length, terms.bits)
    own = primitives.self_key(rebuilt("seeds", target), target, session)
    total = total - primitives.expand(own, terms.length, terms.bits)
    for j in server._near[target]:
        keys = server._pair_keys(j, rebuilt("keys", j), [target])
        total = primitives.with_pair_masks(total, keys, j, terms.bits)
    return (total & primitives.low_bits(terms.bits)).astype(np.uint32).view(np.int32)


@functools.cache
def made(client):
    """A round up to the vectors under their masks."""
    ctx = Round(TERMS, vectors(TERMS), seed=1, client=client)
    ctx.step("share", "share", ctx.enrol())
    ctx.step("mask", "mask", ctx.server.deliver())
    return ctx


def masked(client=Client):
    """The same round, whose clients have answered nothing yet."""
    return copy.deepcopy(made(client))


def many(value, target):
    """Dropout sets that each client must believe, by which the server would read the target."""
    graph = value.server.graph
    spare = TERMS.clients - TERMS.minimum
    assert graph.degree < TERMS.clients - 1 and 2 * graph.threshold > graph.degree
    left = chosen_dropouts(value.server._near, target, spare, graph.threshold)
    assert left is not None and max(map(len, left.values())) <= spare
    return left


def test_server_with_many_dropout_sets_gets_no_answer():
    mask = masked()
    target = 7
    left = many(mask, target)
    with pytest.raises(Abort, match="seeds of 7 has 0 shares"):
        opened(mask, target, left)
    answers, reasons = answered(masked(), left)
    # Whoever is far from the target was told alike, and answers: of its vector nothing.
    assert answers and not set(answers) & {target, *mask.server._near[target]}
    assert any("fewer than the threshold 20" in reason for reason in reasons)
    assert all(client.over for client in mask.clients) and mask.clients[target].exposed


@pytest.mark.mutant
def test_copy_that_does_not_compare_is_read():
    mask = masked(Trusting)
    target = 7
    np.testing.assert_array_equal(opened(mask, target, many(mask, target)), mask.values[target])


def test_with_one_dropout_set_for_all_it_opens_none():
    mask = masked()
    target = 7
    graph = mask.server.graph
    gone = mask.server._near[target][: graph.degree - graph.threshold]
    assert 0 < len(gone) <= TERMS.clients - TERMS.minimum
    left = dict.fromkeys(range(TERMS.clients), gone)
    with pytest.raises(Abort, match="keys of"):
        opened(mask, target, left)
    assert len(answered(masked(), left)[0]) == TERMS.clients - len(gone)


# The rule by itself: every dropout set for every client, no ciphers


def shown(near, corrupt, left, threshold, confirmations):
    """Honest clients whose key comes out though they answer, and those opened alone.

    Args:
        near: Neighbours of everybody.
        corrupt: Who confirms anything and gives everything.
        left: Whom each honest client is told have left; None is told nothing.
        threshold: Shares that rebuild a secret.
        confirmations: How many of the same request a client asks for.
    """
    honest = [i for i in range(len(near)) if i not in corrupt]
    reported = {i: left[i] for i in honest if left[i] is not None and i not in left[i]}
    answers = {
        i for i, gone in reported.items()
        if sum(j not in gone and (j in corrupt or reported.get(j) == gone) for j in near[i])
        >= confirmations
    }  # fmt: skip

    def rebuilt(owner, dead):
        return threshold <= sum(
            j in corrupt or (j in answers and (owner in reported[j]) is dead) for j in near[owner]
        )

    keys = {i for i in honest if rebuilt(i, True)}
    seeds = {i for i in honest if rebuilt(i, False)}
    overlap = keys & (seeds | answers)
    reference = keys | set(corrupt)
    return overlap, {i for i in seeds if i in keys or set(near[i]) <= reference}


def harary(clients, degree):
    steps = [s for s in range(-(degree // 2), degree // 2 + 1) if s]
    return [sorted((i + s) % clients for s in steps) for i in range(clients)]


@pytest.mark.parametrize(
    ("clients", "degree", "corrupt", "threshold", "dropouts"),
    [(5, 4, (), 3, 1), (5, 4, (2,), 3, 2), (6, 2, (), 2, 1), (4, 2, (), 2, 2)],
)
def test_no_dropout_sets_at_all_open_vector_alone(clients, degree, corrupt, threshold, dropouts):
    near = harary(clients, degree)
    maximum = max(len(set(item) & set(corrupt)) for item in near)
    assert 2 * threshold > degree + maximum
    sets = [
        frozenset(subset)
        for count in range(dropouts + 1)
        for subset in itertools.combinations(range(clients), count)
    ]
    results = {lowest: [0, 0] for lowest in (threshold, degree + maximum - threshold, 0)}
    choices = [
        [None] if i in corrupt else [None, *(value for value in sets if i not in value)]
        for i in range(clients)
    ]
    entries = list(itertools.product(*choices))
    rng = np.random.default_rng(clients)
    picked = (
        entries
        if len(entries) < 12000
        else [entries[i] for i in rng.integers(0, len(entries), 12000)]
    )
    for left in picked:
        for minimum, counts in results.items():
            pair, single = shown(near, corrupt, left, threshold, minimum)
            counts[0] += bool(pair)
            counts[1] += bool(single)
    assert results[threshold] == [0, 0]
    # The search has power: without enough confirmations keys come out of clients that answer.
    if dropouts < 2 or corrupt:
        assert results[0][0]
    if corrupt:
        assert results[degree + maximum - threshold][0]


# Confirmations that are wrong

SMALL = terms_for(6, dropout=0.34, adversary="semi_malicious")


@functools.cache
def confirmed():
    """Six clients, one of whom left with its vector: requests, and what the server hands on."""
    ctx = Round(SMALL, vectors(SMALL), {0: "mask"}, seed=1)
    ctx.step("share", "share", ctx.enrol())
    ctx.step("mask", "mask", ctx.server.deliver())
    requests = ctx.server.request()
    before = copy.deepcopy(ctx)
    ctx.step("confirm", "confirm", requests)
    text = dict(ctx.server.came)
    return before, requests, text, ctx, ctx.server.relay()


def changed(cipher):
    return cipher[:-1] + bytes([cipher[-1] ^ 1])


def test_client_takes_as_many_confirmations_as_threshold():
    single, relayed = confirmed()[3:]
    threshold = SMALL.graph(6).threshold
    message = relayed[1]
    assert threshold == 3 and sorted(message.confirmations) == [2, 3, 4, 5]
    for count in range(5):
        client = copy.deepcopy(single.clients[1])
        few = message._replace(confirmations=dict(list(message.confirmations.items())[:count]))
        if count >= threshold:
            assert set(client.unmask(few).keys) == {0}
            with pytest.raises(Abort, match="out of order"):
                client.unmask(message)
        else:
            with pytest.raises(Abort, match=f"{count} neighbours confirmed"):
                client.unmask(few)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda s: {j: changed(item) for j, item in s.items()}, "0 neighbours confirmed"),
        (lambda s: {j: s[5 if j == 2 else j - 1] for j in s}, "0 neighbours confirmed"),
        (lambda s: {j: s[2] for j in s}, "1 neighbours confirmed"),  # one for many
        (lambda s: {**s, 0: s[2]}, "name 0, who is no surviving neighbour"),
        (lambda s: {**s, 1: s[2]}, "name 1, who is no surviving neighbour"),
    ],
)
def test_confirmations_that_are_none_do_not_count(change, reported):
    single, relayed = confirmed()[3:]
    client = copy.deepcopy(single.clients[1])
    with pytest.raises(Abort, match=reported) as caught:
        client.unmask(relayed[1]._replace(confirmations=change(relayed[1].confirmations)))
    assert caught.value.exposed and client.over and not client._shares


def test_message_opens_for_its_receiver_alone():
    text, single, relayed = confirmed()[2:]
    client = copy.deepcopy(single.clients[1])
    confirmations = text[1].confirmations  # its own confirmations, given back to it
    with pytest.raises(Abort, match="0 neighbours confirmed"):
        client.unmask(relayed[1]._replace(confirmations=confirmations))
    sealed = [
        confirmation for message in text.values() for confirmation in message.confirmations.values()
    ]
    assert len(set(sealed)) == len(sealed) == 20


def test_client_confirms_once_and_answers_no_request_without():
    before, requests = confirmed()[:2]
    duplicate = copy.deepcopy(before)
    duplicate.clients[1].confirm(requests[1])
    with pytest.raises(Abort, match="out of order"):
        duplicate.clients[1].confirm(requests[1])
    with pytest.raises(Abort, match="out of order"):
        duplicate.clients[2].unmask(requests[2])
    duplicate.clients[3].confirm(requests[3])
    with pytest.raises(Abort, match="in place of what the neighbours confirmed"):
        duplicate.clients[3].unmask(requests[3])
    with pytest.raises(Abort, match="leaves this client out"):
        gone = requests[4].survivors - {4}
        duplicate.clients[4].confirm(
            requests[4]._replace(survivors=gone, dropouts=frozenset({0, 4}))
        )
    # Where there is no such stage, nothing of it is taken.
    terms = terms_for(6, dropout=0.17)
    plain = Round(terms, vectors(terms), seed=1)
    plain.step("share", "share", plain.enrol())
    plain.step("mask", "mask", plain.server.deliver())
    request = plain.server.request()[0]
    with pytest.raises(Abort, match="message for the stage confirm"):
        plain.clients[0].confirm(request)
    with pytest.raises(Abort, match="these terms have none"):
        plain.clients[1].unmask(Confirmed(request.nonce, {}))


def test_server_takes_one_confirmation_neighbour():
    before, requests = confirmed()[:2]
    duplicate = copy.deepcopy(before)
    text = {i: duplicate.clients[i].confirm(requests[i]) for i in requests}
    server = duplicate.server
    some = dict(list(text[1].confirmations.items())[1:])
    for invalid in (some, {**some, 0: b"c" * 48}):
        with pytest.raises(Rejected, match="not for its neighbours"):
            server.accept(1, text[1]._replace(confirmations=invalid))
    with pytest.raises(Rejected, match="another aggregation"):
        server.accept(1, text[1]._replace(nonce=bytes(16)))
    for i in (1, 2, 3, 4):
        server.accept(i, text[i])
    with pytest.raises(Rejected, match="sent this before"):
        server.accept(1, text[1])
    relayed = server.relay()
    assert set(relayed) == {1, 2, 3, 4} and set(relayed[1].confirmations) == {2, 3, 4}
    with pytest.raises(Rejected, match="Confirm of client 5"):
        server.accept(5, text[5])
    for i in relayed:
        server.accept(i, duplicate.clients[i].unmask(relayed[i]))
    # Who left while confirming has its vector in the sum.
    total = server.total()
    assert total.survivors == (1, 2, 3, 4, 5)
    np.testing.assert_array_equal(total.values, duplicate.values[1:].sum(axis=0))


def test_requests_have_one_digest_each():
    def named(survivors, dropouts, nonce=b"n" * 16, session=b"s" * 32):
        return request_digest(Request(nonce, frozenset(survivors), frozenset(dropouts)), session)

    observed = [
        named({0, 1}, {2}), named({0, 1, 2}, {}), named({0, 1}, {}), named({0}, {1, 2}),
        named({0, 1}, {2}, nonce=b"m" * 16), named({0, 1}, {2}, session=b"t" * 32),
    ]  # fmt: skip
    assert len(set(observed)) == 6 and named([1, 0], [2]) == observed[0]


# Rounds


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_who_leaves_at_stage_is_made_up_for(stage):
    terms = terms_for(8, dropout=0.25, adversary="semi_malicious")
    for rows in ((0,), (2, 5), (6, 7)):
        ctx = Round(terms, vectors(terms), dict.fromkeys(rows, stage))
        np.testing.assert_array_equal(ctx.run().values, ctx.want())
        late = stage in ("confirm", "unmask")
        assert len(ctx.survivors()) == 8 - len(rows) * (not late) and not ctx.aborted


def held(rounds):
    """How many rounds of 20 clients, up to 3 of whom leave, at any stages, end in the sum."""
    terms = terms_for(20, dropout=0.15, corrupt=0.1, length=16, adversary="semi_malicious")
    drawn = np.random.default_rng(0)
    finished = 0
    for index in range(rounds):
        rows = drawn.choice(20, drawn.integers(0, 4), replace=False)
        leaves = {int(row): str(drawn.choice(ALL_STAGES)) for row in rows}
        ctx = Round(terms, vectors(terms, index), leaves, seed=index)
        try:
            total = ctx.run()
        except Abort:
            continue
        np.testing.assert_array_equal(total.values, ctx.want())
        finished += 1
    return finished


def test_rounds_with_dropouts_at_all_stages_end_in_sum():
    assert held(20) == 20


@pytest.mark.slow
def test_thousand_rounds_with_dropouts_at_all_stages():
    assert held(1000) >= 999
