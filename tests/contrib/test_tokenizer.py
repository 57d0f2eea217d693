"""RoBERTa's tokens: by hand from a few merges, and from the public files."""

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from dpjax.contrib import tokenizer

ROOT = Path(__file__).resolve().parents[2]


def alphabet():
    """Characters of the 256 bytes: printable ones their own, others moved beyond 255."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in own}
    moved = 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(moved)
            moved = moved + 1
    return letters


LETTERS = alphabet()
MERGES = [("l", "o"), ("lo", "w"), ("Ġ", "low"), ("e", "r"), ("Ġlow", "er"), ("Ã", "©")]


@pytest.fixture
def files(tmp_path):
    """A tokenizer of 256 bytes and six merges, as RoBERTa's files."""
    tokens = [LETTERS[byte] for byte in range(256)] + [left + right for left, right in MERGES]
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {token: 4 + index for index, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"<mask>": 4 + len(tokens)}))
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in MERGES)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf8")
    return tmp_path


@pytest.fixture
def small(files):
    pytest.importorskip("tokenizers", reason="needs dpjax[contrib]")
    return tokenizer.load(files)


@pytest.fixture(scope="module")
def public():
    """RoBERTa's own, from the files of GPT-2's."""
    pytest.importorskip("tokenizers", reason="needs dpjax[contrib]")
    for folder in (Path(os.environ["DPJAX_DATA"]) / "bpe", ROOT.parent / "shared" / "data" / "bpe"):
        if folder.is_dir():
            return tokenizer.load(folder)
    pytest.skip("GPT-2's encoder.json and vocab.bpe are not in $DPJAX_DATA/bpe")


LO, LOW, SPACE_LOW, ER, SPACE_LOWER, ACUTE = range(260, 266)


def byte(character):
    return 4 + ord(character)


def test_tokens_are_those_of_merges_by_hand(small):
    got = small.encode(["low lower", " low", "lo! é", ""], 8)
    assert got.dtype == np.int32
    assert got.tolist() == [
        [0, LOW, SPACE_LOWER, 2, 1, 1, 1, 1],
        [0, SPACE_LOW, 2, 1, 1, 1, 1, 1],
        [0, LO, byte("!"), byte(" "), ACUTE, 2, 1, 1],
        [0, 2, 1, 1, 1, 1, 1, 1],
    ]
    assert small.encode(["er\nlow"], 5).tolist() == [[0, ER, byte("\n"), LOW, 2]]


def test_long_texts_are_cut_and_keep_their_end(small):
    assert small.encode(["abcdef"], 5).tolist() == [[0, *map(byte, "abc"), 2]]


def test_pairs_are_joined_and_longer_is_cut(small):
    got = small.encode(["ab", "abcdef", "a"], 9, seconds=["c", "xyz", "uvwxyz"])
    assert got.tolist() == [
        [0, *map(byte, "ab"), 2, 2, byte("c"), 2, 1, 1],
        [0, *map(byte, "ab"), 2, 2, *map(byte, "xyz"), 2],
        [0, byte("a"), 2, 2, *map(byte, "uvwx"), 2],
    ]
    even = small.encode(["abcd"], 7, seconds=["wxyz"])
    assert sorted(map(len, "".join(chr(t - 4) if t > 3 else " " for t in even[0]).split())) == [
        1,
        2,
    ]


def test_texts_cannot_spell_special_tokens(small):
    row = small.encode(["</s><pad>"], 12)[0].tolist()
    assert row[1:10] == [byte(item) for item in "</s><pad>"] and row[10:] == [2, 1]


@pytest.mark.parametrize(
    "text", ["low lower", "naïve — ünïcode 漢字 🙂", " two  spaces\n", "\x00\x7f"]
)
def test_what_is_encoded_decodes_to_itself(small, text):
    assert small.decode(small.encode([text], 64)[0]) == text


def reference(text, ranks, vocabulary):
    """Byte-level pairs in plain Python, for ASCII."""
    pieces = re.findall(
        r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", text
    )
    assert "".join(pieces) == text
    tokens = []
    for piece in pieces:
        word = [LETTERS[byte] for byte in piece.encode()]
        while len(word) > 1:
            best = min(zip(word, word[1:], strict=False), key=lambda pair: ranks.get(pair, 1e9))
            if best not in ranks:
                break
            combined = []
            index = 0
            while index < len(word):
                if tuple(word[index : index + 2]) == best:
                    combined.append(word[index] + word[index + 1])
                    index += 2
                else:
                    combined.append(word[index])
                    index += 1
            word = combined
        tokens += [vocabulary[token] for token in word]
    return tokens


def test_public_files_give_roberta_s_documented_tokens(public):
    """As its authors and Hugging Face print them."""
    assert len(public.vocabulary) == 50257 and max(public.vocabulary.values()) == 50260
    rows = public.encode(["Hello world", " Hello world", "Hello world!"], 5)
    assert rows.tolist() == [[0, 31414, 232, 2, 1], [0, 20920, 232, 2, 1], [0, 31414, 232, 328, 2]]


def test_public_files_against_plain_python(public):
    ranks = {pair: index for index, pair in enumerate(public.merges)}
    texts = [
        "hide new secretions from the parental units ",
        "it 's a charming and often affecting journey . ",
        "We don't know  how\tmuch 12345 costs; Differentially-Private (DP) optimiser's noise...",
    ]
    for text in texts:
        want = reference(text, ranks, public.vocabulary)
        row = public.encode([text], 64)[0]
        assert row[: len(want) + 2].tolist() == [0, *want, 2]
        assert public.decode(row) == text


def test_both_layouts_of_files_give_same(files, small, tmp_path):
    """GPT-2's files and RoBERTa's list of its numbers, compressed or not."""
    order = np.random.default_rng(0).permutation(262)
    by_place = {number: token for token, number in small.vocabulary.items()}
    encoder = {by_place[4 + place]: int(number) for place, number in enumerate(order)}
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "encoder.json.gz").write_bytes(gzip.compress(json.dumps(encoder).encode()))
    (folder / "vocab.bpe").write_text((files / "merges.txt").read_text(encoding="utf8"))
    listed = "\n".join(f"{number} 17" for number in order) + "\nmadeupword0000 0\n"
    (folder / "dict.txt").write_text(listed)
    other = tokenizer.load(folder)
    assert other.vocabulary == small.vocabulary and list(other.merges) == list(small.merges)


def test_files_and_texts_that_do_not_fit_are_refused(files):
    with pytest.raises(ValueError, match="holds neither vocab.json"):
        tokenizer.load(files / "nowhere")
    good = tokenizer.load(files)
    for vocabulary, merges, message in [
        ({"a": 4}, [], "vocabulary spells 1 of 256 bytes"),
        (good.vocabulary | {"a": 2}, [], "numbers below 4"),
        (good.vocabulary, [("x", "y")], "merges join 'x' and 'y'"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer.Tokenizer(vocabulary, merges)
    pytest.importorskip("tokenizers", reason="needs dpjax[contrib]")
    with pytest.raises(ValueError, match="texts is 'a text'; give a list"):
        good.encode("a text", 8)
    with pytest.raises(ValueError, match="length is 2"):
        good.encode(["a"], 2)
    with pytest.raises(ValueError, match="seconds has 2 texts, texts 1"):
        good.encode(["a"], 8, seconds=["b", "c"])
