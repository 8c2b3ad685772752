"""Guards: page bounds that miss a key or keep a dead request's, heads that are mixed up, a list of
positions that is not ascending, not whole pages or not the same twice, and padding that writes.

The oracle computes Quest in plain Python floats, one head, page and element at a time.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rig import assert_same_bits, inputs_of
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.quest import QuestSelector

CPU = torch.device("cpu")
LAYER = 1  # of two: the other one must stay as it is


def naive_scores(keys: Tensor, q: Tensor, page_size: int) -> list[float]:
    """One score per page: softmax over pages of each query head's upper bound, summed over heads.

    keys [S, Hkv, D], q [Hq, D]. Query head h reads KV head h // (Hq / Hkv).
    """
    keys, q = keys.tolist(), q.tolist()
    group = len(q) // len(keys[0])
    pages = [keys[start : start + page_size] for start in range(0, len(keys), page_size)]
    scores = [0.0] * len(pages)
    for head, query in enumerate(q):
        bounds = []
        for page in pages:
            bound = 0.0
            for d, q_d in enumerate(query):
                values = [key[head // group][d] for key in page]
                bound += max(q_d * max(values), q_d * min(values))
            bounds.append(bound / math.sqrt(len(query)))
        weights = [math.exp(bound - max(bounds)) for bound in bounds]
        for page, weight in enumerate(weights):
            scores[page] += weight / sum(weights)
    return scores


def naive_select(scores: list[float], seq_len: int, top_k: int, page_size: int) -> list[int]:
    """The newest page and the best others, ties to the lowest; K positions, -1 at the end."""
    newest = len(scores) - 1
    best = sorted(range(newest), key=lambda page: (-scores[page], page))
    pages = sorted([newest, *best[: top_k // page_size - 1]])
    positions = [page * page_size + offset for page in pages for offset in range(page_size)]
    positions = [position for position in positions if position < seq_len]
    return positions + [-1] * (top_k - len(positions))


def margin(scores: list[float], top_k: int, page_size: int) -> float:
    """Between the last page that is selected and the first that is not."""
    best = sorted(scores[:-1], reverse=True)
    last = top_k // page_size - 1
    return best[last - 1] - best[last] if 0 < last < len(best) else math.inf


def make_selector(**changes) -> QuestSelector:
    """Two layers; all bounds NaN, so that whatever nobody wrote shows. The last request row has the
    first pages, and so on: no page is right by accident.
    """
    options = {
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "top_k": 8,
        "page_size": 4,
        "max_requests": 3,
        "max_model_len": 64,
        "dtype": torch.float32,
        "device": CPU,
    }
    options |= changes
    selector = QuestSelector(**options)
    selector.bounds.fill_(torch.nan)
    for row in reversed(range(options["max_requests"])):
        if selector.extents.num_free:
            selector.admit(row, options["max_model_len"])
    return selector


def bounds_of(selector: QuestSelector, row: int, num_pages: int | None = None) -> Tensor:
    """The bounds [pages, Hkv, 2, D] of a request's first pages; None: of all that it owns."""
    start, end = selector.extents.extent_of(row)
    assert num_pages is None or num_pages <= end - start
    return selector.bounds[LAYER, start : end if num_pages is None else start + num_pages]


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choose(selector: QuestSelector, q: Tensor, batch: Batch) -> Tensor:
    return selector.select(LAYER, inputs_of(q=q), batch)


def decode(selector: QuestSelector, rows: list[int], keys: list[Tensor], padding: int = 0) -> Batch:
    """Adds the last key of each request; keys [S, Hkv, D] each. Padded rows bring NaN."""
    batch = Batch.make(rows, [len(history) for history in keys], CPU, padding)
    newest = [history[-1] for history in keys]
    newest += [torch.full_like(newest[0], torch.nan)] * padding
    selector.write(LAYER, inputs_of(torch.stack(newest)), batch)
    return batch


def rebuilt(keys: Tensor, selector: QuestSelector) -> Tensor:
    """The bounds [pages, Hkv, 2, D] of keys [S, Hkv, D], by the definition."""
    pages = keys.split(selector.page_size)
    bounds = [torch.stack([page.max(0).values, page.min(0).values], dim=1) for page in pages]
    return torch.stack(bounds)


@pytest.mark.parametrize("chunks", [[30], [1] * 30, [4, 8, 18], [3, 1, 5, 7, 14], [13, 2, 15]])
def test_a_prompt_in_chunks(chunks):
    """Wherever a chunk begins and ends, inside a page or at its edge."""
    selector, keys = make_selector(), random_tensor(0, 30, 2, 4)
    for first, chunk in zip(torch.tensor([0, *chunks]).cumsum(0).tolist(), chunks, strict=False):
        selector.write_prompt(LAYER, 1, first, inputs_of(keys[first : first + chunk]))
    assert_same_bits(bounds_of(selector, 1, 8), rebuilt(keys, selector))
    assert selector.bounds[1 - LAYER].isnan().all()


# -- what is selected -------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, database=None, max_examples=120)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    num_pages_read=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([2, 5]),
    seq_len=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_quest_equals_the_naive_one(
    page_size, num_pages_read, num_kv_heads, group, head_dim, seq_len, dtype, seed
):
    """All keys but the last come as a prompt. bf16 keys are exact in the oracle's floats too."""
    top_k = page_size * num_pages_read
    selector = make_selector(
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        top_k=top_k,
        page_size=page_size,
        max_model_len=100,
        dtype=dtype,
    )
    keys = random_tensor(seed, seq_len, num_kv_heads, head_dim, dtype=dtype)
    q = random_tensor(seed + 1, num_kv_heads * group, head_dim, dtype=dtype) * 2
    scores = naive_scores(keys, q, page_size)
    assume(margin(scores, top_k, page_size) > 1e-5)  # closer ones float32 may order either way

    if seq_len > 1:
        selector.write_prompt(LAYER, 2, 0, inputs_of(keys[:-1]))
    batch = decode(selector, [2], [keys])
    selected = choose(selector, q[None], batch)
    assert selected.shape == (1, top_k) and selected.dtype == torch.int32
    assert selected[0].tolist() == naive_select(scores, seq_len, top_k, page_size)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    num_pages_read=st.integers(1, 5),
    seq_len=st.integers(1, 90),
    seed=st.integers(0, 2**16),
)
def test_the_list_is_ascending_unique_and_of_whole_pages(page_size, num_pages_read, seq_len, seed):
    top_k = page_size * num_pages_read
    selector = make_selector(top_k=top_k, page_size=page_size, max_model_len=90)
    keys = random_tensor(seed, seq_len, 2, 4)
    selector.write_prompt(LAYER, 0, 0, inputs_of(keys))
    batch = Batch.make([0], [seq_len], CPU)
    [selected] = selector.select(
        LAYER, inputs_of(q=random_tensor(seed + 1, 1, 4, 4)), batch
    ).tolist()
    listed = [position for position in selected if position != -1]
    assert selected == listed + [-1] * (top_k - len(listed))
    assert listed == sorted(set(listed)) and listed[0] >= 0
    assert listed[-1] == seq_len - 1  # the newest is always read
    for page in {position // page_size for position in listed}:
        whole = range(page * page_size, min((page + 1) * page_size, seq_len))
        assert set(whole) <= set(listed)
    total = -(-seq_len // page_size)
    assert len({position // page_size for position in listed}) == min(num_pages_read, total)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seq_len", [1, 3, 4, 15, 16, 17, 31, 32])
def test_k_of_at_least_s_reads_everything(page_size, seq_len):
    selector = make_selector(top_k=32, page_size=page_size)
    selector.write_prompt(LAYER, 1, 0, inputs_of(random_tensor(0, seq_len, 2, 4)))
    batch = Batch.make([1], [seq_len], CPU)
    selected = choose(selector, random_tensor(1, 1, 4, 4), batch)
    assert selected.tolist() == [[*range(seq_len)] + [-1] * (32 - seq_len)]


def test_ties_go_to_the_lowest_positions():
    """Equal keys everywhere, in a list long enough for a sort that is not stable; any query."""
    selector = make_selector(num_q_heads=2, top_k=4, page_size=1, max_model_len=3000)
    selector.write_prompt(LAYER, 0, 0, inputs_of(torch.ones(3000, 2, 4)))
    for seq_len in (1, 2, 5, 17, 300, 3000):
        batch = Batch.make([0], [seq_len], CPU)
        for seed in range(3):
            selected = choose(selector, random_tensor(seed, 1, 2, 4), batch)
            first = [*range(min(seq_len - 1, 3))] + [seq_len - 1]
            assert selected.tolist() == [first + [-1] * (4 - len(first))]


def test_ties_behind_a_better_page():
    """Page 5 is best, 0 and the newest come with it, though 1 to 4 and 6 are as good as 0."""
    keys = torch.zeros(30, 2, 4)
    keys[20:24] = 1
    selector = make_selector(top_k=12)
    selector.write_prompt(LAYER, 0, 0, inputs_of(keys))
    batch = Batch.make([0], [30], CPU)
    expected = [0, 1, 2, 3, 20, 21, 22, 23, 28, 29, -1, -1]
    assert choose(selector, torch.ones(1, 4, 4), batch).tolist() == [expected]


def test_a_negative_query_reads_the_minimum():
    """The page with the most negative key is best for q < 0, the worst for q > 0."""
    keys = torch.zeros(16, 1, 1)
    keys[1], keys[6], keys[9] = -2.0, -5.0, 3.0
    selector = make_selector(num_q_heads=1, num_kv_heads=1, head_dim=1, top_k=8)
    selector.write_prompt(LAYER, 0, 0, inputs_of(keys))
    batch = Batch.make([0], [16], CPU)
    for query, page in [(-1.0, 1), (1.0, 2)]:
        selected = choose(selector, torch.full((1, 1, 1), query), batch)[0].tolist()
        assert selected == [*range(4 * page, 4 * page + 4), 12, 13, 14, 15]


def test_query_heads_read_their_own_kv_head():
    """Heads 0, 1 belong to KV head 0 (best page 1), heads 2, 3 to KV head 1 (best page 2)."""
    keys = torch.zeros(16, 2, 4)
    keys[4, 0], keys[8, 1] = 4.0, 4.0
    selector = make_selector(top_k=8)
    selector.write_prompt(LAYER, 0, 0, inputs_of(keys))
    batch = Batch.make([0], [16], CPU)
    for head in range(4):
        q = torch.zeros(1, 4, 4)
        q[0, head] = 1.0
        page = 1 + head // 2
        selected = choose(selector, q, batch)[0].tolist()
        assert selected == [*range(4 * page, 4 * page + 4), 12, 13, 14, 15]


# -- the state --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 16, 17])
def test_token_by_token_equals_all_at_once(page_size, prompt_len, dtype):
    """At every step, over page boundaries: the bounds of all pages written so far, to the bit."""
    selector = make_selector(page_size=page_size, top_k=page_size, dtype=dtype)
    keys = random_tensor(prompt_len, 40, 2, 4, dtype=dtype)
    selector.write_prompt(LAYER, 1, 0, inputs_of(keys[:prompt_len]))
    for seq_len in range(prompt_len, 41):
        if seq_len > prompt_len:
            decode(selector, [1], [keys[:seq_len]])
        num_pages = -(-seq_len // page_size)
        expected = rebuilt(keys[:seq_len], selector)
        assert_same_bits(bounds_of(selector, 1, num_pages), expected, f"S = {seq_len}")
        at_once = make_selector(page_size=page_size, top_k=page_size, dtype=dtype)
        at_once.write_prompt(LAYER, 1, 0, inputs_of(keys[:seq_len]))
        assert_same_bits(selector.bounds, at_once.bounds, f"S = {seq_len}, whole state")


@pytest.mark.parametrize("stale", [torch.inf, -torch.inf, torch.nan, 1e30])
def test_an_earlier_request_in_the_row_does_not_matter(stale):
    """Nor do pages between this request's end and the longest one's in the batch."""
    short, long = random_tensor(0, 12, 2, 4), random_tensor(1, 50, 2, 4)
    q = random_tensor(2, 2, 4, 4)
    answers = []
    for leftover in (0.0, stale):
        selector = make_selector(top_k=8)
        selector.bounds.fill_(leftover)
        selector.write_prompt(LAYER, 1, 0, inputs_of(short[:7]))
        selector.write_prompt(LAYER, 0, 0, inputs_of(long[:49]))
        for seq_len in range(8, 13):
            batch = decode(selector, [0, 1], [long, short[:seq_len]])
        answers.append(choose(selector, q, batch).tolist())
        assert_same_bits(bounds_of(selector, 1, 3), rebuilt(short, selector))
    assert answers[0] == answers[1]


def test_each_request_as_if_alone():
    """Three requests of different lengths, in rows that are not in order."""
    keys = [random_tensor(length, length, 2, 4) for length in (60, 9, 33)]
    q = random_tensor(0, 3, 6, 4)
    together = make_selector(num_q_heads=6)
    rows = [2, 0, 1]
    for row, history in zip(rows, keys, strict=True):
        together.write_prompt(LAYER, row, 0, inputs_of(history[:-1]))
    batch = decode(together, rows, keys)
    selected = choose(together, q, batch)
    for i, row in enumerate(rows):
        alone = make_selector(num_q_heads=6)
        alone.write_prompt(LAYER, row, 0, inputs_of(keys[i][:-1]))
        batch = decode(alone, [row], [keys[i]])
        assert selected[i].tolist() == choose(alone, q[i : i + 1], batch)[0].tolist()
        assert_same_bits(bounds_of(together, row), bounds_of(alone, row))
    assert together.bounds[1 - LAYER].isnan().all()


@pytest.mark.parametrize("padding", [1, 4])
def test_padded_rows_change_nothing(padding):
    """They point at row 0, have no length, and bring NaN: an all -1 list, and no state changed."""
    keys = [random_tensor(1, 10, 2, 4), random_tensor(2, 20, 2, 4)]
    q = random_tensor(3, 2, 4, 4)
    padded_q = torch.cat([q, torch.full((padding, 4, 4), torch.nan)])
    plain, padded = make_selector(), make_selector()
    for selector in (plain, padded):
        prompt = random_tensor(0, 5, 2, 4)
        selector.write_prompt(LAYER, 0, 0, inputs_of(prompt))  # not in the batch
        for row in (1, 2):
            selector.write_prompt(LAYER, row, 0, inputs_of(keys[row - 1][:-1]))
    without = choose(plain, q, decode(plain, [2, 1], keys[::-1]))
    selected = padded.select(
        LAYER, inputs_of(q=padded_q), decode(padded, [2, 1], keys[::-1], padding)
    )
    assert_same_bits(padded.bounds, plain.bounds)
    assert torch.equal(selected[:2], without) and selected[2:].eq(-1).all()


def test_a_batch_of_padding_alone():
    selector = make_selector()
    batch, nothing = Batch.make([], [], CPU, padding=2), torch.full((2, 4, 4), torch.nan)
    selector.write(LAYER, inputs_of(nothing[:, :2]), batch)
    assert choose(selector, nothing, batch).tolist() == [[-1] * 8] * 2
    assert selector.bounds.isnan().all()


def test_select_changes_nothing():
    selector = make_selector()
    keys = random_tensor(0, 30, 2, 4)
    selector.write_prompt(LAYER, 0, 0, inputs_of(keys))
    before, q, batch = (
        selector.bounds.clone(),
        random_tensor(1, 1, 4, 4),
        Batch.make([0], [30], CPU),
    )
    q_before = q.clone()
    first = choose(selector, q, batch)
    assert torch.equal(first, choose(selector, q, batch))
    assert_same_bits(selector.bounds, before)
    assert_same_bits(q, q_before)


def test_a_prompt_writes_its_own_pages_only():
    selector = make_selector()
    selector.write_prompt(LAYER, 1, 0, inputs_of(random_tensor(0, 9, 2, 4)))
    written = ~selector.bounds.isnan()
    start, _ = selector.extents.extent_of(1)
    assert written[LAYER, start : start + 3].all()
    assert written.sum() == 2 * 3 * 2 * 4  # heads, pages, max and min, head_dim


# -- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_bytes(dtype):
    """Two vectors per page, layer, request and KV head; a page that is begun counts whole. And
    where each request's pages begin.
    """
    selector = make_selector(max_model_len=61, dtype=dtype)
    assert selector.bounds.dtype == dtype
    assert selector.state_bytes == 2 * 3 * 2 * 16 * 2 * 4 * dtype.itemsize + 3 * 8
    smaller = QuestSelector(
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=4,
        top_k=8,
        page_size=4,
        max_requests=3,
        max_model_len=61,
        num_pages=20,
        dtype=dtype,
        device=CPU,
    )
    assert smaller.state_bytes == 2 * 20 * 2 * 2 * 4 * dtype.itemsize + 3 * 8


# -- pages of requests ------------------------------------------------------------------------


def test_pages_come_and_go():
    """A request takes what its length needs, in one piece; a refusal says how much there is."""
    selector = make_selector()
    for row in range(3):
        selector.release(row)
    assert selector.longest_request == (3 * 64, "the selector's state", "--hbm-budget-gib")
    for row, num_tokens in enumerate([64, 61, 33]):  # 16, 16 and 9 of 48 pages
        selector.admit(row, num_tokens)
    assert selector.extents.first.tolist() == [0, 16, 32] and selector.extents.num_free == 7
    selector.release(1)
    message = "the selector's state has 23 of 48 pages free, 17 .* for 65 tokens; .*--hbm-budget"
    with pytest.raises(ValueError, match=message):
        selector.admit(1, 65)
    selector.extents.check_integrity()
    assert selector.extents.owners == {0, 2} and selector.extents.first.tolist() == [0, 0, 32]
    selector.admit(1, 64)
    assert selector.extents.first.tolist() == [0, 16, 32]


def test_a_short_request_at_the_end_of_the_pool():
    """Its pages are the last ones, and the batch has a longer request: nothing beyond is read."""
    keys = [random_tensor(1, 7, 2, 4), random_tensor(2, 40, 2, 4)]
    q = random_tensor(3, 2, 4, 4)
    together, alone = (make_selector(max_requests=2, num_pages=12, max_model_len=48) for _ in "ab")
    for selector in (together, alone):
        selector.release(1)
        selector.admit(1, 40)
        selector.admit(0, 8)
        assert selector.extents.first.tolist() == [10, 0] and selector.extents.num_free == 0
        for row, history in enumerate(keys):
            selector.write_prompt(LAYER, row, 0, inputs_of(history[:-1]))
    selected = choose(together, q, decode(together, [0, 1], keys))
    for row in range(2):
        batch = decode(alone, [row], [keys[row]])
        assert torch.equal(selected[row], choose(alone, q[row : row + 1], batch)[0])
    assert_same_bits(together.bounds[LAYER], alone.bounds[LAYER])


def test_another_place_gives_the_same_list():
    """Pages of a request may lie anywhere: bounds and selection are the same bits."""
    keys, q = random_tensor(0, 30, 2, 4), random_tensor(1, 1, 4, 4)
    answers = []
    for row in range(3):
        selector = make_selector()
        selector.write_prompt(LAYER, row, 0, inputs_of(keys[:-1]))
        batch = decode(selector, [row], [keys])
        answers.append((choose(selector, q, batch), bounds_of(selector, row, 8).clone()))
    for positions, bounds in answers[1:]:
        assert torch.equal(positions, answers[0][0])
        assert_same_bits(bounds, answers[0][1])


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_select_what_torch_does(dtype, device):
    """Requests of a few and of many pages, padding, and a row that is taken over: at each step the
    bounds are the same bits and the lists the same numbers.
    """
    sizes = {"head_dim": 8, "top_k": 12, "page_size": 4, "max_requests": 4, "max_model_len": 320}
    selectors = [
        make_selector(**sizes, dtype=dtype, device=torch.device(where), kernels=kernels)
        for where, kernels in [("cpu", False), (device, True)]
    ]
    steps = 6 if device == "cpu" else 40
    lengths = {0: 2, 2: 21, 3: 270}
    keys = {row: random_tensor(row, 320, 2, 8, dtype=dtype) for row in lengths}
    num_compared = 0
    for step in range(steps):
        if step == 4:  # the longest one leaves, and a shorter one has its row
            lengths[3], keys[3] = 5, random_tensor(9, 320, 2, 8, dtype=dtype)
            for selector in selectors:
                selector.release(3)
                selector.admit(3, 300)
        for row, length in lengths.items():
            if step == 0 or (step == 4 and row == 3):
                for selector in selectors:
                    selector.write_prompt(
                        LAYER, row, 0, inputs_of(keys[row][:length].to(selector.bounds.device))
                    )
        lengths = {row: length + 1 for row, length in lengths.items()}
        rows = [3, 0, 2] if step % 2 else [2, 3, 0]
        q = random_tensor(100 + step, 4, 4, 8, dtype=dtype) * 2
        q[3] = torch.nan  # padding
        answers = []
        for selector in selectors:
            where = selector.bounds.device
            batch = Batch.make(rows, [lengths[row] for row in rows], where, padding=1)
            newest = torch.stack([keys[row][lengths[row] - 1] for row in rows])
            newest = torch.cat([newest, torch.full_like(newest[:1], torch.nan)])
            selector.write(LAYER, inputs_of(newest.to(where)), batch)
            answers.append(choose(selector, q.to(where), batch).cpu())
        assert_same_bits(selectors[1].bounds.cpu(), selectors[0].bounds, f"step {step}, bounds")
        assert answers[1].dtype == torch.int32 and answers[1].shape == (4, 12)
        for i, row in enumerate(rows):
            scores = naive_scores(keys[row][: lengths[row]], q[i], 4)
            if margin(scores, 12, 4) > 1e-5:  # closer ones may be ordered either way
                assert answers[1][i].tolist() == answers[0][i].tolist(), f"step {step}, row {row}"
                num_compared += 1
        assert answers[1][3].eq(-1).all()
    assert num_compared > 2 * steps


def test_kernels_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="head_dim=6: a head has 24 bytes, .* multiple of 16"):
        make_selector(head_dim=6, kernels=True)
    with pytest.raises(ValueError, match="num_q_heads=5 is not a multiple of num_kv_heads=2"):
        make_selector(num_q_heads=5, kernels=True)


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k, page_size", [(8, 16), (24, 16), (5, 2), (0, 4)])
def test_top_k_must_be_whole_pages(top_k, page_size):
    message = f"top_k={top_k} is not a multiple of page_size={page_size}.*--top-k or --page-size"
    with pytest.raises(ValueError, match=message):
        make_selector(top_k=top_k, page_size=page_size)
