"""Guards: kernel tests that pass here and fail on a GPU, because the simulator let something
through: an index or address out of range, a value cut off, memory that happens to be zero, a
missing barrier, a divergent one, a wrong mask, a wait for a block that cannot start. And the
opposite: results other than those of Numba's operations, errors that do not say where, greenlets
left behind, and slow runs.
"""

import gc
import inspect
import random
import time
import traceback
import warnings
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
import torch
from greenlet import greenlet

from minihisparse.kernels import device, simulator
from minihisparse.kernels.device import (
    cuda,
    device_function,
    fetch_inc_wrap,
    int16,
    int32,
    int64,
    ld4,
    ld4_host,
    ld16,
    ld16_host,
    load_acquire,
    st4,
    st16,
    store_release,
    uint32,
)
from minihisparse.kernels.simulator import GARBAGE, SimulationError, run

ALL = 0xFFFFFFFF
SEEDS = (None, *range(8))
every_seed = pytest.mark.parametrize("seed", SEEDS)


def ints(*shape: int, value: int = -99) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def line(kernel, text: str) -> int:
    """The number of the kernel's line that has the text."""
    lines, first = inspect.getsourcelines(kernel)
    [number] = [first + i for i, source in enumerate(lines) if text in source]
    return number


def message_of(kernel, grid: int, block: int, args: tuple, **options) -> str:
    with pytest.raises(SimulationError) as caught:
        run(kernel, grid, block, args, **options)
    return str(caught.value)


# -- where a thread is, and when it runs ------------------------------------------------------


@every_seed
def test_every_thread_knows_its_place_before_and_after_a_scheduling_point(seed):
    def kernel(out):
        at = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        out[at, 0] = cuda.gridDim.x
        out[at, 1] = cuda.laneid
        cuda.syncthreads()
        out[at, 2] = cuda.blockIdx.x
        out[at, 3] = cuda.threadIdx.x
        cuda.nanosleep(100)
        out[at, 4] = cuda.laneid
        out[at, 5] = cuda.warpsize
        out[at, 6] = cuda.threadIdx.y + cuda.threadIdx.z + cuda.blockIdx.y + cuda.blockIdx.z
        out[at, 7] = cuda.blockDim.y + cuda.blockDim.z + cuda.gridDim.y + cuda.gridDim.z

    out = ints(3 * 40, 8)
    run(kernel, 3, 40, (out,), seed=seed)
    places = [(b, t) for b in range(3) for t in range(40)]
    assert out.tolist() == [[3, t % 32, b, t, t % 32, 32, 0, 4] for b, t in places]


def order_of(grid: int, block: int, **options) -> list[tuple[int, int, int]]:
    """Which (block, thread) did which step, in the order of time."""

    def kernel(out):
        for step in range(3):
            out[cuda.atomic.add(out, 0, 1)] = (
                cuda.blockIdx.x * 10_000 + cuda.threadIdx.x * 10 + step
            )

    out = ints(1 + grid * block * 3, value=1)
    run(kernel, grid, block, (out,), **options)
    assert out[0] == len(out)
    return [(v // 10_000, v // 10 % 1000, v % 10) for v in out[1:].tolist()]


def test_without_a_seed_the_order_is_ascending():
    by_time = [(b, t, step) for step in range(3) for b in range(2) for t in range(40)]
    assert order_of(2, 40) == by_time
    assert order_of(2, 40, resident_blocks=1) == sorted(by_time, key=lambda x: (x[0], x[2]))


def test_without_a_seed_who_came_first_does_not_matter():
    def kernel(out):
        if cuda.threadIdx.x % 3:
            cuda.nanosleep(1)
        cuda.syncthreads()
        out[cuda.atomic.add(out, 0, 1)] = cuda.threadIdx.x

    out = ints(41, value=1)
    run(kernel, 1, 40, (out,))
    assert out.tolist() == [41, *range(40)]


def test_a_seed_shuffles_threads_and_blocks_and_does_so_repeatably():
    orders = [order_of(3, 5, seed=seed) for seed in range(20)]
    assert orders == [order_of(3, 5, seed=seed) for seed in range(20)]
    assert all(sorted(order) == sorted(order_of(3, 5)) for order in orders)
    assert len(set(map(tuple, orders))) == 20
    # Anew in every round: a thread that was before another one at first may be after it later.
    for order in orders:
        rounds = [[x[:2] for x in order if x[2] == step] for step in range(3)]
        assert rounds[0] != rounds[1]
    # A thread may also be two steps ahead of another.
    steps = [[step for _, _, step in order] for order in orders]
    assert any(0 in some[some.index(2) :] for some in steps)
    one_by_one = [order_of(3, 5, seed=seed, resident_blocks=1) for seed in range(20)]
    started = [tuple(dict.fromkeys(block for block, _, _ in order)) for order in one_by_one]
    assert len(set(started)) == 6


@every_seed
@pytest.mark.parametrize("resident", [1, 2, 5, None])
def test_resident_blocks_limits_the_blocks_under_way(resident, seed):
    def kernel(under_way, most):
        if cuda.threadIdx.x == 0:
            cuda.atomic.max(most, 0, 1 + cuda.atomic.add(under_way, 0, 1))
        for _ in range(20):
            cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.sub(under_way, 0, 1)

    under_way, most = ints(1, value=0), ints(1, value=0)
    run(kernel, 5, 3, (under_way, most), seed=seed, resident_blocks=resident)
    assert (under_way.item(), most.item()) == (0, resident or 5)


# -- arrays -----------------------------------------------------------------------------------

INT_DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_an_array_holds_what_its_dtype_holds_and_reads_give_python_ints(dtype):
    def kernel(values, low, high, out):
        values[0] = low
        values[1] = high
        out[0] = values[0] == low and values[1] == high and type(values[0]) is int
        out[1] = high + 1 - values[1]  # a sum is an int, too, and does not wrap
        values[2] = values[1] + 1

    info, values, out = torch.iinfo(dtype), torch.zeros(3, dtype=dtype), ints(2)
    with pytest.raises(OverflowError, match="thread 0 of block 0 of kernel kernel: "):
        run(kernel, 1, 1, (values, info.min, info.max, out))
    assert values.tolist() == [info.min, info.max, 0]
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize("value", [-1, 256, 2**63, -(2**63) - 1, np.int64(256), np.uint32(300)])
def test_a_value_that_does_not_fit_is_an_error(value):
    def kernel(values):
        values[0, 1] = value

    with pytest.raises(OverflowError, match="thread 0 of block 0 of kernel kernel: "):
        run(kernel, 1, 1, (torch.zeros(2, 2, dtype=torch.uint8),))


def test_floats():
    def kernel(values, out):
        values[0] = 0.1
        out[0] = type(values[0]) is float
        values[1] = values[0] * 2

    values, out = torch.zeros(2), ints(1)
    run(kernel, 1, 1, (values, out))
    assert values.tolist() == [np.float32(0.1), np.float32(0.2)]
    assert out.item() == 1


def test_arguments_are_seen_in_place_and_alias():
    def kernel(whole, part, number, flag):
        part[1] = 5
        whole[0] = whole[3] + number if flag else 0

    whole = torch.arange(6, dtype=torch.int32)
    run(kernel, 1, 1, (whole, whole[2:], 100, True))
    assert whole.tolist() == [105, 1, 2, 5, 4, 5]


def test_shapes_rows_and_slices():
    def kernel(table, cube, out):
        row = table[1]
        row[2] = 50
        out[0] = table[1, 2] + table[1][0]
        out[1] = table.shape[0] * 10 + table.shape[1]
        out[2] = row.shape[0] * 100 + len(row) * 10 + table.ndim
        part = row[1:3]
        part[0] = 60
        out[3] = part.size * 1000 + table[1, 1] + row[2:][0] + row[:1][0]
        out[4] = cube[1, 0, 2] + cube[1, 1][0] + cube[0][1][1] + cube[0, 1:][0, 0]
        out[5] = table.size

    table, cube = torch.arange(8, dtype=torch.int32).view(2, 4), torch.arange(12).view(2, 2, 3)
    out = ints(6)
    run(kernel, 1, 1, (table, cube, out))
    assert out.tolist() == [50 + 4, 24, 442, 2000 + 60 + 50 + 4, 8 + 9 + 4 + 3, 8]
    assert table.tolist() == [[0, 1, 2, 3], [4, 60, 50, 7]]


OUTSIDE = {
    "below 0": (lambda a, t: a[-1], r"a\[-1\].*\(5,\)"),
    "at the end": (lambda a, t: a[5], r"a\[5\].*\(5,\)"),
    "row below 0": (lambda a, t: t[-1, 0], r"t\[\(-1, 0\)\].*\(2, 3\)"),
    "column below 0": (lambda a, t: t[0, -1], r"t\[\(0, -1\)\].*\(2, 3\)"),
    "column at the end": (lambda a, t: t[0, 3], r"t\[\(0, 3\)\].*\(2, 3\)"),
    "a row": (lambda a, t: t[2], r"t\[2\].*\(2, 3\)"),
    "in a row": (lambda a, t: t[1][-2], r"t\[1\]\[-2\].*\(3,\)"),
    "slice below 0": (lambda a, t: a[-2:], r"a\[.*-2.*\(5,\)"),
    "slice beyond": (lambda a, t: a[3:6], r"a\[.*3, 6.*\(5,\)"),
    "in a slice": (lambda a, t: a[3:5][2], r"a\[.*\]\[2\].*\(2,\)"),
    "atomic": (lambda a, t: cuda.atomic.add(t, (0, 3), 1), r"t\[\(0, 3\)\].*\(2, 3\)"),
    "NumPy's ints": (lambda a, t: a[np.int16(-1)], r"a\[-1\].*\(5,\)"),
    "shared memory": (lambda a, t: cuda.shared.array(4, int32)[4], r"shared memory\[4\].*\(4,\)"),
    "dynamic": (lambda a, t: cuda.shared.array(0, int32)[2], r"shared memory\[2\].*\(2,\)"),
    "local memory": (lambda a, t: cuda.local.array(4, int32)[-1], r"local memory\[-1\].*\(4,\)"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_is_an_error(name):
    access, message = OUTSIDE[name]
    access.py_func = access  # as if a decorator had made it a device function

    def kernel(a, t):
        access(a, t)

    with pytest.raises(IndexError, match=message):
        run(kernel, 1, 1, (ints(5), ints(2, 3)), shared_bytes=11)


def test_a_store_out_of_range_is_an_error_too():
    def kernel(a, index):
        a[index] = 1

    for index in (-1, 5):
        a = ints(5)
        with pytest.raises(IndexError, match=rf"a\[{index}\]"):
            run(kernel, 1, 1, (a, index))
        assert a.tolist() == [-99] * 5


def one(a):
    a[0] = 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "takes 1 arguments, got 0"),
        ((ints(1), 2), "takes 1 arguments, got 2"),
        ((1.5,), "a must be a tensor or an int, got float"),
        ((torch.zeros(1, dtype=torch.bfloat16),), r"a.*bfloat16.*data_ptr\(\)"),
        ((torch.zeros(1, dtype=torch.float16),), r"a.*float16.*data_ptr\(\)"),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    with pytest.raises(TypeError, match=message):
        run(one, 1, 1, args)


def test_tensors_must_be_contiguous_and_on_the_cpu():
    for tensor in (
        ints(3, 3).T,
        ints(3, 3)[:, 0],
        torch.empty(1, dtype=torch.int32, device="meta"),
    ):
        with pytest.raises(ValueError, match="a must be contiguous and on the CPU"):
            run(one, 1, 1, (tensor,))
        with pytest.raises(ValueError, match=r"memory\[1\] must be contiguous and on the CPU"):
            run(one, 1, 1, (ints(1),), memory=[ints(1), tensor])


@pytest.mark.parametrize(
    ("grid", "block", "options"),
    [(0, 1, {}), (1, 0, {}), (1, 1025, {}), (1, 1, {"resident_blocks": 0})],
)
def test_launches_that_cannot_be(grid, block, options):
    with pytest.raises(ValueError, match="expected"):
        run(one, grid, block, (ints(1),), **options)


# -- numbers and bits -------------------------------------------------------------------------


def test_number_types_cast_as_on_the_device():
    def kernel(out, big):
        out[0] = int32(big + 2**31)
        out[1] = uint32(-1)
        out[2] = int16(40_000)
        out[3] = int64(big * 2**40 + 7)
        out[4] = int32(True)
        out[5] = uint32(big * 0x9E3779B1) >> 20
        out[6] = int32(-2.9)

    out = torch.zeros(7, dtype=torch.int64)
    run(kernel, 1, 1, (out, 2**32))
    assert out.tolist() == [-(2**31), 2**32 - 1, 40_000 - 2**16, 7, 1, 0, -2]


def test_bit_counts_are_those_of_32_bits():
    def kernel(value, out):
        out[0] = cuda.popc(value)
        out[1] = cuda.ffs(value)
        out[2] = cuda.clz(value)

    table = {0: [0, 0, 32], 1: [1, 1, 31], 12: [2, 3, 28], -1: [32, 1, 0], ALL: [32, 1, 0]}
    table |= {-(2**31): [1, 32, 0], 2**31 - 1: [31, 1, 1]}
    for value, expected in table.items():
        out = ints(3)
        run(kernel, 1, 1, (value, out))
        assert out.tolist() == expected, value


# -- shared and local memory ------------------------------------------------------------------


@every_seed
def test_shared_memory_is_one_per_block_and_per_place_in_the_source(seed):
    def kernel(out):
        a, b = cuda.shared.array(40, int32), cuda.shared.array(shape=(40, 2), dtype=int16)
        c = cuda.shared.array(40, np.int32, alignment=16)
        t, block = cuda.threadIdx.x, cuda.blockIdx.x
        a[t] = 1000 * block + t
        b[t, 1] = -t
        c[t] = t * t
        cuda.syncthreads()
        other = 39 - t
        out[block, t] = a[other] * 10_000 + b[other, 1] + c[other]

    out = ints(3, 40)
    run(kernel, 3, 40, (out,), seed=seed)
    of = [[(1000 * b + t) * 10_000 - t + t * t for t in reversed(range(40))] for b in range(3)]
    assert out.tolist() == of


def test_dynamic_shared_memory_has_many_names():
    def kernel(out):
        words = cuda.shared.array(0, int32)
        pairs = cuda.shared.array(shape=0, dtype=np.dtype("int64"))
        halves = words[4:6]
        if cuda.threadIdx.x == 0:
            pairs[2] = 7 * 2**32 + 9
        cuda.syncthreads()
        out[cuda.threadIdx.x, 0] = halves[0]
        out[cuda.threadIdx.x, 1] = halves[1]
        out[cuda.threadIdx.x, 2] = words.shape[0] * 100 + len(pairs)

    out = ints(2, 3)
    run(kernel, 1, 2, (out,), shared_bytes=27)
    assert out.tolist() == [[9, 7, 603]] * 2


def test_local_memory_is_private():
    def kernel(out):
        mine = cuda.local.array((2, 2), int32)
        mine[1, 0] = cuda.threadIdx.x
        cuda.syncthreads()
        out[cuda.threadIdx.x] = mine[1, 0]

    out = ints(5)
    run(kernel, 1, 5, (out,))
    assert out.tolist() == [*range(5)]


def test_memory_that_nobody_wrote_is_garbage():
    def kernel(out):
        a = cuda.shared.array(2, int32)
        b = cuda.local.array(2, int16)
        c = cuda.shared.array(0, uint32)
        t = cuda.threadIdx.x
        out[t, 0] = a[t]
        out[t, 1] = b[t]
        out[t, 2] = c[t]
        a[t] = b[t] = c[t] = 0  # for the next block, or the next run: garbage all the same

    for _ in range(2):
        out = ints(2, 3)
        run(kernel, 2, 2, (out,), shared_bytes=8, resident_blocks=1)
        assert out.tolist() == [[GARBAGE, 0x7F7F, GARBAGE]] * 2


def test_a_sum_that_relies_on_zeroed_shared_memory_is_wrong():
    def kernel(out, clear):
        total = cuda.shared.array(1, int32)
        if clear:
            total[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(total, 0, 1)
        cuda.syncthreads()
        out[0] = total[0]

    out = ints(1)
    run(kernel, 1, 8, (out, True))
    assert out.item() == 8
    run(kernel, 1, 8, (out, False))
    assert out.item() != 8


# -- collectives ------------------------------------------------------------------------------


@every_seed
@pytest.mark.parametrize("bits", [0, 1, 0b101, 2**40 - 1])
def test_barriers_that_count(bits, seed):
    def kernel(bits, out):
        t = cuda.threadIdx.x
        vote = int32((bits >> t) & 1) * 7
        out[t, 0] = cuda.syncthreads_count(vote)
        out[t, 1] = cuda.syncthreads_and(vote)
        out[t, 2] = cuda.syncthreads_or(vote)
        cuda.syncthreads()

    out = ints(40, 3)
    run(kernel, 1, 40, (bits, out), seed=seed)
    assert out.tolist() == [[bits.bit_count(), int(bits == 2**40 - 1), int(bits > 0)]] * 40


def signed(mask: int) -> int:
    return mask - 2**32 if mask >> 31 else mask


@every_seed
@pytest.mark.parametrize("by", [0, 1, 2, 16, 31, 32, 33])
def test_shuffles(by, seed):
    def kernel(values, by, out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.shfl_sync(ALL, values[t], by)
        out[t, 1] = cuda.shfl_up_sync(ALL, values[t], by)
        out[t, 2] = cuda.shfl_down_sync(ALL, values[t], by)
        out[t, 3] = cuda.shfl_xor_sync(ALL, values[t], by)
        out[t, 4] = cuda.shfl_sync(ALL, values[t], (7 * t + by) & 31)

    values, out = torch.arange(100, 164, dtype=torch.int32), ints(64, 5)
    run(kernel, 1, 64, (values, by, out), seed=seed)
    for t, (at, up, down, xor, other) in enumerate((out - 100).tolist()):
        lane, first, step = t % 32, t // 32 * 32, by % 32
        assert at == first + step
        assert up == (t - step if lane >= step else t)
        assert down == (t + step if lane + step < 32 else t)
        assert xor == first + (lane ^ step)
        assert other == first + (7 * t + by) % 32


@every_seed
@pytest.mark.parametrize("bits", [0, 1, 0xF0F0F0F0, 2**31, ALL])
def test_votes(bits, seed):
    def kernel(bits, out):
        t = cuda.threadIdx.x
        vote = (bits >> cuda.laneid) & 1
        out[t, 0] = cuda.ballot_sync(ALL, vote)
        out[t, 1] = cuda.all_sync(ALL, vote == 1)
        out[t, 2] = cuda.any_sync(-1 if t % 2 else ALL, vote)  # the same bits
        out[t, 3] = cuda.match_any_sync(ALL, vote)
        cuda.syncwarp()
        out[t, 4] = cuda.lanemask_lt()

    out = ints(32, 5)
    run(kernel, 1, 32, (bits, out), seed=seed)
    for lane, row in enumerate(out.tolist()):
        same = bits if bits >> lane & 1 else ~bits & ALL
        expected = [signed(bits), int(bits == ALL), int(bits > 0), signed(same), 2**lane - 1]
        assert row == expected


@every_seed
def test_a_mask_names_who_takes_part(seed):
    """Halves of a warp in different branches, and a last warp that is not whole."""

    def kernel(out):
        t = cuda.threadIdx.x
        if cuda.laneid < 16:
            out[t, 0] = cuda.ballot_sync(0xFFFF, 1)
            cuda.syncwarp(0xFFFF)
        else:
            out[t, 0] = uint32(cuda.ballot_sync(0xFFFF0000, 1)) >> 16
        out[t, 1] = cuda.ballot_sync(ALL, 1)
        if cuda.laneid in (3, 5):
            out[t, 2] = cuda.shfl_sync(0b101000, t, 5)
            out[t, 3] = cuda.shfl_sync(0b101000, t, 4)  # who takes no part gives no value

    out = ints(40, 4)
    run(kernel, 1, 40, (out,), seed=seed)
    for t, row in enumerate(out.tolist()):
        halves, whole = (0xFFFF, -1) if t < 32 else (0xFF, 0xFF)
        pair = [t // 32 * 32 + 5, GARBAGE] if t % 32 in (3, 5) else [-99, -99]
        assert row == [halves, whole, *pair]


@every_seed
def test_a_barrier_does_not_wait_for_threads_that_have_ended(seed):
    def kernel(out):
        t = cuda.threadIdx.x
        if t >= 50:
            return
        out[t] = cuda.syncthreads_count(1)
        if t >= 20:
            return
        cuda.syncthreads()
        out[t] += 100 * cuda.syncthreads_count(1)

    out = ints(64)
    run(kernel, 1, 64, (out,), seed=seed)
    assert out.tolist() == [2050] * 20 + [50] * 30 + [-99] * 14


# -- atomics ----------------------------------------------------------------------------------

ATOMICS = {
    "add": lambda old, value: old + value,
    "sub": lambda old, value: old - value,
    "min": min,
    "max": max,
    "exch": lambda old, value: value,
    "or_": lambda old, value: old | value,
    "and_": lambda old, value: old & value,
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_answer_what_was_there_before(name):
    def kernel(target, values, old):
        t = cuda.threadIdx.x
        old[t] = getattr(cuda.atomic, name)(target, (1, 2), values[t])

    values = [random.Random(name).randrange(-1000, 1000) for _ in range(20)]
    target, old = ints(2, 3, value=5), ints(20)
    run(kernel, 1, 20, (target, torch.tensor(values, dtype=torch.int32), old))
    after = [*accumulate(values, ATOMICS[name], initial=5)]
    assert old.tolist() == after[:-1]
    assert target.tolist() == [[5, 5, 5], [5, 5, after[-1]]]


@every_seed
def test_compare_and_swap_lets_one_win(seed):
    def kernel(owner, won):
        t = cuda.threadIdx.x
        won[t] = cuda.atomic.cas(owner, 0, -1, t) == -1

    owner, won = ints(1, value=-1), ints(40)
    run(kernel, 1, 40, (owner, won), seed=seed)
    assert won.sum() == 1 and won[owner.item()] == 1


@every_seed
def test_atomics_are_atomic_and_all_else_is_not(seed):
    def kernel(sums):
        cuda.atomic.add(sums, 0, 1)
        old = sums[1]
        cuda.nanosleep(1)
        sums[1] = old + 1

    sums = ints(2, value=0)
    run(kernel, 2, 40, (sums,), seed=seed)
    assert sums[0] == 80 > sums[1]


def test_a_check_before_an_atomic_is_not_part_of_it():
    def kernel(owner, winners):
        if owner[0] == -1:
            cuda.atomic.exch(owner, 0, cuda.threadIdx.x)
            cuda.atomic.add(winners, 0, 1)

    winners = ints(1, value=0)
    run(kernel, 1, 4, (ints(1, value=-1), winners))
    assert winners.item() == 4


# -- memory at addresses ----------------------------------------------------------------------


def test_words_at_addresses():
    def kernel(address, host_address, out):
        a, b, c, d = ld16(address + 16)
        out[0] = a
        out[1] = d
        out[2] = ld4(address + 4)
        st16(address, b, c, ALL, d)
        a, b, c, d = ld16_host(host_address)
        st4(address + 20, c + ld4_host(host_address + 12))

    words, host = torch.arange(8, dtype=torch.int32), torch.tensor([1.5, 2.5] * 4).bfloat16()
    out = torch.zeros(3, dtype=torch.int64)
    words[4] = -1
    run(kernel, 1, 1, (words.data_ptr(), host.data_ptr(), out), memory=[words, host])
    assert out.tolist() == [ALL, 7, 1]
    pair = int(host.view(torch.int32)[0])
    assert words.tolist() == [5, 6, -1, 7, -1, signed(2 * pair), 6, 7]


def test_flags_at_addresses_are_int32():
    def kernel(address, out):
        out[0] = load_acquire(address)
        store_release(address, -5)
        out[1] = load_acquire(address)
        for i in range(4):
            out[2 + i] = fetch_inc_wrap(address + 4, 2)

    flags, out = torch.tensor([-3, 0], dtype=torch.int32), ints(6)
    run(kernel, 1, 1, (flags.data_ptr(), out), memory=[flags])
    assert out.tolist() == [-3, -5, 0, 1, 2, 0]
    assert flags.tolist() == [-5, 1]


def test_the_memory_of_array_arguments_has_addresses_too():
    def kernel(array, address):
        st4(address + 8, 5)
        array[3] = array[2] + ld4(address)

    array = torch.arange(4, dtype=torch.int32) + 1
    run(kernel, 1, 1, (array, array.data_ptr()))
    assert array.tolist() == [1, 2, 5, 6]


BAD_ACCESSES = {
    "off by 4": (lambda a: ld16(a + 4), "16 bytes at address .*: not a multiple of 16"),
    "off by 8": (lambda a: st16(a + 8, 1, 2, 3, 4), "16 bytes at address .*: not a multiple of 16"),
    "off by 2": (lambda a: ld4(a + 2), "4 bytes at address .*: not a multiple of 4"),
    "a flag off by 1": (lambda a: load_acquire(a + 1), "4 bytes at .*: not a multiple of 4"),
    "before": (lambda a: ld4_host(a - 4), "4 bytes at address .*: outside"),
    "behind": (lambda a: st4(a + 40, 1), "4 bytes at address .*: outside"),
    "over the end": (lambda a: ld16_host(a + 32), "16 bytes at address .*: outside"),
    "far away": (lambda a: store_release(64, 1), "4 bytes at address 0x40: outside"),
    "a counter behind": (lambda a: fetch_inc_wrap(a + 40, 1), "4 bytes at address .*: outside"),
}


@pytest.mark.parametrize("name", BAD_ACCESSES)
def test_an_access_outside_of_the_memory_or_misaligned_is_an_error(name):
    access, message = BAD_ACCESSES[name]
    access.py_func = access

    def kernel(near, far, address):
        access(address)

    # In the middle of one tensor, so that what is beyond the ends is not somebody else's by chance.
    whole = torch.zeros(32, dtype=torch.int32)
    start = (-whole.data_ptr() // 4) % 4 + 8
    near, far = whole[start : start + 10], torch.zeros(10, dtype=torch.int32)
    address = near.data_ptr()
    said = message_of(kernel, 1, 1, (0, 0, address), memory=[far, near])
    assert (
        f"nearest is memory[{0 if name == 'far away' and far.data_ptr() < address else 1}]" in said
    )
    if name != "far away":
        assert f"{address:#x} to {address + 40:#x}" in said
    with pytest.raises(SimulationError, match=message):
        run(kernel, 1, 1, (0, 0, address), memory=[near])
    assert not whole.any() and not far.any()


def test_memory_must_be_named():
    def kernel(address):
        ld4(address)

    tensor = ints(1)
    assert "outside of the memory given" in message_of(kernel, 1, 1, (tensor.data_ptr(),))


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_word_that_does_not_fit_is_an_error(value):
    def kernel(address):
        st4(address, value)

    words = ints(1)
    with pytest.raises(OverflowError, match=f"thread 0 .*{value}"):
        run(kernel, 1, 1, (words.data_ptr(),), memory=[words])


def test_every_instruction_of_device_py_has_a_twin():
    kind = type(ld16)
    names = {name for name, value in vars(device).items() if isinstance(value, kind)}
    assert {name for name in names if vars(device)[name] not in simulator.TWINS} == set()
    assert "ld16" in names


# -- device functions, closures, kernels ------------------------------------------------------


@cuda.jit(device=True)
def plus_lane(value):
    return value + cuda.laneid


@device_function
def times_one(value):
    return cuda.popc(1) * value


@cuda.jit(device=True)
def warp_sum(value):
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(EVERYONE, value, step)
    return plus_lane(value)


@device_function
def is_even(n):
    return True if n == 0 else is_odd(n - 1)


@device_function
def is_odd(n):
    return False if n == 0 else is_even(n - 1)


EVERYONE = 0xFFFFFFFF


@every_seed
def test_device_functions_that_call_each_other_and_closures(seed):
    def make(offset):
        @cuda.jit(device=True)
        def shifted(value):
            return warp_sum(value) + offset

        def kernel(out, step=3):
            t = cuda.threadIdx.x
            out[t] = shifted(t) + sum(step * times_one(i) for i in range(2))
            if is_odd(t):
                out[t] += 10_000 * is_even(t - 1)

        return kernel

    kernels = {offset: make(offset) for offset in (1000, 2000)}
    for offset, kernel in kernels.items():
        out = ints(64)
        run(kernel, 1, 64, (out, 7), seed=seed)
        sums = [sum(range(32)), sum(range(32, 64))]
        odd = [10_000 * (t % 2) for t in range(64)]
        assert out.tolist() == [sums[t // 32] + t % 32 + offset + 7 + odd[t] for t in range(64)]


def test_the_originals_stay_as_they_are():
    before = dict(globals())
    run(warp_sum, 1, 32, (5,))
    assert all(globals()[name] is value for name, value in before.items())
    assert warp_sum.py_func.__globals__["cuda"] is cuda is device.cuda
    assert cuda.__name__ == "numba.cuda"


def test_a_kernel_of_device_py_runs_on_cpu_tensors():
    @device.kernel(max_threads=64)
    def double(values: int32[::1], records: device.DEVICE_ADDRESS, count: int64):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < count:
            values[i] *= 2
            st4(records + 4 * i, 3 * ld4(records + 4 * i))

    values, records = torch.arange(100, dtype=torch.int32), torch.arange(100, dtype=torch.int32)
    double.launch(2, 64, values, records, 90)
    run(double, 2, 64, (values, records.data_ptr(), 90), memory=[records])
    assert values.tolist() == [4 * i if i < 90 else i for i in range(100)]
    assert records.tolist() == [9 * i if i < 90 else i for i in range(100)]


# -- whole algorithms, in any order -----------------------------------------------------------


def block_scan(values, out, sync_first, sync_second):
    """Inclusive prefix sums of a block: by shuffles in a warp, then over the warps' totals."""
    totals = cuda.shared.array(32, int32)
    t, lane, warp = cuda.threadIdx.x, cuda.laneid, cuda.threadIdx.x // 32
    total = values[t]
    step = 1
    while step < 32:
        below = cuda.shfl_up_sync(ALL, total, step)
        if lane >= step:
            total += below
        step *= 2
    if lane == 31 or t == cuda.blockDim.x - 1:
        totals[warp] = total
    if sync_first:
        cuda.syncthreads()
    if warp == 0:
        scanned = totals[lane] if lane * 32 < cuda.blockDim.x else 0
        step = 1
        while step < 32:
            below = cuda.shfl_up_sync(ALL, scanned, step)
            if lane >= step:
                scanned += below
            step *= 2
        if lane * 32 < cuda.blockDim.x:
            totals[lane] = scanned
    if sync_second:
        cuda.syncthreads()
    out[t] = total + (totals[warp - 1] if warp > 0 else 0)


def scanned_right(block: int, seed: int | None, *syncs: bool) -> bool:
    generator = torch.Generator().manual_seed(block)
    values = torch.randint(-100, 100, (block,), dtype=torch.int32, generator=generator)
    out = ints(block)
    try:
        run(block_scan, 1, block, (values, out, *syncs), seed=seed)
    except OverflowError:  # a sum with garbage
        return False
    return out.tolist() == np.cumsum(values.numpy()).tolist()


@every_seed
@pytest.mark.parametrize("block", [1, 31, 32, 33, 64, 200, 256])
def test_a_block_scan_equals_numpy(block, seed):
    assert scanned_right(block, seed, True, True)


@pytest.mark.parametrize("syncs", [(True, False), (False, True)])
def test_a_block_scan_without_one_of_its_barriers_is_found_out(syncs):
    assert not all(scanned_right(256, seed, *syncs) for seed in range(8))


def test_only_a_seed_finds_a_barrier_that_is_missing_behind_a_left_neighbour():
    def kernel(out):
        shared = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        shared[t] = t
        out[t] = shared[t - 1] if t else -1  # a barrier should be here

    expected = [*range(-1, 63)]
    for seed, right in [(None, True), *((seed, False) for seed in range(8))]:
        out = ints(64)
        run(kernel, 1, 64, (out,), seed=seed)
        assert (out.tolist() == expected) == right, seed


def test_a_warp_is_not_in_lockstep():
    def kernel(out, sync):
        shared = cuda.shared.array(32, int32)
        shared[cuda.laneid] = cuda.laneid
        if sync:
            cuda.syncwarp()
        out[cuda.laneid] = shared[31 - cuda.laneid]

    for sync in (True, False):
        out = ints(32)
        run(kernel, 1, 32, (out, sync))
        assert (out.tolist() == [*reversed(range(32))]) == sync


def by_release(flag, address):
    store_release(address, 1)


def by_counter(flag, address):
    fetch_inc_wrap(address, 1)


def by_atomic(flag, address):
    cuda.atomic.exch(flag, 0, 1)


@pytest.mark.parametrize("set_flag", [by_release, by_counter, by_atomic])
def test_data_written_after_its_flag_is_found_out(set_flag):
    set_flag.py_func = set_flag  # as if a decorator had made it a device function

    def kernel(data, flag, address, out, flag_first):
        if cuda.blockIdx.x == 0:
            if flag_first:
                set_flag(flag, address)
            data[0] = 7
            if not flag_first:
                set_flag(flag, address)
        else:
            while load_acquire(address) == 0:
                pass
            out[0] = data[0]

    for flag_first in (False, True):
        seen = set()
        for seed in SEEDS:
            data, flag, out = ints(1), ints(1, value=0), ints(1)
            run(kernel, 2, 1, (data, flag, flag.data_ptr(), out, flag_first), seed=seed)
            seen.add(out.item())
        assert seen == ({-99, 7} if flag_first else {7})


def hand_over(data, flags, out, ticketed):
    """A chain of blocks: each one adds 1 to what the one before has."""
    mine = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        mine[0] = fetch_inc_wrap(flags, 1000) if ticketed else cuda.blockIdx.x
    cuda.syncthreads()
    number = mine[0]
    if number > 0:
        if t == 0:
            while load_acquire(flags + 4 * number) == 0:
                cuda.nanosleep(20)
        cuda.syncthreads()
        data[number, t] = data[number - 1, t] + 1
    else:
        data[0, t] = t
    cuda.syncthreads()
    if t == 0:
        store_release(flags + 4 * (number + 1), 1)
    out[cuda.blockIdx.x] = number


@pytest.mark.parametrize("resident", [1, 2, None])
@every_seed
def test_a_hand_over_by_tickets_works_in_any_order_of_blocks(resident, seed):
    data, flags, out = ints(4, 40), ints(6, value=0), ints(4)
    args = (data, flags.data_ptr(), out, True)
    run(hand_over, 4, 40, args, memory=[flags], seed=seed, resident_blocks=resident)
    assert data.tolist() == [[t + n for t in range(40)] for n in range(4)]
    assert sorted(out.tolist()) == [0, 1, 2, 3]


def test_a_hand_over_without_tickets_hangs_if_the_blocks_start_in_another_order():
    hangs = {}
    for seed in SEEDS:
        data, flags, out = ints(2, 40), ints(4, value=0), ints(2)
        args = (data, flags.data_ptr(), out, False)
        try:
            run(hand_over, 2, 40, args, memory=[flags], seed=seed, resident_blocks=1)
        except SimulationError as error:
            hangs[seed] = str(error)
        run(hand_over, 2, 40, (data, flags.zero_().data_ptr(), out, False), memory=[flags])
        assert data.tolist() == [[*range(40)], [*range(1, 41)]]
    assert 0 < len(hangs) < len(SEEDS) and None not in hangs
    polls, waits = line(hand_over, "while load_acquire"), line(hand_over, "cuda.nanosleep")
    barrier = line(hand_over, "cuda.nanosleep") + 1
    for text in hangs.values():
        assert "kernel hand_over hangs, 1 blocks cannot start" in text
        assert f"test_simulator.py:{polls} in hand_over: while" in text or f":{waits} in" in text
        assert f"39 threads of block 1 at test_simulator.py:{barrier} in hand_over" in text


# -- errors that a GPU would not report -------------------------------------------------------


@every_seed
def test_a_barrier_in_one_branch_only(seed):
    def kernel(out):
        if cuda.threadIdx.x < 10:
            cuda.syncthreads()
        else:
            cuda.shfl_sync(ALL, 1, 0)

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    barrier, shuffle = line(kernel, "cuda.syncthreads()"), line(kernel, "cuda.shfl_sync")
    here = "threads of block 0 at test_simulator.py"
    assert "kernel kernel diverged" in text
    assert f"10 {here}:{barrier} in kernel: cuda.syncthreads()" in text
    assert f"22 {here}:{shuffle} in kernel: cuda.shfl_sync(ALL, 1, 0) (mask 0xffffffff)" in text


@every_seed
def test_two_barriers_that_are_not_the_same(seed):
    def kernel(out):
        if cuda.threadIdx.x < 10:
            cuda.syncthreads()
        else:
            cuda.syncthreads_or(1)

    text = message_of(kernel, 2, 32, (ints(1),), seed=seed)
    assert "meet in different lines" in text
    assert f"test_simulator.py:{line(kernel, 'cuda.syncthreads()')} in kernel" in text
    assert f"test_simulator.py:{line(kernel, 'cuda.syncthreads_or')} in kernel" in text


@every_seed
def test_two_warp_collectives_that_are_not_the_same(seed):
    def kernel(out):
        if cuda.laneid % 2:
            out[0] = cuda.ballot_sync(ALL, 1)
        else:
            out[0] = cuda.ballot_sync(ALL, 0)

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    assert "meet in different lines" in text
    assert f":{line(kernel, '(ALL, 1)')} in" in text and f":{line(kernel, '(ALL, 0)')} in" in text


@device_function
def barrier():
    cuda.syncthreads()


@device_function
def same_barrier():
    cuda.syncthreads()


@every_seed
def test_a_barrier_in_a_function_that_two_branches_call(seed):
    def kernel(out):
        if cuda.threadIdx.x < 10:
            barrier()  # here
        else:
            barrier()  # or here

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    assert "meet in different lines" in text
    inner = f"test_simulator.py:{line(barrier.py_func, 'cuda.')} in barrier: cuda.syncthreads()"
    for branch in ("# here", "# or here"):
        assert f"{inner}, called at test_simulator.py:{line(kernel, branch)} in kernel" in text


def test_different_operations_in_one_line():
    def functions(out):
        barrier() if cuda.threadIdx.x < 10 else same_barrier()

    def operations(out):
        cuda.all_sync(ALL, 1) if cuda.threadIdx.x < 10 else cuda.any_sync(ALL, 1)

    for kernel in (functions, operations):
        assert "meet in different lines" in message_of(kernel, 1, 32, (ints(1),))


def test_one_line_that_python_compiles_twice_is_still_one_line():
    """Python writes the condition of a while twice: for the first time, and for all others."""

    def kernel(out):
        t, rounds = cuda.threadIdx.x, 0
        for part in range(2):
            i = 0
            while cuda.syncthreads_count(1) and i < (part if t % 2 else 1 - part):
                i += 1
            rounds += i
        out[t] = rounds

    out = ints(40)
    run(kernel, 1, 40, (out,), seed=1)
    assert out.tolist() == [1] * 40


@every_seed
def test_masks_that_disagree(seed):
    def kernel(out):
        mask = 0xFFFF if cuda.laneid < 8 else ALL
        out[0] = cuda.any_sync(mask, 1)

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    at = f"threads of block 0 at test_simulator.py:{line(kernel, 'any_sync')} in kernel"
    assert f"8 {at}: out[0] = cuda.any_sync(mask, 1) (mask 0xffff)" in text
    assert f"24 {at}: out[0] = cuda.any_sync(mask, 1) (mask 0xffffffff)" in text


def test_other_blocks_do_not_hide_a_divergence():
    def kernel(flag):
        if cuda.blockIdx.x == 0:
            while load_acquire(flag) == 0:
                pass
        if cuda.blockIdx.x == 1:
            if cuda.threadIdx.x == 0:
                cuda.syncthreads()
            else:
                cuda.syncwarp()

    flag = ints(1, value=0)
    text = message_of(kernel, 2, 32, (flag.data_ptr(),), memory=[flag])
    assert "diverged" in text and "31 threads of block 1" in text


@every_seed
def test_a_mask_that_names_an_ended_lane(seed):
    def kernel(out):
        if cuda.laneid == 9:
            return
        cuda.syncwarp()

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    assert "1 of 32 have ended" in text
    at = f"31 threads of block 0 at test_simulator.py:{line(kernel, 'syncwarp')} in kernel"
    assert f"{at}: cuda.syncwarp() (mask 0xffffffff)" in text


@every_seed
def test_a_lane_that_is_not_in_its_own_mask(seed):
    def kernel(out):
        cuda.syncwarp(0x7FFFFFFF)

    text = message_of(kernel, 1, 32, (ints(1),), seed=seed)
    assert "thread 31 of block 0 of kernel kernel: lane 31 is not in its own mask" in text


class Odd(Exception):
    def __init__(self, number, reason):
        super().__init__(number, reason)


@pytest.mark.parametrize("kind", [ValueError, KeyError, Odd])
@every_seed
def test_an_exception_says_where_and_keeps_type_and_traceback(kind, seed):
    @device_function
    def checked(t):
        if t == 7:
            raise kind("number", "reason")

    def kernel(out):
        cuda.syncthreads()
        checked(cuda.threadIdx.x + 10 * cuda.blockIdx.x - 10)

    with pytest.raises(kind, match="thread 7 of block 1 of kernel kernel: .*reason") as caught:
        run(kernel, 2, 8, (ints(1),), seed=seed)
    frames = [(f.name, f.lineno) for f in traceback.extract_tb(caught.value.__traceback__)]
    raised = line(checked.py_func, "raise kind")
    assert frames[-2:] == [("kernel", line(kernel, "checked(")), ("checked", raised)]


def test_names_that_are_not_simulated():
    def kernel(out):
        cuda.activemask()

    with pytest.raises(AttributeError, match="thread 0 of block 0.*activemask"):
        run(kernel, 1, 1, (ints(1),))


# -- hangs ------------------------------------------------------------------------------------


def polls_a_flag(flag):
    while load_acquire(flag) == 0:
        pass


def polls_in_step(flag):
    found = False
    while not found:
        value = 0
        if cuda.laneid == 0:
            value = load_acquire(flag)
        found = cuda.shfl_sync(ALL, value, 0) != 0


def spins(flag):
    lock = cuda.shared.array(1, int32)
    lock[0] = 1
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        pass


@pytest.mark.parametrize(
    ("kernel", "text", "count"),
    [
        (polls_a_flag, "while load_acquire", 32),
        (polls_in_step, "shfl_sync", 31),
        (spins, "cas", 32),
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_waiting_for_what_never_comes(kernel, text, count, seed):
    flag = ints(1, value=0)
    said = message_of(kernel, 1, 32, (flag.data_ptr(),), memory=[flag], seed=seed)
    assert f"kernel {kernel.__name__} hangs" in said
    counts = Counter()
    for entry in said.splitlines()[1:]:
        number, place = entry.strip().split(" threads of block 0 at ")
        counts[place.split(" in ")[0]] += int(number)
    assert sum(counts.values()) == 32
    assert counts[f"test_simulator.py:{line(kernel, text)}"] >= count - 1


@pytest.mark.parametrize("seed", [None, 1])
def test_a_long_wait_is_not_a_hang(seed):
    """While another thread works: stores, and a search by votes alone."""

    def kernel(flag, work):
        if cuda.threadIdx.x >= 32:
            while load_acquire(flag) == 0:
                cuda.nanosleep(100)
            return
        for i in range(1500):
            cuda.nanosleep(1)
            work[i & 1] = i
        found = 0
        while found < 5000:
            found += cuda.popc(cuda.ballot_sync(0x3, 1))
        store_release(flag, 1)

    flag = ints(1, value=0)

    def two_lanes(flag, work):
        if cuda.laneid < 2:
            inner(flag, work)

    kernel.py_func = inner = kernel
    run(two_lanes, 1, 64, (flag.data_ptr(), ints(2)), memory=[flag], seed=seed)
    assert flag.item() == 1


# -- what it leaves behind, and how long it takes ---------------------------------------------


def alive() -> int:
    gc.collect()
    return sum(1 for x in gc.get_objects() if issubclass(type(x), greenlet) and not x.dead)


def fails_at_once(flag):
    raise ValueError("no")


def fails_late(flag):
    cuda.syncthreads()
    if cuda.threadIdx.x == 20:
        raise ValueError("no")
    cuda.syncthreads()


def diverges(flag):
    if cuda.threadIdx.x:
        cuda.syncwarp()
    else:
        cuda.syncthreads()


def ends_well(flag):
    cuda.syncthreads()


@pytest.mark.parametrize("kernel", [fails_at_once, fails_late, diverges, polls_a_flag, ends_well])
@pytest.mark.parametrize("seed", [None, 1])
def test_no_greenlet_and_no_warning_is_left_behind(kernel, seed):
    flag = ints(1, value=0)
    before = alive()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            try:
                run(kernel, 3, 40, (flag.data_ptr(),), memory=[flag], seed=seed, resident_blocks=2)
                assert kernel is ends_well
            except (ValueError, SimulationError) as error:
                assert "kernel" in str(error)
        assert alive() == before


def test_a_thousand_threads_at_ten_barriers_take_a_tenth_of_a_second():
    """Twice as much here, of this process alone: another one may have the same core."""

    def kernel(out):
        t = cuda.threadIdx.x
        for _ in range(10):
            cuda.syncthreads()
        out[t] = t

    out, seconds = ints(1024), []
    for _ in range(5):
        start = time.process_time()
        run(kernel, 1, 1024, (out,))
        seconds.append(time.process_time() - start)
    assert out.tolist() == [*range(1024)]
    assert min(seconds) < 0.2
