"""Stores new KV records: each step the newest one of each request, and a whole prompt's.

HiSparse writes through: a record goes to its slot on the device and to its host row in the same
launch, so that evicting it later writes nothing. What the three kernels replace, in torch
operations, is `write_through` and `write_prompt` of `minihisparse/gpu_cache.py`.

    write_through   newest record of each request -> slot min(S - 1, B) and host row
    append          newest record of each request -> its place among records that all are on the GPU
    write_prompt    records of positions 0..T-1 -> their host rows

    host row of position p = page table[p // page_size] * page_size + p % page_size

Shapes: records [R or T, W] of any dtype; a row is contiguous, rows may lie apart (a view of the
q|k|v projection). W numbers are a multiple of 4 bytes; pieces of 16 bytes are moved where that and
all addresses allow it, else 4 bytes.
Traffic per record: record_bytes read; as many written to each place; over the bus record_bytes,
for append none. One block per record: neighbouring threads write neighbouring bytes, so a warp's
store is whole lines for the bus. A step is bound by latency, a prompt by the bus.
Launchers allocate nothing and do not wait: a CUDA graph can hold them once each was called before.

It deliberately does not know layers, who owns which page, or what is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    HOST_ADDRESS,
    Kernel,
    cuda,
    device_function,
    int32,
    int64,
    kernel,
    ld4,
    ld16,
    st4,
    st16,
    uint32,
)

MAX_THREADS = 128
UNROLL = 4  # pieces that a thread asks for before it waits for the first one


@cache
def record_functions(record_bytes: int, wide: bool) -> tuple[int, Callable, Callable]:
    """Moving one record with one block; wide: in pieces of 16 bytes, not 4.

    Returns the number of threads and two device functions. `load(words, source, 0)` asks for the
    first pieces, so that they are under way while the record's places are looked up; `finish`
    does the rest.
    """
    WIDE, PIECE_BYTES = wide, 16 if wide else 4
    PIECES = record_bytes // PIECE_BYTES
    THREADS = min(MAX_THREADS, -(-PIECES // 32) * 32)
    TIMES = min(UNROLL, -(-PIECES // THREADS))

    @device_function
    def load(words, source, first):
        tid = cuda.threadIdx.x & 127
        for u in range(TIMES):
            piece = first + u * THREADS + tid
            if piece < PIECES:
                at = source + piece * PIECE_BYTES
                if WIDE:
                    words[u, 0], words[u, 1], words[u, 2], words[u, 3] = ld16(at)
                else:
                    words[u, 0] = ld4(at)

    @device_function
    def store(words, target, first):
        tid = cuda.threadIdx.x & 127
        for u in range(TIMES):
            piece = first + u * THREADS + tid
            if piece < PIECES:
                at = target + piece * PIECE_BYTES
                if WIDE:
                    st16(at, words[u, 0], words[u, 1], words[u, 2], words[u, 3])
                else:
                    st4(at, words[u, 0])

    @device_function
    def finish(words, source, target, other_target):  # other_target: 0 for none
        for first in range(0, PIECES, TIMES * THREADS):
            if first > 0:
                load(words, source, first)
            store(words, target, first)
            if other_target != 0:
                store(words, other_target, first)

    return THREADS, load, finish


@cache
def write_through_kernel(record_bytes: int, wide: bool) -> Kernel:
    """To a slot of the cache and to a host row."""
    THREADS, load, finish = record_functions(record_bytes, wide)
    RECORD_BYTES = record_bytes

    @kernel(max_threads=THREADS)
    def write_through(
        records: DEVICE_ADDRESS,  # [R, record_bytes] read
        stride_bytes: int64,  # from one row of records to the next
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        device_buffer_tokens: int32[:, ::1],  # [max_requests, >= B] position S - 1, while S <= B
        slots_of_layer: DEVICE_ADDRESS,  # [max_requests, B + 1, record_bytes] a record is written
        num_slots: int64,  # B
        req_to_host_pool: int32[:, ::1],  # [max_requests, pages] read
        page_size: int64,
        host_records: HOST_ADDRESS,  # [host_rows, record_bytes] a record is written
    ):
        words = cuda.local.array((UNROLL, 4), uint32)
        request = int64(cuda.blockIdx.x)
        source = records + request * stride_bytes
        load(words, source, 0)
        row, position = req_pool_indices[request], int64(seq_lens[request]) - 1
        page, page_index = int64(-1), int64(0)
        if request < num_real_reqs[0] and 0 <= row < req_to_host_pool.shape[0] and position >= 0:
            page_index = int64(uint32(position) // uint32(page_size))
            if page_index < req_to_host_pool.shape[1]:
                page = int64(req_to_host_pool[row, page_index])
        if page >= 0:
            host_row = page * page_size + position - page_index * page_size
            slot = min(position, num_slots)
            to_slot = slots_of_layer + (row * (num_slots + 1) + slot) * RECORD_BYTES
            to_host = host_records + host_row * RECORD_BYTES
            finish(words, source, to_host, to_slot)
            if cuda.threadIdx.x == 0 and position < num_slots:
                device_buffer_tokens[row, position] = position

    return write_through


@cache
def append_kernel(record_bytes: int, wide: bool) -> Kernel:
    """To its place among records that all lie on the device."""
    THREADS, load, finish = record_functions(record_bytes, wide)
    RECORD_BYTES = record_bytes

    @kernel(max_threads=THREADS)
    def append(
        records: DEVICE_ADDRESS,  # [R, record_bytes] read
        stride_bytes: int64,  # from one row of records to the next
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        first_slot: int64[::1],  # [max_requests] read
        device_records: DEVICE_ADDRESS,  # [N, record_bytes] a record is written
        num_slots: int64,  # N
    ):
        words = cuda.local.array((UNROLL, 4), uint32)
        request = int64(cuda.blockIdx.x)
        source = records + request * stride_bytes
        load(words, source, 0)
        row, position = req_pool_indices[request], int64(seq_lens[request]) - 1
        slot = int64(-1)
        if request < num_real_reqs[0] and 0 <= row < first_slot.shape[0] and position >= 0:
            slot = first_slot[row]
            if slot >= 0:
                slot += position
        if 0 <= slot < num_slots:
            finish(words, source, device_records + slot * RECORD_BYTES, 0)

    return append


@cache
def write_prompt_kernel(record_bytes: int, wide: bool) -> Kernel:
    """To the host rows of positions 0, 1, 2, ..."""
    THREADS, load, finish = record_functions(record_bytes, wide)
    RECORD_BYTES = record_bytes

    @kernel(max_threads=THREADS)
    def write_prompt(
        records: DEVICE_ADDRESS,  # [T, record_bytes] read
        stride_bytes: int64,  # from one row of records to the next
        pages: int32[::1],  # [>= T / page_size] read
        page_size: int64,
        host_records: HOST_ADDRESS,  # [host_rows, record_bytes] T records are written
    ):
        words = cuda.local.array((UNROLL, 4), uint32)
        position = int64(cuda.blockIdx.x)
        source = records + position * stride_bytes
        load(words, source, 0)
        page_index = int64(uint32(position) // uint32(page_size))
        page = int64(pages[page_index])
        if page >= 0:
            host_row = page * page_size + position - page_index * page_size
            finish(words, source, host_records + host_row * RECORD_BYTES, 0)

    return write_prompt


def write_through(
    records: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    num_real_reqs: Tensor,
    device_buffer_tokens: Tensor,
    slots_of_layer: Tensor,
    num_slots: int,
    req_to_host_pool: Tensor,
    page_size: int,
    host_records: Tensor,
) -> None:
    """Stores the newest record of each real request in its slot and in its host row.

    records [R, W], position S - 1 of each request. seq_lens [R] int32 (S), req_pool_indices [R]
    int64, num_real_reqs [1] int32: the batch. device_buffer_tokens [max_requests, >= B] int32,
    slots_of_layer [max_requests, B + 1, W]: the layer's cache, changed; num_slots: B.
    req_to_host_pool [max_requests, pages] int32. host_records [host_rows, W]: the layer's host
    pool, pinned, changed.
    Writes nothing for padding, and where S < 1 or the position has no page.
    Raises TypeError or ValueError before anything is written.
    """
    num_requests, rows = len(records), len(req_to_host_pool)
    record_bytes, wide = _record_width(
        records, slots_of_layer=slots_of_layer, host_records=host_records
    )
    _check_batch(num_requests, seq_lens, req_pool_indices, num_real_reqs)
    _check_page_size(page_size)
    width = max(device_buffer_tokens.shape[-1], num_slots)
    _check_shape("device_buffer_tokens", device_buffer_tokens, (rows, width))
    _check_shape("slots_of_layer", slots_of_layer, (rows, num_slots + 1, records.shape[1]))
    if num_requests:
        kernel = write_through_kernel(record_bytes, wide)
        kernel.launch(
            num_requests,
            kernel.max_threads,
            records,
            records.stride(0) * records.element_size(),
            seq_lens,
            req_pool_indices,
            num_real_reqs,
            device_buffer_tokens,
            slots_of_layer,
            num_slots,
            req_to_host_pool,
            page_size,
            host_records,
        )


def append(
    records: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    num_real_reqs: Tensor,
    first_slot: Tensor,
    device_records: Tensor,
) -> None:
    """Stores the newest record of each real request in row first_slot[request row] + S - 1.

    records [R, W], seq_lens [R] int32 (S), req_pool_indices [R] int64, num_real_reqs [1] int32: as
    for `write_through`. first_slot [max_requests] int64, -1 for a request row without slots.
    device_records [N, W]: changed.
    Writes nothing for padding, and where S < 1 or the row is not in 0..N-1.
    Raises TypeError or ValueError before anything is written.
    """
    num_requests = len(records)
    record_bytes, wide = _record_width(records, device_records=device_records)
    _check_batch(num_requests, seq_lens, req_pool_indices, num_real_reqs)
    if num_requests:
        kernel = append_kernel(record_bytes, wide)
        kernel.launch(
            num_requests,
            kernel.max_threads,
            records,
            records.stride(0) * records.element_size(),
            seq_lens,
            req_pool_indices,
            num_real_reqs,
            first_slot,
            device_records,
            len(device_records),
        )


def write_prompt(records: Tensor, pages: Tensor, page_size: int, host_records: Tensor) -> None:
    """Stores the records of positions 0..T-1 in their host rows.

    records [T, W]. pages [max pages] int32: the request's row of req_to_host_pool. host_records
    [host_rows, W]: the layer's host pool, pinned, changed. A position without a page (-1) is left
    out. Raises TypeError or ValueError before anything is written, also if pages is too short.
    """
    num_tokens = len(records)
    _check_page_size(page_size)
    record_bytes, wide = _record_width(records, host_records=host_records)
    if num_tokens > pages.numel() * page_size:
        raise ValueError(
            f"records has {num_tokens} rows, pages has room for {pages.numel() * page_size}"
        )
    if num_tokens:
        kernel = write_prompt_kernel(record_bytes, wide)
        kernel.launch(
            num_tokens,
            kernel.max_threads,
            records,
            records.stride(0) * records.element_size(),
            pages,
            page_size,
            host_records,
        )


def _record_width(records: Tensor, **places: Tensor) -> tuple[int, bool]:
    """Bytes per record, and whether all can be reached in pieces of 16 bytes.

    places: contiguous tensors whose last dimension is a record. Raises ValueError if one does not
    fit to the records.
    """
    if records.ndim != 2:
        raise ValueError(f"records is {tuple(records.shape)}, expected two dimensions")
    size, width = records.element_size(), records.shape[1]
    if size * width % 4 or not width:
        raise ValueError(f"records of {size * width} bytes: must be a multiple of 4 bytes")
    addresses = size * width | size * records.stride(0) | records.data_ptr()
    for name, tensor in places.items():
        if tensor.dtype != records.dtype or tensor.shape[-1] != width:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"expected {records.dtype} with rows of {width}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        addresses |= tensor.data_ptr()
    if addresses % 4:
        raise ValueError(f"records, {', '.join(places)}: an address is no multiple of 4 bytes")
    return size * width, addresses % 16 == 0


def _check_batch(
    num_requests: int, seq_lens: Tensor, req_pool_indices: Tensor, num_real_reqs: Tensor
) -> None:
    _check_shape("seq_lens", seq_lens, (num_requests,))
    _check_shape("req_pool_indices", req_pool_indices, (num_requests,))
    _check_shape("num_real_reqs", num_real_reqs, (1,))


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"page_size={page_size} is less than 1")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
