"""Guards: an index key that is normed, rotated or rounded otherwise than defined, of the wrong
layer, or left over from an earlier request; relu or the weights in the wrong place; a list that is
not ascending, has a position twice, or lacks one that is always read; ties by chance; padding that
writes; kernels that select otherwise than torch; a state that is larger than it said.

The oracle works in Python floats, one head, position and element at a time. Inputs and weights are
small integers where rounding matters: then the matrix product is exact in every dtype, and only the
roundings that the definition has are left.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from addon_rig import tiny_addon
from conftest import make_tiny_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import assert_near, assert_same_bits, inputs_of
from torch import Tensor

from minihisparse.addon import Addon
from minihisparse.batch import Batch
from minihisparse.indexer import DSASelector, rotate, top_k_positions
from minihisparse.model import Decoder
from minihisparse.rope import rope_angles
from minihisparse.selector import SelectorSize

CPU = torch.device("cpu")
LAYER = 2  # of three; where layers share, an anchor
HIDDEN = 48
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# -- the oracle -------------------------------------------------------------------------------


def rounded(values: list[float], dtype: torch.dtype) -> list[float]:
    return torch.tensor(values).to(dtype).tolist()


def turned(values: list[float], position: int, rope_dim: int, theta: float) -> list[float]:
    out = list(values)
    for j in range(rope_dim // 2):
        angle = position * theta ** (-2 * j / rope_dim)
        a, b = values[j], values[j + rope_dim // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + rope_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_key(addon: Addon, x: Tensor, position: int, fp8: bool) -> list[float]:
    """The index key of x [hidden], as whoever reads the state sees it."""
    prefix, dtype = f"model.layers.{LAYER}.self_attn.indexer", x.dtype
    wk = addon.tensors[f"{prefix}.wk.weight"].to(dtype).double()
    k = rounded((wk @ x.double()).tolist(), dtype)
    gain, bias = (addon.tensors[f"{prefix}.k_norm.{w}"].to(dtype) for w in ("weight", "bias"))
    mean = sum(k) / len(k)
    variance = sum((v - mean) ** 2 for v in k) / len(k)
    k = [(v - mean) / math.sqrt(variance + 1e-6) for v in k]
    k = [v * g + b for v, g, b in zip(k, gain.tolist(), bias.tolist(), strict=True)]
    k = turned(k, position, addon.settings["rope_dim"], addon.settings["rope_theta"])
    if not fp8:
        return rounded(k, dtype)
    scale = max(map(abs, k)) / 448
    return [v * scale for v in rounded([v / scale if scale else 0.0 for v in k], FP8)]


def naive_scores(addon: Addon, x: Tensor, fp8: bool = False) -> list[float]:
    """I of the newest query for each position; x [S, hidden] in the model's dtype."""
    prefix, dtype = f"model.layers.{LAYER}.self_attn.indexer", x.dtype
    wq, proj = (
        addon.tensors[f"{prefix}.{name}.weight"].to(dtype).double()
        for name in ("wq", "weights_proj")
    )
    heads, d = addon.settings["index_n_heads"], addon.settings["index_head_dim"]
    rope = addon.settings["rope_dim"], addon.settings["rope_theta"]
    newest = x[-1].double()
    weights = rounded((proj @ newest).tolist(), dtype)
    queries = rounded((wq @ newest).tolist(), dtype)
    queries = [queries[h * d : h * d + d] for h in range(heads)]
    queries = [rounded(turned(q, len(x) - 1, *rope), dtype) for q in queries]
    scores = []
    for position in range(len(x)):
        key = naive_key(addon, x[position], position, fp8)
        score = 0.0
        for w, q in zip(weights, queries, strict=True):
            score += w * max(0.0, sum(a * b for a, b in zip(q, key, strict=True)))
        scores.append(score / math.sqrt(heads * d))
    return scores


def always(addon: Addon, size: int) -> set[int]:
    """Positions that are read whatever their scores."""
    sinks, recent = addon.settings["num_sinks"], addon.settings["num_recent"]
    return {*range(min(sinks, size)), *range(max(size - recent, 0), size)}


def naive_select(addon: Addon, scores: Sequence[float], top_k: int) -> tuple[list[int], float]:
    """The K positions, -1 at the end, and how far the last one that was chosen by its score is
    above the first that was not.
    """
    size = len(scores)
    if size <= top_k:
        return [*range(size)] + [-1] * (top_k - size), math.inf
    forced = always(addon, size)
    others = sorted(set(range(size)) - forced, key=lambda s: (-scores[s], s))
    num = top_k - len(forced)
    margin = scores[others[num - 1]] - scores[others[num]] if num else math.inf
    return sorted([*forced, *others[:num]]), margin


def check(addon: Addon, selected: list[int], x: Tensor, top_k: int, fp8: bool = False) -> bool:
    """Checks a selection; True if there was no near-tie, so that it had to be that one exactly."""
    scores = naive_scores(addon, x, fp8)
    expected, margin = naive_select(addon, scores, top_k)
    tolerance = 1e-4 * max(1.0, *map(abs, scores))
    listed = [s for s in selected if s != -1]
    assert selected == listed + [-1] * (top_k - len(listed))
    assert listed == sorted(set(listed)) and len(listed) == min(top_k, len(x))
    lowest = min((scores[s] for s in expected if s not in always(addon, len(x))), default=0.0)
    # Where relu cut all off, scores are equal in any arithmetic.
    cut_off = all(score == 0 for score in scores if abs(score - lowest) <= tolerance)
    if margin > tolerance or cut_off:
        assert selected == expected
        return True
    # Who changed places was as good as whom it replaced.
    replaced = [scores[s] for s in {*expected} ^ {*selected}]
    assert not replaced or max(replaced) - min(replaced) <= 2 * tolerance
    return False


# -- selectors --------------------------------------------------------------------------------


def whole_addon(model: Decoder, seed: int = 0, **options) -> Addon:
    """Its projections are -1, 0 and 1."""
    addon = tiny_addon(model, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for tensor in addon.tensors.values():
        if tensor.ndim == 2:
            tensor.copy_(torch.randint(-1, 2, tensor.shape, generator=generator))
    return addon


def inputs(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [length, hidden], of -2 .. 2, mostly 0: no product leaves what bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shape = length, HIDDEN
    x = torch.randint(-2, 3, shape, generator=generator)
    return (x * (torch.rand(shape, generator=generator) < 0.4)).to(dtype)


def poisoned(
    addon: Addon, model: Decoder, top_k: int, rows: dict[int, int] | None = None, **options
) -> DSASelector:
    """A selector whose state is NaN. rows: tokens of each request, in the order of their places in
    the state; None: whole ones, and the last request row comes first.
    """
    options = {"max_requests": 3, "max_model_len": 48} | options
    selector = DSASelector(addon, model, top_k=top_k, **options)
    selector.keys.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
    if selector.scales is not None:
        selector.scales.fill_(math.nan)
    if rows is None:
        rows = dict.fromkeys(reversed(range(options["max_requests"])), options["max_model_len"])
    for row, num_tokens in rows.items():
        selector.admit(row, num_tokens)
    return selector


def prefill(selector: DSASelector, row: int, x: Tensor, chunks: Sequence[int] = ()) -> None:
    """Writes a prompt x [T, hidden]; chunks: where new ones begin."""
    bounds = sorted({0, len(x), *(c for c in chunks if c < len(x))})
    for first, end in zip(bounds, bounds[1:], strict=False):
        selector.write_prompt(LAYER, row, first, inputs_of(x=x[first:end]))


def decode(
    selector: DSASelector, rows: Sequence[int], histories: Sequence[Tensor], padding: int = 0
) -> list[list[int]]:
    """One step; histories [S, hidden] each, the newest token last. Padded rows bring NaN."""
    batch = Batch.make(rows, [len(x) for x in histories], selector.keys.device, padding)
    newest = [x[-1] for x in histories]
    x = torch.stack([*newest, *[torch.full_like(newest[0], math.nan)] * padding])
    selector.write(LAYER, inputs_of(x=x), batch)
    positions = selector.select(LAYER, inputs_of(x=x), batch)
    assert positions.shape == (len(x), selector.top_k) and positions.dtype == torch.int32
    answer = positions.tolist()
    assert answer[len(rows) :] == [[-1] * selector.top_k] * padding
    return answer[: len(rows)]


def keys_of(selector: DSASelector, row: int, length: int) -> Tensor:
    """The keys [length, d] float32 of a request, as they are read."""
    first, _ = selector.extents.extent_of(row)
    index = selector._state_of[LAYER]
    keys = selector.keys[index, first : first + length].float()
    if selector.scales is not None:
        keys = keys * selector.scales[index, first : first + length, None]
    return keys


def assert_same_keys(keys: Tensor, expected: Tensor, state: torch.dtype) -> None:
    """To float32's last bits; few of them, on the edge of a rounding, may be a step apart."""
    apart = (keys - expected).abs()
    assert_near(keys, expected, 4 * max(torch.finfo(state).eps, 1e-6), "keys")
    assert (apart > 1e-5).float().mean() < 0.01


# -- what is selected -------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([6, 16]),
    rope_dim=st.sampled_from([2, 6]),
    num_sinks=st.integers(0, 3),
    num_recent=st.integers(1, 4),
    by_score=st.integers(0, 8),
    lengths=st.lists(st.integers(1, 44), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 40), max_size=3),
    steps=st.integers(1, 3),
    padding=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    fp8=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_it_selects_what_the_naive_one_does(
    heads,
    head_dim,
    rope_dim,
    num_sinks,
    num_recent,
    by_score,
    lengths,
    chunks,
    steps,
    padding,
    dtype,
    fp8,
    seed,
):
    """Several requests, prompts in chunks, decode steps, padding; K at its least and above."""
    model, top_k = decoder(dtype), num_sinks + num_recent + by_score
    addon = whole_addon(
        model,
        seed,
        index_n_heads=heads,
        index_head_dim=head_dim,
        rope_dim=rope_dim,
        num_sinks=num_sinks,
        num_recent=num_recent,
    )
    selector = poisoned(addon, model, top_k, index_dtype="fp8" if fp8 else "auto")
    rows = [2, 0, 1][: len(lengths)]
    histories = [inputs(length + steps, seed + i, dtype) for i, length in enumerate(lengths)]
    for row, length, x in zip(rows, lengths, histories, strict=True):
        prefill(selector, row, x[:length], chunks)
    for step in range(1, steps + 1):
        now = [x[: length + step] for length, x in zip(lengths, histories, strict=True)]
        selected = decode(selector, rows, now, padding)
        if step == steps:
            for x, positions in zip(now, selected, strict=True):
                check(addon, positions, x, top_k, fp8)
    used = sum(length + steps for length in lengths)
    written = ~selector.keys.float().isnan().all(2)
    assert written.sum(1).tolist() == [0, 0, used]  # in this layer alone, and nobody else's


def decoder(dtype: torch.dtype = torch.float32, **changes) -> Decoder:
    return make_tiny_decoder(dtype, **changes)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_most_selections_are_no_near_ties(dtype, fp8):
    """So the comparison above is one of positions; here with a longer context and other weights,
    where nothing is an integer in fp32.
    """
    model, exact = decoder(dtype), 0
    for seed in range(6):
        make, x = (whole_addon, inputs(60, seed, dtype))
        if dtype == torch.float32:
            make, x = tiny_addon, torch.randn(60, HIDDEN, generator=torch.manual_seed(seed))
        addon = make(model, seed=seed, num_sinks=2, num_recent=3)
        selector = poisoned(
            addon, model, 16, max_model_len=64, index_dtype="fp8" if fp8 else "auto"
        )
        prefill(selector, 1, x[:-1])
        [positions] = decode(selector, [1], [x])
        exact += check(addon, positions, x, 16, fp8)
        expected = torch.tensor([naive_key(addon, x[s], s, fp8) for s in range(60)])
        assert_same_keys(keys_of(selector, 1, 60), expected, FP8 if fp8 else dtype)
    assert exact >= 5


@pytest.mark.parametrize("seq_len", [1, 2, 7, 8])
def test_k_of_at_least_s_reads_everything(seq_len):
    model = decoder()
    selector = poisoned(tiny_addon(model), model, 8)
    x = inputs(seq_len, 0)
    prefill(selector, 1, x[:-1])
    assert decode(selector, [1], [x]) == [[*range(seq_len)] + [-1] * (8 - seq_len)]


def test_what_is_always_read_counts_inside_k():
    """K of them: nothing is left for scores. One more: the best of the others."""
    model, x = decoder(), inputs(30, 0)
    addon = whole_addon(model, num_sinks=3, num_recent=4)
    always = [0, 1, 2, 26, 27, 28, 29]
    for top_k in (7, 8):
        selector = poisoned(addon, model, top_k)
        prefill(selector, 0, x[:-1])
        [selected] = decode(selector, [0], [x])
        assert set(always) <= set(selected) and len(set(selected)) == top_k
        assert (selected == always) == (top_k == 7)
        assert check(addon, selected, x, top_k)


def with_keys_of(addon: Addon, gain: Tensor, bias: Tensor) -> Addon:
    """The same, with another LayerNorm of the keys."""
    prefix = f"model.layers.{LAYER}.self_attn.indexer.k_norm"
    addon.tensors[f"{prefix}.weight"].copy_(gain)
    addon.tensors[f"{prefix}.bias"].copy_(bias)
    return addon


@pytest.mark.parametrize("bias, kernels", [(0.0, False), (1.0, False), (-1.0, False), (1.0, True)])
def test_equal_keys_go_to_the_lowest_positions(bias, kernels):
    """Without gain and with a bias beyond what is rotated, all keys are the same."""
    model = decoder()
    biases = torch.zeros(16)
    biases[8:] = bias
    addon = with_keys_of(whole_addon(model), torch.zeros(16), biases)
    for top_k, seq_len in [(3, 40), (8, 40), (8, 9), (20, 47)]:
        selector = poisoned(addon, model, top_k, kernels=kernels)
        x = inputs(seq_len, seq_len)
        prefill(selector, 2, x[:-1])
        assert decode(selector, [2], [x]) == [
            [*range(top_k - 2), seq_len - 2, seq_len - 1]  # one sink, two recent ones
        ]


@pytest.mark.parametrize("seed, kernels", [(1, False), (8, False), (1, True)])
def test_two_kinds_of_keys(seed, kernels):
    """All of the better kind first, as many of the other as there is room for, from the lowest."""
    model = decoder()
    gain = torch.zeros(16)
    gain[8:] = 1.0
    addon = with_keys_of(whole_addon(model), gain, torch.zeros(16))
    kinds = inputs(2, seed)
    better = [5, 17, 18, 30, 33]
    x = kinds[[int(s in better) for s in range(40)]]
    scores = naive_scores(addon, x)
    assert len({round(score, 6) for score in scores}) == 2 and scores[5] != scores[4]
    others = [s for s in range(1, 38) if s not in better]
    wanted = better + others if scores[5] > scores[4] else others + better
    for top_k in (4, 8, 12, 37):
        selector = poisoned(addon, model, top_k, kernels=kernels)
        prefill(selector, 1, x[:-1])
        expected = sorted([0, 38, 39, *wanted[: top_k - 3]])
        assert decode(selector, [1], [x]) == [expected]


scores_of_a_row = st.lists(
    st.sampled_from([-math.inf, -2.0, -1.0, -0.0, 0.0, 1.0, 1.0 + 2**-23, math.inf]),
    min_size=1,
    max_size=30,
)


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(rows=st.lists(scores_of_a_row, min_size=1, max_size=4), top_k=st.integers(1, 34))
def test_top_k_positions(rows, top_k):
    """Few different scores, so many ties; rows of different lengths."""
    width = max(map(len, rows))
    scores = torch.tensor([row + [-math.inf] * (width - len(row)) for row in rows])
    seq_lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    expected = []
    for row in rows:
        best = sorted(sorted(range(len(row)), key=lambda s: (-row[s], s))[:top_k])  # noqa: B023
        expected.append(best + [-1] * (top_k - len(best)))
    positions = top_k_positions(scores, seq_lens, top_k)
    assert positions.dtype == torch.int32 and positions.tolist() == expected


def test_rotate_turns_the_first_numbers_only():
    """By halves: number j with j + rope_dim / 2."""
    x = torch.randn(3, 2, 6, generator=torch.manual_seed(0))
    out = rotate(x, rope_angles(8, 4, 100.0)[torch.tensor([0, 1, 7])])
    for t, position in enumerate([0, 1, 7]):
        for head in range(2):
            expected = turned(x[t, head].tolist(), position, 4, 100.0)
            assert_near(out[t, head], torch.tensor(expected), 1e-6)
    assert_same_bits(out[0], x[0])
    assert_same_bits(out[:, :, 4:], x[:, :, 4:])


def test_angles_far_out():
    """Position 1,000,000 is turned by that angle, not by one that float32 made of it."""
    angles = rope_angles(70_000, 8, 10_000.0)
    assert angles.shape == (70_000, 2, 4) and angles.dtype == torch.float32
    for position in (0, 1, 65_535, 65_536, 69_999):
        for j in range(4):
            angle = position * 10_000.0 ** (-j / 4)
            expected = torch.tensor([math.cos(angle), math.sin(angle)])
            assert_near(angles[position, :, j], expected, 1e-7)


# -- the state --------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_by_token_equals_all_at_once(dtype, fp8):
    """Integers, so the matrix product does not depend on how many rows it has: the same bits."""
    model, x = decoder(dtype), inputs(30, 4, dtype)
    addon = whole_addon(model)
    states = []
    for prompt, chunks in [(29, ()), (29, (1, 7, 20)), (1, ())]:
        selector = poisoned(addon, model, 8, index_dtype="fp8" if fp8 else "auto")
        prefill(selector, 1, x[:prompt], chunks)
        for length in range(prompt + 1, 31):
            selected = decode(selector, [1], [x[:length]])
        states.append((selector, selected))
    for selector, selected in states[1:]:
        assert_same_bits(selector.keys, states[0][0].keys)
        assert selected == states[0][1]
        if fp8:
            assert_same_bits(selector.scales, states[0][0].scales)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_row_that_is_taken_over(kernels):
    """By a shorter request, then by one in other positions of the state: as if it were the first.
    Nothing is read beyond its own length.
    """
    model = decoder()
    addon = whole_addon(model)
    selector = poisoned(addon, model, 8, {1: 47}, kernels=kernels, num_positions=60)
    long, short, other = inputs(47, 1), inputs(20, 2), inputs(31, 3)
    prefill(selector, 1, long[:-1])
    decode(selector, [1], [long])
    selector.release(1)
    selector.admit(0, 31)
    selector.admit(1, 20)
    assert selector.extents.extent_of(1) == (31, 51)
    prefill(selector, 0, other[:-1])
    prefill(selector, 1, short[:-1])
    selected = decode(selector, [1, 0], [short, other], padding=1)
    assert check(addon, selected[0], short, 8) and check(addon, selected[1], other, 8)


def test_each_request_as_if_alone():
    """In a batch with others and with padding, in whatever row: the same lists."""
    model = decoder()
    addon = whole_addon(model)
    histories = [inputs(length, length) for length in (41, 9, 28)]
    together = poisoned(addon, model, 8)
    for row, x in zip([2, 0, 1], histories, strict=True):
        prefill(together, row, x[:-1])
    selected = decode(together, [2, 0, 1], histories, padding=2)
    for row, x, positions in zip([0, 1, 0], histories, selected, strict=True):
        alone = poisoned(addon, model, 8)
        prefill(alone, row, x[:-1])
        assert decode(alone, [row], [x]) == [positions]
        assert check(addon, positions, x, 8)


@pytest.mark.parametrize("kernels", [False, True])
def test_padding_alone(kernels):
    model = decoder()
    selector = poisoned(tiny_addon(model), model, 8, kernels=kernels)
    batch = Batch.make([], [], CPU, padding=2)
    x = torch.full((2, HIDDEN), math.nan)
    assert selector.select(LAYER, inputs_of(x=x), batch).tolist() == [[-1] * 8] * 2
    assert selector.keys.isnan().all()


def test_a_short_request_at_the_end_of_the_pool():
    """The batch has a longer one: nothing beyond the state is read."""
    model = decoder()
    addon = whole_addon(model)
    selector = poisoned(addon, model, 8, {1: 40, 0: 10}, num_positions=50)
    assert selector.extents.first.tolist() == [40, 0, 0] and selector.extents.num_free == 0
    short, long = inputs(10, 1), inputs(40, 2)
    prefill(selector, 0, short[:-1])
    prefill(selector, 1, long[:-1])
    selected = decode(selector, [0, 1], [short, long])
    assert check(addon, selected[0], short, 8) and check(addon, selected[1], long, 8)


def test_layers_that_share_have_no_state():
    """A prompt leaves nothing there; anchors find theirs."""
    model = decoder()
    selector = poisoned(tiny_addon(model, "dsa-shared", (0, 2)), model, 8)
    assert selector.anchor_of == (0, 0, 2) and len(selector.keys) == 2
    x = inputs_of(x=inputs(5, 0))
    selector.write_prompt(1, 0, 0, x)
    assert selector.keys.isnan().all()
    for layer, index in [(0, 0), (2, 1)]:
        selector.write_prompt(layer, 0, 0, x)
        assert (~selector.keys.isnan()).any(2).sum(1)[index] == 5
    assert not torch.equal(selector.keys[0].nan_to_num(), selector.keys[1].nan_to_num())


def test_no_room():
    model = decoder()
    selector = DSASelector(
        tiny_addon(model), model, top_k=8, max_requests=3, max_model_len=48, num_positions=60
    )
    assert selector.longest_request == (60, "the selector's state", "--hbm-budget-gib")
    selector.admit(0, 48)
    message = "the selector's state has 12 of 60 positions free, 13 .* for 13 tokens; .*--hbm"
    with pytest.raises(ValueError, match=message):
        selector.admit(1, 13)
    selector.admit(1, 12)


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_select_what_torch_does(dtype, fp8, device):
    """Prompts in chunks, steps with padding, a row that is taken over; keys to one rounding."""
    options = {
        "rows": {2: 160, 0: 160, 1: 160},
        "index_dtype": "fp8" if fp8 else "auto",
        "max_requests": 4,
        "max_model_len": 160,
    }
    models = [decoder(dtype), decoder(dtype, device=device)]
    addon = whole_addon(models[0])
    selectors = [
        poisoned(addon, model, 8, kernels=kernels, **options)
        for model, kernels in zip(models, [False, True], strict=True)
    ]
    lengths = {2: 40, 0: 5, 1: 140 if device == "cuda" else 70}
    histories = {row: inputs(160, row, dtype) for row in lengths}
    exact, steps = 0, 3 if device == "cpu" else 15
    for step in range(steps):
        if step == 2:
            lengths[2], histories[2] = 12, inputs(160, 7, dtype)
            for selector in selectors:
                selector.release(2)
                selector.admit(2, 160)
        for row, length in lengths.items():
            if step == 0 or (step == 2 and row == 2):
                for selector in selectors:
                    x = histories[row][:length].to(selector.keys.device)
                    prefill(selector, row, x, (3, 30))
        lengths = {row: length + 1 for row, length in lengths.items()}
        now = [histories[row][:length] for row, length in lengths.items()]
        answers = [
            decode(selector, list(lengths), [x.to(selector.keys.device) for x in now], padding=1)
            for selector in selectors
        ]
        for x, ours, theirs in zip(now, *answers, strict=True):
            if check(addon, theirs, x, 8, fp8):
                assert ours == theirs
                exact += 1
        for row, length in lengths.items():
            ours, theirs = (keys_of(selector, row, length).cpu() for selector in selectors)
            assert_same_keys(theirs, ours, FP8 if fp8 else dtype)
    assert exact >= 2 * steps


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_model_len, top_k", [(41, 8), (9000, 32), (8, 16)])
def test_size_is_what_is_made(dtype, fp8, kernels, max_model_len, top_k):
    """For as many rows as one likes, and for positions that are fewer than rows would fill."""
    model = decoder(dtype)
    for selector, num_anchors in [("dsa", 3), ("dsa-shared", 2)]:
        addon = tiny_addon(model, selector)
        size = DSASelector.size(
            addon,
            dtype=dtype,
            index_dtype="fp8" if fp8 else "auto",
            top_k=top_k,
            max_model_len=max_model_len,
            kernels=kernels,
        )
        assert isinstance(size, SelectorSize) and size.unit_tokens == 1
        assert size.unit_bytes == num_anchors * (16 + 4 if fp8 else 16 * dtype.itemsize)
        for rows, num_positions in [(1, None), (3, None), (4, 50)]:
            made = DSASelector(
                addon,
                model,
                top_k=top_k,
                max_requests=rows,
                max_model_len=max_model_len,
                num_positions=num_positions,
                index_dtype="fp8" if fp8 else "auto",
                kernels=kernels,
            )
            units = rows * max_model_len if num_positions is None else num_positions
            expected = units * size.unit_bytes + rows * size.row_bytes + size.fixed_bytes
            assert made.state_bytes == expected
            angles = max_model_len * 2 * 4 * 4  # cos and sin, of 4 angles, in float32
            rest = expected - made.keys.nbytes - made.extents.first.nbytes
            rest -= made.scales.nbytes if fp8 else 0
            assert rest > angles if kernels else rest == angles
