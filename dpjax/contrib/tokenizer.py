"""RoBERTa's tokenizer: byte-level pairs, from the public files."""

import functools
import gzip
import importlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Int

from dpjax import _files, _validate

__all__ = ["END", "PADDING", "START", "Tokenizer", "load"]

START = 0
PADDING = 1
END = 2
"""What a text begins with, is filled up with, and ends with; 3 stands for the unknown."""

_FIRST = 4

_UNUSED = re.compile(r"<\|endoftext\|>|madeupword\d+")
"""Tokens that no text has: GPT-2's end, and those that fill up the list of numbers."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Texts to RoBERTa's tokens and back.

    Every text has tokens, whatever its bytes, and none of them is a special one: a text that spells
    ``</s>`` gets its letters.

    Attributes:
        vocabulary: From tokens, spelt in the alphabet of bytes, to their numbers, from 4.
        merges: Pairs that are joined, first ones first.
    """

    vocabulary: dict[str, int]
    merges: Sequence[tuple[str, str]]

    def encode(
        self, texts: Sequence[str], length: int, seconds: Sequence[str] | None = None
    ) -> Int[np.ndarray, "n t"]:
        """Return the tokens of texts, or of pairs of texts, cut or filled up to one length.

        ``<s> text </s>``, or ``<s> text </s> </s> second </s>``; of a pair, the end of the longer
        text is cut first.

        Args:
            texts: n texts.
            length: Tokens a text, special ones included; 512 are RoBERTa's most.
            seconds: n texts that are read with them.

        Returns:
            int32 [n, length].

        Raises:
            ValueError: For texts that are none, or a length without room for one token a text.
        """
        special = 2 if seconds is None else 4
        length = _validate.integer("length", length, minimum=special + special // 2)
        firsts = self._tokens("texts", texts)
        others = [] if seconds is None else self._tokens("seconds", seconds)
        if seconds is not None and len(others) != len(firsts):
            raise ValueError(f"seconds has {len(others)} texts, texts {len(firsts)}; give one each")
        rows = np.full((len(firsts), length), PADDING, np.int32)
        for index, first in enumerate(firsts):
            if seconds is None:
                row = [START, *first[: length - special], END]
            else:
                head, tail = _cut(first, others[index], length - special)
                row = [START, *head, END, END, *tail, END]
            rows[index, : len(row)] = row
        return rows

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " t"]) -> str:
        """Return the text of tokens, without the special ones."""
        text: str = self._backend.decode([int(token) for token in tokens if token >= _FIRST])
        return text

    def _tokens(self, name: str, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is {_validate.shown(texts)}; give a list of texts")
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    @functools.cached_property
    def _backend(self) -> Any:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError:
            raise ValueError(
                "tokenizers is not installed, and texts need it; in dpjax's folder: "
                "pip install '.[contrib]'"
            ) from None
        pairs = library.models.BPE(vocab=self.vocabulary, merges=list(self.merges))
        backend = library.Tokenizer(pairs)
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        return backend

    def __post_init__(self) -> None:
        """Refuse a vocabulary that some text has no tokens in."""
        alphabet = {letter for letter in self.vocabulary if len(letter) == 1}
        if len(alphabet) < 256:
            raise ValueError(
                f"vocabulary spells {len(alphabet)} of 256 bytes; give the files of a byte-level "
                "one"
            )
        if min(self.vocabulary.values()) < _FIRST:
            raise ValueError(f"vocabulary uses numbers below {_FIRST}, which are special tokens'")
        for left, right in self.merges:
            if not {left, right, left + right} <= self.vocabulary.keys():
                raise ValueError(
                    f"merges join {left!r} and {right!r}, which vocabulary does not hold; give "
                    "both files of one tokenizer"
                )


def load(folder: str | Path) -> Tokenizer:
    """Read a tokenizer from the public files, each of which may be compressed (``.gz``).

    Either of RoBERTa's: ``vocab.json`` and ``merges.txt``; or of GPT-2's and the list by which
    RoBERTa numbers them: ``encoder.json``, ``vocab.bpe``, and ``dict.txt`` or
    ``roberta_order.txt``, a line a token, GPT-2's number first.

    Args:
        folder: Where the files are; nothing is fetched.

    Raises:
        ValueError: For missing files, or files that do not go together.
    """
    folder = Path(folder)
    vocabulary = _file(folder, "vocab.json")
    merges = _file(folder, "merges.txt")
    if vocabulary is not None and merges is not None:
        numbers = _numbers(vocabulary)
    else:
        encoder = _file(folder, "encoder.json")
        merges = _file(folder, "vocab.bpe")
        order = _file(folder, "dict.txt") or _file(folder, "roberta_order.txt")
        if encoder is None or merges is None or order is None:
            raise ValueError(
                f"{folder} holds neither vocab.json and merges.txt nor encoder.json, vocab.bpe and "
                "dict.txt; give the folder of RoBERTa's tokenizer"
            )
        numbers = _renumbered(order, _numbers(encoder))
    pairs = _pairs(merges)
    special = {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
    tokens = {token: number for token, number in numbers.items() if token not in special}
    with _files.reading(folder, "give all files of one tokenizer, whole"):
        unions = {left + right for left, right in pairs}
        for token in tokens:
            if len(token) > 1 and token not in unions and not _UNUSED.fullmatch(token):
                raise ValueError(f"no merge makes {token!r}")
        return Tokenizer(tokens, pairs)


def opened(path: Path, *, newline: str | None = None) -> IO[str]:
    """Open a text file in UTF-8; ``.gz`` is unpacked on the way.

    Args:
        path: The file.
        newline: As of `open`.
    """
    packed = path.suffix == ".gz"
    return (gzip.open if packed else open)(path, "rt", encoding="utf8", newline=newline)


def _file(folder: Path, name: str) -> Path | None:
    """Where a file is, or None where there is none."""
    for path in (folder / name, folder / f"{name}.gz"):
        if os.path.isfile(path):
            return path
    return None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a JSON file by token; each once."""
    with _files.reading(path, "give a whole file of tokens and their numbers"):
        with opened(path) as file:
            numbers = json.load(file)
        if not isinstance(numbers, dict) or set(map(type, numbers.values())) != {int}:
            raise ValueError("it holds something else than tokens and whole numbers")
        if set(numbers.values()) != set(range(len(numbers))):
            raise ValueError(f"its numbers are not 0 to {len(numbers) - 1}, each once")
        return numbers


def _pairs(path: Path) -> list[tuple[str, str]]:
    """The merges of a file, a line each."""
    with _files.reading(path, "give a whole file of merges"):
        with opened(path) as file:
            lines = file.read().rstrip("\n").split("\n")
        lines = lines[1:] if lines[0].startswith("#version") else lines
        pairs = [tuple(line.split(" ")) for line in lines]
        if not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise ValueError("it has merges that are no pairs; give one a line, with a space")
        if len(set(pairs)) != len(pairs):
            raise ValueError("it has a merge twice")
        return [(left, right) for left, right in pairs]


def _renumbered(path: Path, encoder: dict[str, int]) -> dict[str, int]:
    """GPT-2's tokens with RoBERTa's numbers; the list's made-up words use up numbers alone."""
    with _files.reading(path, "give the list of the same tokenizer, whole"):
        with opened(path) as file:
            rows = [line.split()[0] for line in file if line.strip()]
        places = {int(row): _FIRST + index for index, row in enumerate(rows) if row.isdigit()}
        numbered = sum(map(str.isdigit, rows))
        if places.keys() != set(encoder.values()) or numbered != len(places):
            raise ValueError(
                f"it numbers {numbered} tokens, not each of the {len(encoder)} of encoder.json once"
            )
        return {token: places[number] for token, number in encoder.items()}


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """The beginnings of a pair that fit: the longer one is cut until both are as long."""
    over = max(0, len(first) + len(second) - room)
    gap = len(first) - len(second)
    # First what makes them equally long, then half of the rest from each.
    rest = over - min(over, abs(gap))
    from_first = min(over, max(0, gap)) + (rest + 1) // 2
    from_second = over - from_first
    return first[: len(first) - from_first], second[: len(second) - from_second]
