"""The server's whole view, enumerated: it depends on honest inputs through their sum alone.

The generator is replaced by uniform masks: every key that is expanded gets a coordinate of its own,
and the vectors' entries run over all values of all coordinates at once. So the entries of what the
server sees, together, are its view's exact distribution. Shares are the protocol's own, and stand
for ideal ones: fewer than the threshold say nothing (tests/secagg/test_shamir.py).
"""

import itertools

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.secagg import primitives  # noqa: E402
from dpjax.secagg.terms import Terms  # noqa: E402
from tests.secagg.rounds import Round  # noqa: E402


class Free(Terms):
    """Terms of a modulus that sums may exceed: all that matters here is modulo 2^b."""

    def _fits(self, bound):
        return True


class Masks:
    """Uniform masks in place of the generator: a coordinate of the product space for every key."""

    def __init__(self, coordinates, bits, zero=()):
        self.size = 2 ** (bits * coordinates)
        self.bits = bits
        self.coordinates = coordinates
        self.known = {}
        self.zero = zero
        self.asked = []

    def expand(self, key, length, bits):
        assert length == self.size and bits == self.bits
        self.asked.append(key)
        if key in self.zero:
            return np.zeros(length, np.uint64)
        place = self.known.setdefault(key, len(self.known))
        assert place < self.coordinates
        entries = np.arange(length, dtype=np.uint64)
        return (entries >> np.uint64(bits * place)) & primitives.low_bits(bits)


def view(monkeypatch, clients, bits, inputs, leaves=None, late=(), self_masks=True):
    """Every value of the view and how often it comes, over all masks; and the sum's survivors.

    The view is: masked vectors, those that came late too, and all masks that the server rebuilds.
    """
    coordinates = clients * (clients - 1) // 2 + (clients if self_masks else 0)
    zero: set = set()
    source = Masks(coordinates, bits, zero)
    monkeypatch.setattr(primitives, "expand", source.expand)
    if not self_masks:
        true_key = primitives.self_key

        def none(*arguments):
            key = true_key(*arguments)
            zero.add(key)
            return key

        monkeypatch.setattr(primitives, "self_key", none)
    terms = Free(clients, source.size, bits, 2**bits, 0.0, 1 / clients + 1e-9)
    values = np.repeat(np.asarray(inputs)[:, None], source.size, axis=1)
    ctx = Round(terms, values, leaves, late)
    ctx.step("share", "share", ctx.enrol())
    ctx.step("mask", "mask", ctx.server.deliver())
    ctx.step("unmask", "unmask", ctx.server.request())
    source.asked.clear()
    total = ctx.server.total()
    modulus = 2**bits
    want = sum(inputs[row] for row in ctx.survivors()) % modulus
    assert (total.values % modulus == want).all()
    sent = [m.vector for m in ctx.seen if type(m).__name__ == "MaskedVector"]
    parts = [primitives.unpacked_vector(vector, source.size, bits) for vector in sent]
    rebuilt = list(dict.fromkeys(source.asked))
    parts += [source.expand(key, source.size, bits) for key in rebuilt]
    code = np.zeros(source.size, np.uint64)
    for part in parts:
        code = code * np.uint64(modulus) + part
    monkeypatch.undo()
    return len(sent), len(rebuilt), np.unique(code, return_counts=True)


def same(value, second):
    return (
        value[:2] == second[:2]
        and np.array_equal(value[2][0], second[2][0])
        and np.array_equal(value[2][1], second[2][1])
    )


THREE = [(0, 0, 0), (1, 7, 0), (3, 6, 7), (4, 4, 0), (2, 5, 1)]
"""Inputs modulo 8 with the same sum."""
FOUR = [(0, 0, 0, 0), (1, 1, 1, 1), (3, 2, 2, 1)]
"""Inputs modulo 4 with the same sum."""


@pytest.mark.parametrize(("bits", "inputs"), [(3, THREE), (2, FOUR)])
def test_inputs_of_equal_sum_have_equal_views(monkeypatch, bits, inputs):
    clients = len(inputs[0])
    views = [view(monkeypatch, clients, bits, item) for item in inputs]
    assert views[0][:2] == (clients, clients)  # every vector, every self mask
    assert all(same(views[0], value) for value in views[1:])
    # The test has power: another sum gives another view.
    other = view(monkeypatch, clients, bits, (*inputs[0][:-1], 1))
    assert not same(views[0], other)


# Client 2, or 3, drops out: its vector never comes, or comes late and is seen all the same.
LAST = {
    3: [(0, 0, 0), (1, 7, 0), (5, 3, 4), (2, 6, 7)],
    4: [(0, 0, 0, 0), (1, 3, 0, 2), (3, 3, 2, 3)],
}


@pytest.mark.parametrize(
    ("clients", "bits", "late"),
    [
        (3, 3, False),
        (4, 2, True),
        pytest.param(3, 3, True, marks=pytest.mark.slow),
        pytest.param(4, 2, False, marks=pytest.mark.slow),
    ],
)
def test_late_dropout_reveals_nothing_of_its_input(monkeypatch, clients, bits, late):
    lost = clients - 1
    options = {"late": {lost}} if late else {"leaves": {lost: "mask"}}
    views = [view(monkeypatch, clients, bits, item, **options) for item in LAST[clients]]
    # Vectors; self masks of survivors and the dropout's masks with them.
    assert views[0][:2] == (clients - 1 + late, 2 * (clients - 1))
    assert all(same(views[0], value) for value in views[1:])


@pytest.mark.mutant
@pytest.mark.parametrize(("clients", "bits"), [(3, 3), (4, 2)])
def test_without_self_masks_late_vector_is_read(monkeypatch, clients, bits):
    lost = clients - 1
    zeros = (0,) * clients
    views = [
        view(monkeypatch, clients, bits, case, late={lost}, self_masks=False)
        for case in (zeros, (*zeros[:-1], 1))
    ]
    assert not same(*views)
    # Where nobody is late the twin passes, which is why this is the case to look at.
    fine = [
        view(monkeypatch, clients, bits, item, leaves={lost: "mask"}, self_masks=False)
        for item in LAST[clients]
    ]
    assert all(same(fine[0], value) for value in fine[1:])


def test_all_inputs_of_three_clients_modulo_4(monkeypatch):
    results: dict = {}
    for inputs in itertools.product(range(4), repeat=3):
        results.setdefault(sum(inputs) % 4, []).append(view(monkeypatch, 3, 2, inputs))
    assert [len(results[total]) for total in range(4)] == [16] * 4
    for item, second in itertools.combinations(range(4), 2):
        assert not same(results[item][0], results[second][0])
    for views in results.values():
        assert all(same(views[0], value) for value in views[1:])
