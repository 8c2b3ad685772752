"""Guards: a record that attention should not see but does (padding, NaN in unused slots, the
future), heads that read the wrong KV head, bits that depend on where records lie, and branches that
read or weigh each other's part.

The oracle is dense: float64 scores of all records of a request, -inf where they are not selected.
Tolerances, inputs being standard normal: fp32 2e-6 and bf16 2e-2, absolute. The two ways to the
same sum are not equal bit for bit; the same way from other slots is (`torch.equal`).
"""

import pytest
import torch
from rig import assert_near, assert_same_bits
from torch import Tensor

from minihisparse.attention import (
    Branches,
    causal_attention,
    decode_attention,
    gated_attention,
    gated_sum,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_group = pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(1, 1), (2, 2), (4, 2), (6, 2), (9, 3), (5, 1)]
)
HEAD_DIM = 8


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_attention(q: Tensor, records: Tensor, mask: Tensor) -> Tensor:
    """Softmax over all N records in float64; q [T, Hq, D], records [N, W], mask [T, N] bool."""
    q, records = q.double(), records.double()
    num_heads, head_dim = q.shape[1:]
    k, v = records.view(len(records), 2, -1, head_dim).unbind(1)  # [N, Hkv, D] each
    group = num_heads // k.shape[1]
    out = torch.empty_like(q)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T / head_dim**0.5  # [T, N]
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        out[:, head] = weights @ v[:, head // group]
    return out


def dense_decode(q: Tensor, records: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Request by request, over all slots of its row [max_requests, slots, W]; unread ones count as
    0, not NaN.
    """
    outputs = []
    for index, row in enumerate(rows.tolist()):
        read = [slot for slot in slots[index].tolist() if slot >= 0]
        mask = torch.zeros(1, records.shape[1], dtype=torch.bool)
        mask[0, read] = True
        known = torch.where(mask.T, records[row], 0)
        outputs.append(dense_attention(q[index : index + 1], known, mask)[0])
    return torch.stack(outputs)


def decode(q: Tensor, records: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`decode_attention` over records [max_requests, slots, W], as a cache would call it."""
    return decode_attention(q, records.flatten(0, 1), slots, rows * records.shape[1])


def poisoned_records(num_kv_heads: int, slots: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[5, 11, W]: a record in each slot that is read, NaN in all others."""
    records = torch.full((5, 11, 2 * num_kv_heads * HEAD_DIM), torch.nan, dtype=dtype)
    for index, row in enumerate(rows.tolist()):
        read = slots[index][slots[index] >= 0]
        records[row, read] = random_tensor(row, len(read), records.shape[2], dtype=dtype)
    return records


SLOTS = torch.tensor(
    [
        [3, 0, 10, 7, 1, 5],  # full
        [2, 4, 9, -1, -1, -1],  # padded
        [-1, 8, -1, -1, 6, -1],  # holes
        [0, -1, -1, -1, -1, -1],  # one record
    ],
    dtype=torch.int32,
)
ROWS = torch.tensor([4, 1, 0, 3])


# -- decode -----------------------------------------------------------------------------------


@every_dtype
@every_group
def test_decode_equals_dense(num_heads, num_kv_heads, dtype):
    """With NaN in every slot that is not read, the one that -1 would wrap to among them."""
    records = poisoned_records(num_kv_heads, SLOTS, ROWS, dtype)
    q = random_tensor(99, len(ROWS), num_heads, HEAD_DIM, dtype=dtype)
    out = decode(q, records, SLOTS, ROWS)
    assert out.dtype == dtype
    assert_near(out, dense_decode(q, records, SLOTS, ROWS), TOLERANCE[dtype])


@every_dtype
def test_one_record_is_its_value(dtype):
    """A softmax over one score is 1, whatever the score."""
    records = poisoned_records(2, SLOTS, ROWS, dtype)
    q = random_tensor(1, len(ROWS), 4, HEAD_DIM, dtype=dtype) * 100
    out = decode(q, records, SLOTS, ROWS)[3]
    value = records[3, 0].view(2, 2, HEAD_DIM)[1]
    assert_same_bits(out, value.repeat_interleave(2, dim=0))


@every_dtype
def test_a_row_without_slots_gives_zeros(dtype):
    """A padded row, beside real ones; its request row is all NaN, slot 0 included."""
    slots = torch.cat([SLOTS, torch.full((2, SLOTS.shape[1]), -1, dtype=torch.int32)])
    rows = torch.cat([ROWS, torch.tensor([2, 2])])
    records = poisoned_records(2, SLOTS, ROWS, dtype)
    q = random_tensor(1, len(rows), 4, HEAD_DIM, dtype=dtype)
    out = decode(q, records, slots, rows)
    assert out[4:].eq(0).all()
    assert_near(out[:4], dense_decode(q[:4], records, SLOTS, ROWS), TOLERANCE[dtype])
    alone = decode(q[4:], records, slots[4:], rows[4:])
    assert alone.eq(0).all()


@every_dtype
@every_group
def test_other_slots_of_another_buffer_give_the_same_bits(num_heads, num_kv_heads, dtype):
    """Level 1 of exactness: the same records in the same order, N, rows and garbage differ."""
    generator = torch.Generator().manual_seed(0)
    records = poisoned_records(num_kv_heads, SLOTS, ROWS, dtype)
    q = random_tensor(99, len(ROWS), num_heads, HEAD_DIM, dtype=dtype)
    expected = decode(q, records, SLOTS, ROWS)
    for num_slots, garbage in [(11, 1.0), (12, torch.inf), (400, torch.nan)]:
        moved = torch.full((7, num_slots, records.shape[2]), garbage, dtype=dtype)
        slots, rows = SLOTS.clone(), torch.randperm(7, generator=generator)[: len(ROWS)]
        for index in range(len(ROWS)):
            read = SLOTS[index] >= 0
            order = torch.randperm(num_slots, generator=generator)[: read.sum()]
            slots[index, read] = order.int()
            moved[rows[index], slots[index, read]] = records[ROWS[index], SLOTS[index, read]]
        assert torch.equal(decode(q, moved, slots, rows), expected), num_slots


def test_first_slots_of_ranges_of_different_lengths():
    """As FullCache gives them out: slot s of a request is first_slots + s, whatever lies beside."""
    records = poisoned_records(2, SLOTS, ROWS, torch.float32)
    q = random_tensor(99, len(ROWS), 4, HEAD_DIM)
    expected = decode(q, records, SLOTS, ROWS)
    lengths = (SLOTS.max(dim=1).values + 1).tolist()
    flat, first_slots = [torch.full((3, records.shape[2]), torch.nan)], []
    for index in (2, 0, 3, 1):
        first_slots.append((index, sum(map(len, flat))))
        flat.append(records[ROWS[index], : lengths[index]])
    first_slots = torch.tensor([start for _, start in sorted(first_slots)])
    assert torch.equal(decode_attention(q, torch.cat(flat), SLOTS, first_slots), expected)


def test_the_model_size_of_smollm2():
    """9 query heads on 3 KV heads of 64, K = 256 of 512 slots: the same claims at a real size."""
    generator = torch.Generator().manual_seed(0)
    records = random_tensor(0, 2, 513, 2 * 3 * 64)
    slots = torch.stack([torch.randperm(513, generator=generator)[:256] for _ in range(2)])
    slots = slots.int()
    slots[1, 200:] = -1
    rows, q = torch.tensor([1, 0]), random_tensor(1, 2, 9, 64)
    out = decode(q, records, slots, rows)
    assert_near(out, dense_decode(q, records, slots, rows), TOLERANCE[torch.float32])
    order = torch.randperm(513, generator=generator)
    moved = torch.empty_like(records)
    moved[:, order] = records
    moved_slots = torch.where(slots >= 0, order[slots.clamp(min=0)].int(), -1)
    assert torch.equal(decode(q, moved, moved_slots, rows), out)


def test_large_scores_do_not_overflow():
    records = poisoned_records(2, SLOTS, ROWS, torch.float32) * 1e4
    q = random_tensor(1, len(ROWS), 4, HEAD_DIM) * 1e4
    out = decode(q, records, SLOTS, ROWS)
    assert_near(out / 1e4, dense_decode(q, records, SLOTS, ROWS) / 1e4, TOLERANCE[torch.float32])


def test_decode_changes_no_argument():
    records = poisoned_records(2, SLOTS, ROWS, torch.float32)
    q, first_slots = random_tensor(1, len(ROWS), 4, HEAD_DIM), ROWS * records.shape[1]
    arguments = [q, records.flatten(0, 1), SLOTS.clone(), first_slots]
    copies = [argument.clone() for argument in arguments]
    decode_attention(*arguments)
    for argument, copy in zip(arguments, copies, strict=True):
        assert_same_bits(argument, copy)


# -- gated branches ---------------------------------------------------------------------------


def random_branches(num_heads: int, dtype: torch.dtype) -> Branches:
    """Of SLOTS: overlapping parts, a row whose window has none, padding that claims to be read."""
    generator = torch.Generator().manual_seed(5)
    selected = torch.rand(SLOTS.shape, generator=generator) < 0.6
    window = torch.rand(SLOTS.shape, generator=generator) < 0.5
    selected[1], window[1], selected[3] = True, False, True
    return Branches(
        compressed=random_tensor(6, len(ROWS), num_heads, HEAD_DIM, dtype=dtype),
        selected=selected,
        window=window,
        gates=torch.rand(len(ROWS), num_heads, 3, generator=generator),
    )


@every_dtype
@every_group
def test_gated_branches_equal_dense(num_heads, num_kv_heads, dtype):
    """Each branch has a softmax of its own over its part; one without any gives nothing."""
    records = poisoned_records(num_kv_heads, SLOTS, ROWS, dtype)
    q = random_tensor(99, len(ROWS), num_heads, HEAD_DIM, dtype=dtype)
    branches = random_branches(num_heads, dtype)
    out = gated_attention(lambda slots: decode(q, records, slots, ROWS), SLOTS, branches)
    assert out.dtype == dtype
    outputs = [branches.compressed.double()]
    for read in (branches.selected, branches.window):
        pairs = zip(SLOTS.tolist(), read.tolist(), strict=True)
        kept = [[s if r else -1 for s, r in zip(*row, strict=True)] for row in pairs]
        outputs.append(dense_decode(q, records, torch.tensor(kept).int(), ROWS).nan_to_num(0))
    expected = torch.zeros_like(outputs[0])
    for branch, output in enumerate(outputs):
        for row in range(len(ROWS)):
            for head in range(num_heads):
                expected[row, head] += branches.gates[row, head, branch] * output[row, head]
    assert_near(out, expected, 2 * TOLERANCE[dtype])


def test_branches_do_not_touch_the_slots():
    slots, branches = SLOTS.clone(), random_branches(4, torch.float32)
    seen = []

    def attend(part: Tensor) -> Tensor:
        assert part.dtype == torch.int32 and part.is_contiguous()  # as the kernel wants it
        seen.append(part)
        return torch.ones(len(ROWS), 4, HEAD_DIM)

    gated_attention(attend, slots, branches)
    assert torch.equal(slots, SLOTS) and not torch.equal(*seen)


def test_gated_sum_is_made_in_float32():
    """Not in the branches' bf16, where 256 + 1 is 256."""
    outputs = [torch.full((1, 1, 2), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert gated_sum(outputs, torch.ones(1, 1, 3)).tolist() == [[[258.0, 258.0]]]


# -- causal -----------------------------------------------------------------------------------


def causal_mask(num_tokens: int, num_keys: int) -> Tensor:
    """[T, N] bool: token t, at position N - T + t, sees the positions up to its own."""
    mask = torch.zeros(num_tokens, num_keys, dtype=torch.bool)
    for t in range(num_tokens):
        mask[t, : num_keys - num_tokens + t + 1] = True
    return mask


@every_dtype
@every_group
@pytest.mark.parametrize("num_tokens, num_keys", [(13, 13), (5, 13), (1, 13), (12, 13), (1, 1)])
def test_causal_equals_dense(num_tokens, num_keys, num_heads, num_kv_heads, dtype):
    """T == N, T < N, T = 1."""
    records = random_tensor(0, num_keys, 2 * num_kv_heads * HEAD_DIM, dtype=dtype)
    q = random_tensor(1, num_tokens, num_heads, HEAD_DIM, dtype=dtype)
    out = causal_attention(q, records)
    assert out.dtype == dtype
    expected = dense_attention(q, records, causal_mask(num_tokens, num_keys))
    assert_near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunks_equal_the_whole_prompt(chunk):
    """As prefill calls it: each chunk with the records up to its own end, nothing beyond."""
    records, q = random_tensor(0, 100, 2 * 2 * HEAD_DIM), random_tensor(1, 100, 4, HEAD_DIM)
    whole = causal_attention(q, records)
    parts = []
    for start in range(0, 100, chunk):
        end = min(start + chunk, 100)
        parts.append(causal_attention(q[start:end], records[:end]))
    assert_near(torch.cat(parts), whole, TOLERANCE[torch.float32])


def test_the_future_does_not_matter():
    """Large records after a token leave it as it was; the last token does see them."""
    records, q = random_tensor(0, 20, 2 * 2 * HEAD_DIM), random_tensor(1, 20, 4, HEAD_DIM)
    changed = records.clone()
    changed[12:] *= 1e3
    before, after = causal_attention(q, records), causal_attention(q, changed)
    assert torch.equal(before[:12], after[:12])
    assert not torch.equal(before[12:], after[12:])


def test_causal_and_decode_agree():
    """A prompt's last token, and the same token as a decode step that reads everything."""
    records, q = random_tensor(0, 11, 2 * 2 * HEAD_DIM), random_tensor(1, 1, 4, HEAD_DIM)
    slots = torch.arange(11, dtype=torch.int32)[None]
    decoded = decode_attention(q, records, slots, torch.tensor([0]))
    assert_near(decoded, causal_attention(q, records), TOLERANCE[torch.float32])
