"""Sequences of held-out tokens on which selectors are judged: natural, copy, needles, free.

    natural  a document as it is: perplexity, attention mass, locality
    copy     the last `num_decode` tokens repeat an earlier span: a selector that loses the span
             cannot go on with it
    needles  a sentence with a six-digit number in a long text, the question at the end: a selector
             that loses one sentence cannot answer
    free     the beginning of a document, to go on from greedily

Every token of a document is used once at most, so no measure sees the text of another one. Nothing
is drawn but the numbers (seeded): the same file gives the same sequences everywhere.
This file does not know models, scores, or where the tokens come from (distil_text.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from minihisparse.tokenizer import Tokenizer

__all__ = ["CITIES", "Needle", "Sequences", "make_sequences"]

CITIES = "Lisbon Oslo Cairo Lima Quito Dakar Perth Minsk Turin Seoul Delhi Miami".split()
CITIES += "Tampa Havana Naples Kyoto".split()
NEEDLE = "\n\nThe secret number of {city} is {number}. Remember it.\n\n"
QUESTION = "\n\nQuestion: What is the secret number of {city}?\n"
QUESTION += "Answer: The secret number of {city} is"
NUM_DIGITS = 6
NUM_NATURAL_DOCUMENTS = 5  # the first ones; copies come from the others, where there are others


class Needle(NamedTuple):
    """ids: [T] int32, ending with the answer and one token more; answer_len: of the number."""

    ids: np.ndarray
    answer_len: int


class Sequences(NamedTuple):
    """Token ids, int32: [T] each, and [T - num_free] for `free`."""

    natural: list[np.ndarray]
    copy: list[np.ndarray]
    needles: list[Needle]
    free: list[np.ndarray]


def make_sequences(
    heldout: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    length: int = 8192,
    num_decode: int = 512,
    num_natural: int = 10,
    num_copy: int = 4,
    num_needles: int = 16,
    num_free: int = 256,
    num_free_prompts: int = 5,
    seed: int = 0,
) -> Sequences:
    """Cut held-out documents into sequences of `length` tokens.

    heldout: tokens of each document by name, in order. num_decode: tokens at the end that are
    decoded; a copy is as long, and all needles lie before them. num_free: tokens that a greedy
    continuation adds. seed: of the needles' numbers.

    Raises ValueError: the documents are too short for so many sequences, or `length` is too short
    for a needle and its question.
    """
    if num_needles > len(CITIES):
        raise ValueError(f"num_needles: got {num_needles}, expected at most {len(CITIES)}")
    if not 2 * num_decode <= length or not num_free < length:
        raise ValueError(
            f"got length {length}, expected at least 2 * num_decode ({num_decode}) and more than "
            f"num_free ({num_free})"
        )
    names = list(heldout)
    cut = _Documents(heldout)
    first, others = names[:NUM_NATURAL_DOCUMENTS], names[NUM_NATURAL_DOCUMENTS:] or names
    natural = [cut.next(name, length) for name in _in_turn(first, num_natural)]
    free = [cut.next(name, length - num_free) for name in _in_turn(first, num_free_prompts)]
    copy = []
    for i, name in enumerate(_in_turn(others, num_copy)):
        ids = cut.next(name, length - num_decode)
        start = _spread(i, num_copy, len(ids) - num_decode)
        copy.append(np.concatenate([ids, ids[start : start + num_decode]]))
    rng = np.random.default_rng(seed)
    needles = []
    for i, name in enumerate(_in_turn(names, num_needles)):
        number = "".join(map(str, rng.integers(0, 10, NUM_DIGITS)))
        needle, tail = _needle(tokenizer, CITIES[i], number)
        hay = cut.next(name, length - len(needle) - len(tail))
        # Before the question and before what is decoded: no needle is among the decoded tokens.
        last = length - max(num_decode, len(tail)) - len(needle)
        if last < 0 or num_decode < NUM_DIGITS + 2:
            raise ValueError(
                f"got length {length}, num_decode {num_decode}: too short for a needle of "
                f"{len(needle)} tokens and a question of {len(tail)}"
            )
        at = _spread(i, num_needles, last)
        needles.append(Needle(np.concatenate([hay[:at], needle, hay[at:], tail]), NUM_DIGITS))
    return Sequences(natural, copy, needles, free)


class _Documents:
    """Hands out the documents' tokens, each once."""

    def __init__(self, heldout: Mapping[str, np.ndarray]):
        self.heldout = heldout
        self.used = dict.fromkeys(heldout, 0)

    def next(self, name: str, num_tokens: int) -> np.ndarray:
        """The next tokens of a document."""
        start = self.used[name]
        end = self.used[name] = start + max(num_tokens, 0)
        ids = self.heldout[name][start:end]
        if len(ids) < num_tokens:
            raise ValueError(
                f"held-out document {name!r}: got {len(self.heldout[name])} tokens, expected at "
                f"least {end}; ask for fewer or shorter sequences"
            )
        return ids.astype(np.int32)


def _in_turn(names: Sequence[str], count: int) -> Iterator[str]:
    return islice(cycle(names), count)


def _spread(i: int, count: int, last: int) -> int:
    """The i-th of `count` places from 5% to 95% of 0..last."""
    share = 0.05 + 0.9 * i / max(count - 1, 1)
    return int(share * last)


def _needle(tokenizer: Tokenizer, city: str, number: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the sentence, and of the question with its answer and a full stop at the end.

    Raises ValueError: the tokenizer joins digits, so an answer has no fixed length.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    digits = [token for digit in number for token in encode(digit)]
    needle = encode(NEEDLE.format(city=city, number=number))
    tail = encode(QUESTION.format(city=city) + f" {number}.")
    full_stop = tail[-1:]
    if tail[-1 - NUM_DIGITS :] != digits + full_stop or not _holds(needle, digits):
        raise ValueError("this tokenizer does not give each digit of a number its own token")
    return np.array(needle, dtype=np.int32), np.array(tail, dtype=np.int32)


def _holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))
