"""Participation patterns."""

import pytest

from dpjax.mechanism.participation import Participation


def test_patterns() -> None:
    assert Participation(7, 3, 2).patterns.tolist() == [[0, 2, 4], [1, 3, 5], [2, 4, 6]]
    assert Participation(5, 1, 5).starts == 5
    assert Participation(5, 5, 1).patterns.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((6, 3, 3), "need 7 rounds"), ((0, 1, 1), "rounds is 0"), ((5, 1.0, 1), "epochs is 1.0")],
)
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Participation(*arguments)
