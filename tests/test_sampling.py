"""Guards: rows that influence each other, filters that keep too much or too little, seeds that do
not fix a request, and settings that are wrong but accepted.

The oracle computes probabilities in plain Python, one token at a time.
"""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minihisparse.sampling import (
    NO_TOKEN,
    SamplingParams,
    make_generator,
    mask_stop_ids,
    sample,
)

INF, NAN = math.inf, math.nan


def naive_probabilities(row: list[float], params: SamplingParams) -> list[float]:
    """The distribution that `sample` draws from, by definition."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    weights = {i: math.exp((row[i] - row[ranked[0]]) / params.temperature) for i in ranked}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for i in ranked:
        kept[i] = weights[i]
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(row))]


def draws(row: list[float], params: SamplingParams, count: int) -> list[int]:
    """`count` draws in one call: rows share a generator, so that each continues the stream."""
    generator = make_generator(params, 0, 0)
    return sample(torch.tensor([row] * count), [params] * count, [generator] * count)


def one(row: torch.Tensor, params: SamplingParams, index: int) -> int:
    return sample(row[None], [params], [make_generator(params, 7, index)])[0]


# -- sample -----------------------------------------------------------------------------------

ROW = [1.0, 2.5, -1.0, 2.5, 0.3, -INF, 1.9]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": 99},
        {"top_p": 0.8},
        {"top_p": 1e-9},
        {"top_p": 0.999},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(options):
    """Each count within five standard deviations; a token of probability 0 never."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **options})
    count = 3000
    tokens = draws(ROW, params, count)
    for token, p in enumerate(naive_probabilities(ROW, params)):
        deviation = abs(tokens.count(token) - count * p)
        assert deviation <= 5 * math.sqrt(count * p * (1 - p)), (token, p, tokens.count(token))


def test_top_k_comes_before_top_p():
    """Of the two likeliest, renormalised to 0.5 each, the first alone reaches top_p 0.5."""
    row = torch.log(torch.tensor([0.3, 0.3, 0.2, 0.2])).tolist()
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=0)
    assert set(draws(row, params, 200)) == {0}
    assert set(draws(row, replace(params, top_k=-1), 200)) == {0, 1}


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_keeps_every_token(top_k):
    params = SamplingParams(temperature=1.0, top_k=top_k, seed=0)
    assert set(draws([0.0] * 8, params, 400)) == set(range(8))


def test_equal_logits_go_to_the_lowest_id():
    """Also in rows long enough for vectorised reductions, and in strided ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (4, 5001), generator=generator).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    top_1 = SamplingParams(temperature=1.0, top_k=1)
    for view in (logits, logits.t().contiguous().t()):
        assert sample(view, [SamplingParams()] * 4, [None] * 4) == expected
        assert sample(view, [top_1] * 4, [make_generator(top_1, 0, 0)] * 4) == expected


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-6])
def test_tiny_temperatures_choose_among_the_largest(temperature):
    row = [80.0, -3e38, 90.0, -INF, 90.0]
    assert set(draws(row, SamplingParams(temperature=temperature, seed=1), 50)) == {2, 4}


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.5]),
            top_k=st.sampled_from([-1, 3]),
            top_p=st.sampled_from([0.6, 1.0]),
            seed=st.sampled_from([None, 5]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_its_batch(params, random):
    """Greedy and random rows mixed, in any order: each equals the row sampled alone."""
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(len(params)))
    before = logits.clone()
    alone = [one(logits[r], params[r], r) for r in range(len(params))]
    order = list(range(len(params)))
    random.shuffle(order)
    generators = [make_generator(params[r], 7, r) for r in order]
    together = sample(logits[order], [params[r] for r in order], generators)
    assert together == [alone[r] for r in order]
    assert torch.equal(logits, before)


def test_seeds_fix_a_request():
    """A request's seed alone decides; without one, the engine's seed and the index do."""
    row = torch.zeros(1000)

    def tokens(seed, engine_seed, index):
        params = SamplingParams(temperature=1.0, seed=seed)
        generator = make_generator(params, engine_seed, index)
        return [sample(row[None], [params], [generator])[0] for _ in range(4)]

    assert tokens(5, 0, 0) == tokens(5, 1, 9)
    assert tokens(None, 3, 4) == tokens(None, 3, 4)
    seeds = [(5, 0, 0), (5 + 2**32, 0, 0), (None, 0, 1), (None, 1, 0), (None, 5, 0)]
    assert len({tuple(tokens(*s)) for s in seeds}) == len(seeds)
    assert make_generator(SamplingParams(seed=5), 0, 0) is None  # greedy needs none


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    draws(ROW, SamplingParams(temperature=1.0), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("row", [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_no_token(row, temperature):
    """NO_TOKEN where they are; the rows beside draw what they draw without them."""
    params = SamplingParams(temperature=temperature)
    good = [[0.0, 1.0, 2.0], [3.0, 1.0, 2.5]]
    logits = torch.tensor([good[0], row, good[1]])
    generators = [make_generator(params, 0, i) for i in range(3)]
    expected = sample(
        torch.tensor(good), [params] * 2, [make_generator(params, 0, i) for i in (0, 2)]
    )
    assert sample(logits, [params] * 3, generators) == [expected[0], NO_TOKEN, expected[1]]
    assert NO_TOKEN == -1  # no token's id
    if temperature:  # a broken row draws nothing
        untouched = make_generator(params, 0, 1)
        assert torch.equal(generators[1].get_state(), untouched.get_state())


def test_misuse_is_explained():
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"logits \(2, 3\), 1 params and 2 generators"):
        sample(logits, [SamplingParams()], [None] * 2)
    with pytest.raises(ValueError, match="row 0: temperature 1.0 needs a generator"):
        sample(logits, [SamplingParams(temperature=1.0)] * 2, [None] * 2)
    assert sample(torch.zeros(0, 3), [], []) == []


# -- mask_stop_ids ----------------------------------------------------------------------------


def test_stop_ids_are_masked_until_min_new_tokens():
    logits = torch.arange(18.0).reshape(3, 6)
    before = logits.clone()
    params = [
        SamplingParams(min_new_tokens=2, stop_token_ids=[1]),
        SamplingParams(min_new_tokens=2, stop_token_ids=[1], ignore_eos=True),
        SamplingParams(),
    ]
    masked = mask_stop_ids(logits, params, [1, 1, 0], eos_token_ids=[5, 4])
    expected = before.clone()
    expected[0, [1, 4, 5]] = -INF
    expected[1, 1] = -INF
    assert torch.equal(masked, expected) and torch.equal(logits, before)
    assert sample(masked, params, [None] * 3) == [3, 5, 5]
    assert mask_stop_ids(logits, params, [2, 2, 0], [5, 4]) is logits  # nobody is too young


def test_a_stop_id_outside_the_vocabulary_is_named():
    params = SamplingParams(min_new_tokens=1, stop_token_ids=[6])
    with pytest.raises(ValueError, match="row 0: stop id 6 is not below the vocabulary's 6"):
        mask_stop_ids(torch.zeros(1, 6), [params], [0], [])


def test_stop_ids_of_a_request():
    assert SamplingParams(stop_token_ids=[3]).stop_ids([1, 2]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).stop_ids([1, 2]) == {3}


# -- SamplingParams ---------------------------------------------------------------------------


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.greedy and params.max_new_tokens == 128
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0


def test_sequences_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[2])
    assert (params.stop, params.stop_token_ids) == (("END",), (2,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None) == SamplingParams()


def test_max_tokens_is_another_name():
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5)
    assert replace(SamplingParams(max_tokens=5), seed=1).max_new_tokens == 5
    with pytest.raises(ValueError, match="max_new_tokens=128 and max_tokens=5"):
        SamplingParams(max_new_tokens=128, max_tokens=5)


@pytest.mark.parametrize(
    "field, bad",
    [
        ("temperature", [-0.1, NAN, INF, True, "1", None]),
        ("top_p", [0, -0.5, 1.01, NAN, True, None]),
        ("top_k", [-2, 1.0, True, None]),
        ("seed", [-1, 1.5, False]),
        ("max_new_tokens", [0, -1, 2.0, True]),
        ("min_new_tokens", [-1, 129, 1.0, True]),
        ("stop", ["", ["a", ""], [3], 3]),
        ("stop_token_ids", [[-1], ["2"], [True], "2"]),
        ("ignore_eos", [1, None]),
        ("skip_special_tokens", ["no"]),
    ],
)
def test_bad_values_name_their_field(field, bad):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{field}: got .*, expected "):
            SamplingParams(**{field: value})


def test_unknown_fields_raise():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
