"""RoBERTa's tokenizer: byte-level pairs, from the public files."""

import functools
import gzip
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from dpjax import _validate

__all__ = ["END", "PADDING", "START", "Tokenizer", "load"]

START, PADDING, END = 0, 1, 2
"""What a text begins with, is filled up with, and ends with; 3 stands for the unknown."""

_FIRST = 4


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
        length = _validate.integer("length", length, least=special + special // 2)
        firsts = self._tokens("texts", texts)
        others = [] if seconds is None else self._tokens("seconds", seconds)
        if seconds is not None and len(others) != len(firsts):
            raise ValueError(f"seconds has {len(others)} texts, texts {len(firsts)}; give one each")
        rows = np.full((len(firsts), length), PADDING, np.int32)
        for index, first in enumerate(firsts):
            if seconds is None:
                row = [START, *first[: length - special], END]
            else:
                one, two = _cut(first, others[index], length - special)
                row = [START, *one, END, END, *two, END]
            rows[index, : len(row)] = row
        return rows

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " t"]) -> str:
        """Return the text of tokens, without the special ones."""
        text: str = self._backend.decode([int(each) for each in tokens if each >= _FIRST])
        return text

    def _tokens(self, name: str, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is {_validate.shown(texts)}; give a list of texts")
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    @functools.cached_property
    def _backend(self) -> Any:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError:
            raise ValueError(
                "tokenizers is not installed, and texts need it; in dpjax's folder: "
                "pip install '.[pretrained]'"
            ) from None
        pairs = library.models.BPE(vocab=self.vocabulary, merges=list(self.merges))
        backend = library.Tokenizer(pairs)
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        return backend

    def __post_init__(self) -> None:
        """Refuse a vocabulary that some text has no tokens in."""
        known = {each for each in self.vocabulary if len(each) == 1}
        if len(known) < 256:
            raise ValueError(
                f"vocabulary spells {len(known)} of 256 bytes; give the files of a byte-level one"
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
    vocabulary, merges = _text(folder, "vocab.json"), _text(folder, "merges.txt")
    if vocabulary is not None and merges is not None:
        numbers = json.loads(vocabulary)
    else:
        encoder, merges = _text(folder, "encoder.json"), _text(folder, "vocab.bpe")
        order = _text(folder, "dict.txt") or _text(folder, "roberta_order.txt")
        if encoder is None or merges is None or order is None:
            raise ValueError(
                f"{folder} holds neither vocab.json and merges.txt nor encoder.json, vocab.bpe and "
                "dict.txt; give the folder of RoBERTa's tokenizer"
            )
        numbers = _renumbered(folder, json.loads(encoder), order)
    lines = merges.rstrip("\n").split("\n")
    lines = lines[1:] if lines[0].startswith("#version") else lines
    pairs = [tuple(line.split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{folder} has merges that are no pairs; give one a line, with a space")
    special = {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
    vocabulary_ = {token: number for token, number in numbers.items() if token not in special}
    return Tokenizer(vocabulary_, [(left, right) for left, right in pairs])


def _text(folder: Path, name: str) -> str | None:
    """A file's text, or None where there is none."""
    if (folder / name).is_file():
        return (folder / name).read_text(encoding="utf8")
    if (folder / f"{name}.gz").is_file():
        return gzip.decompress((folder / f"{name}.gz").read_bytes()).decode("utf8")
    return None


def _renumbered(folder: Path, encoder: dict[str, int], order: str) -> dict[str, int]:
    """GPT-2's tokens with RoBERTa's numbers; the list's made-up words use up numbers alone."""
    rows = [line.split()[0] for line in order.splitlines() if line.strip()]
    places = {int(row): _FIRST + index for index, row in enumerate(rows) if row.isdigit()}
    if places.keys() != set(encoder.values()):
        raise ValueError(
            f"{folder} lists {len(places)} of encoder.json's {len(encoder)} tokens, or others; "
            "give the list of the same tokenizer"
        )
    return {token: places[number] for token, number in encoder.items()}


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """The beginnings of a pair that fit: the longer one is cut until both are as long."""
    over = max(0, len(first) + len(second) - room)
    gap = len(first) - len(second)
    from_first = min(over, max(0, gap)) + (over - min(over, abs(gap)) + 1) // 2
    return first[: len(first) - from_first], second[: len(second) - (over - from_first)]
