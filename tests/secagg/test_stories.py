"""What a server reads that tells different clients different stories: thresholds do not stop it."""

import contextlib
import copy
import functools

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.secagg import masks, pairs, shamir  # noqa: E402
from dpjax.secagg.messages import Masked, Request  # noqa: E402
from dpjax.secagg.terms import Abort  # noqa: E402
from tests.secagg.rounds import Round, terms_for, vectors  # noqa: E402

TERMS = terms_for(100, dropout=0.2, length=3, adversary="semi_malicious")


def stories(near, target, spare, threshold):
    """Whom every client is told have left: neighbours of the target, so many of each that its key
    comes out, and no more than may be missing. None where there are no such stories.
    """
    lacking = dict.fromkeys(near[target], threshold)
    left = {}
    for client in range(len(near)):
        known = [j for j in near[client] if lacking.get(j, 0) > 0 and client != target]
        left[client] = set(sorted(known, key=lambda j: -lacking[j])[:spare])
        for j in left[client]:
            lacking[j] -= 1
    return None if any(lacking[j] > 0 for j in lacking) else left


def opened(round, target, left):
    """The target's vector as the server computes it from what clients answer; `Abort` if not."""
    server, clients, threshold = round.server, round.clients, round.server.graph.threshold
    everybody = frozenset(range(len(clients)))
    answers = {}
    for number, client in enumerate(clients):
        gone = frozenset(left[number])
        with contextlib.suppress(Abort):  # Who is told of its own death says nothing.
            answers[number] = client.unmask(Request(server.hello.nonce, everybody - gone, gone))

    def rebuilt(kind, owner):
        near = [j for j in server._near[owner] if j in answers]
        said = {j + 1: getattr(answers[j], kind) for j in near}
        shares = {
            x: int.from_bytes(each[owner], "big") for x, each in said.items() if owner in each
        }
        if len(shares) < threshold:
            raise Abort(f"{kind} of {owner} has {len(shares)} shares")
        return shamir.join(dict(list(shares.items())[:threshold])).to_bytes(32, "big")

    terms, session = server.terms, server._session
    sent = [each for each in round.seen if isinstance(each, Masked)][target]
    total = masks.unpacked(sent.vector, terms.length, terms.bits)
    own = pairs.self_key(rebuilt("seeds", target), target, session)
    total = total - masks.expand(own, terms.length, terms.bits)
    for j in server._near[target]:
        keys = server._pair_keys(j, rebuilt("keys", j), [target])
        total = masks.combined(total, keys, j, terms.bits)
    return (total & masks.low_bits(terms.bits)).astype(np.uint32).view(np.int32)


@functools.cache
def made():
    """A round up to the vectors under their masks."""
    one = Round(TERMS, vectors(TERMS), seed=1)
    one.step("share", "share", one.enrol())
    one.step("mask", "mask", one.server.deliver())
    return one


def masked():
    """The same round, whose clients have answered nothing yet."""
    return copy.deepcopy(made())


def test_a_server_with_many_stories_opens_one_vector():
    """Its documented limit: each story is one that a client must believe, and nobody compares."""
    one, target = masked(), 7
    graph, spare = one.server.graph, TERMS.clients - TERMS.minimum
    assert graph.degree < TERMS.clients - 1 and 2 * graph.threshold > graph.degree
    left = stories(one.server._near, target, spare, graph.threshold)
    assert left is not None and max(map(len, left.values())) <= spare
    np.testing.assert_array_equal(opened(one, target, left), one.values[target])


def test_with_one_story_for_all_it_opens_none():
    one, target = masked(), 7
    graph = one.server.graph
    gone = one.server._near[target][: graph.degree - graph.threshold]
    assert 0 < len(gone) <= TERMS.clients - TERMS.minimum
    with pytest.raises(Abort, match="keys of"):
        opened(one, target, dict.fromkeys(range(TERMS.clients), gone))
