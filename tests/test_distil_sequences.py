"""Evaluation sequences: right lengths, no text used twice, needles that can be found and judged.

Guards: a copy that repeats nothing; a needle among the decoded tokens, cut in two or with another
number than the answer; an answer that does not end one token before the end; documents that run out
unnoticed; sequences that differ from run to run.
"""

import numpy as np
import pytest
from conftest import byte_level_tokenizer

from minihisparse.tokenizer import Tokenizer
from minihisparse.weights_scripts.distil_sequences import CITIES, NUM_DIGITS, make_sequences

LENGTH, NUM_DECODE, NUM_FREE = 400, 60, 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


def documents(num: int = 9, tokens: int = 3000) -> dict[str, np.ndarray]:
    """Every token of every document is another number."""
    ids = np.arange(num * tokens, dtype=np.uint16) + 1000
    return {f"d{i}": part for i, part in enumerate(np.split(ids, num))}


def make(tokenizer, heldout=None, **changes):
    settings = {"length": LENGTH, "num_decode": NUM_DECODE, "num_free": NUM_FREE} | changes
    return make_sequences(documents() if heldout is None else heldout, tokenizer, **settings)


def test_numbers_and_lengths(tokenizer):
    made = make(tokenizer)
    assert [len(part) for part in made] == [10, 4, 16, 5]
    assert {len(ids) for ids in made.natural + made.copy} == {LENGTH}
    assert {len(needle.ids) for needle in made.needles} == {LENGTH}
    assert {needle.answer_len for needle in made.needles} == {NUM_DIGITS}
    assert {len(ids) for ids in made.free} == {LENGTH - NUM_FREE}
    assert all(ids.dtype == np.int32 for ids in made.natural + made.copy + made.free)


def test_natural_text_is_whole_and_from_five_documents(tokenizer):
    heldout = documents()
    for i, ids in enumerate(make(tokenizer).natural):
        assert (np.diff(ids) == 1).all()
        assert ids[0] in heldout[f"d{i % 5}"] and ids[-1] in heldout[f"d{i % 5}"]


def test_no_token_of_a_document_is_used_twice(tokenizer):
    made = make(tokenizer)
    parts = made.natural + made.free + [ids[:-NUM_DECODE] for ids in made.copy]
    parts += [needle.ids[needle.ids >= 1000] for needle in made.needles]  # the hay
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used)


def test_a_copy_repeats_an_earlier_span(tokenizer):
    places = []
    for ids in make(tokenizer).copy:
        prompt, repeated = ids[:-NUM_DECODE], ids[-NUM_DECODE:]
        (place,) = np.flatnonzero(prompt == repeated[0])
        np.testing.assert_array_equal(prompt[place : place + NUM_DECODE], repeated)
        places.append(place / (len(prompt) - NUM_DECODE))
    np.testing.assert_allclose(places, [0.05, 0.35, 0.65, 0.95], atol=0.01)


def test_a_needle_lies_before_the_decoded_tokens_and_its_number_is_the_answer(tokenizer):
    depths, numbers = [], []
    for city, (ids, answer_len) in zip(CITIES, make(tokenizer).needles, strict=True):
        text = [int(i) for i in np.flatnonzero(ids < 1000)]
        tail = next(i for i in range(LENGTH) if text[-1 - i] != LENGTH - 1 - i)  # its length
        end = next(i + 1 for i in range(len(text)) if text[i + 1] != text[i] + 1)
        answer = tokenizer.decode(ids[-1 - answer_len : -1])
        assert len(answer) == NUM_DIGITS and answer.isdigit()
        needle = tokenizer.decode(ids[text[0] : text[0] + end])
        assert needle == f"\n\nThe secret number of {city} is {answer}. Remember it.\n\n"
        question = tokenizer.decode(ids[-tail:])
        assert question.startswith(f"\n\nQuestion: What is the secret number of {city}?\n")
        assert question.endswith(f"\nAnswer: The secret number of {city} is {answer}.")
        assert text[end - 1] < LENGTH - NUM_DECODE
        depths.append(text[0] / (LENGTH - max(tail, NUM_DECODE) - end))
        numbers.append(answer)
    np.testing.assert_allclose(depths, np.linspace(0.05, 0.95, 16), atol=0.01)
    assert len(set(numbers)) == 16


def test_no_needle_is_decoded_where_more_than_the_question_is(tokenizer):
    num_decode = 190
    for ids, _ in make(tokenizer, num_decode=num_decode).needles:
        hay = np.flatnonzero(ids >= 1000)
        (before,) = np.flatnonzero(np.diff(hay) > 1)  # the needle is the gap
        assert hay[before + 1] <= LENGTH - num_decode


def test_the_same_every_time_and_seeded(tokenizer):
    def flat(made):
        return np.concatenate([*made.natural, *made.copy, *(n.ids for n in made.needles)])

    np.testing.assert_array_equal(flat(make(tokenizer)), flat(make(tokenizer)))
    assert (flat(make(tokenizer)) != flat(make(tokenizer, seed=1))).any()


def test_few_documents_serve_for_everything(tokenizer):
    made = make(tokenizer, documents(5, 8000))
    assert [len(part) for part in made] == [10, 4, 16, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": documents(9, 1000)}, r"'d0': got 1000 tokens, expected at least 1180"),
        ({"num_needles": 17}, "got 17, expected at most 16"),
        ({"num_decode": 201}, "length 400, expected at least 2"),
        ({"num_free": 400}, r"num_free \(400\)"),
        ({"length": 130, "num_free": 9}, "too short for a needle"),
        ({"num_decode": 7}, "too short for a needle"),
    ],
)
def test_what_does_not_fit_is_refused(tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, **changes)


def test_a_tokenizer_that_joins_digits_is_refused(tokenizer):
    class Joins:
        def encode(self, text, add_special_tokens):
            return [ord(character) for character in text.replace("12", "\u2081")]

    make(Joins())  # no 12 among the numbers of seed 0, or it is refused below
    with pytest.raises(ValueError, match="each digit"):
        for seed in range(20):
            make(Joins(), seed=seed)
