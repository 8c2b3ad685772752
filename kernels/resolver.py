"""Launches Resolve: the buffers that it needs beside a cache's own, and the checks before a launch.

    resolver = Resolver(max_requests=8, top_k=256, device_buffer_size=512, ...)
    slots = resolver.resolve(positions, ...)     # one layer, all requests of a batch; [R, K] int32

Upstream names: swap_in_block_size (threads per block), top_k_device_locs (the answer).

On tensors of a GPU the kernels run compiled, on tensors of a CPU simulated; any rung of the ladder
(`resolve.py`) can be asked for. `resolve` allocates nothing and does not wait, unless checked, so a
CUDA graph can hold it, once `load` has been called. The answer lies in a buffer that the next call
overwrites.

Cost: 12 bytes per request and selected position for the answer and the plan, for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.kernels.resolve import resolve_one_thread
from minihisparse.kernels.resolve_fused import FusedKernel, fused_kernel
from minihisparse.kernels.resolve_one_block import (
    one_block_shared_bytes,
    one_block_table_bits,
    resolve_one_block,
)

RUNGS = ("one_thread", "one_block", "fused")
NO_ERROR = 2**63 - 1
MAX_POSITIONS_PER_THREAD = 64  # the fused kernel keeps a bit for each in an int64
# One block reads the host at 22 GB/s (H200), so three of them fill a link of 50 GB/s (PCIe 5).
# Where there are fewer requests, others help; more than eight in all were no faster.
BLOCKS_THAT_FILL_A_LINK = 3
HELPING_BLOCKS = 8


class MissPlan(NamedTuple):
    """What a call for R requests fetched: the first counts[r] entries of row r < R. All int32."""

    host_rows: Tensor  # [R, K]
    slots: Tensor  # [R, K]
    counts: Tensor  # [R]


def check_sizes(
    top_k: int,
    device_buffer_size: int,
    record_bytes: int,
    swap_in_block_size: int,
    blocks_per_request: int | None = None,
) -> None:
    """Raises ValueError for what the kernels cannot do."""
    if record_bytes % 4 or record_bytes < 4:
        raise ValueError(f"records of {record_bytes} bytes: must be a multiple of 4 bytes")
    if not 1 <= top_k <= device_buffer_size <= 32_767:
        raise ValueError(
            f"top_k={top_k}, device_buffer_size={device_buffer_size}: must be "
            "1 <= top_k <= device_buffer_size <= 32767 (lru_slots is int16)"
        )
    if swap_in_block_size not in range(32, 1025, 32):
        raise ValueError(
            f"swap_in_block_size={swap_in_block_size}: must be a multiple of 32 in 32..1024"
        )
    if top_k > MAX_POSITIONS_PER_THREAD * swap_in_block_size:
        raise ValueError(
            f"swap_in_block_size={swap_in_block_size}: a thread can have "
            f"{MAX_POSITIONS_PER_THREAD} positions, so top_k={top_k} needs more threads"
        )
    if blocks_per_request is not None and blocks_per_request not in range(1, 1025):
        raise ValueError(f"blocks_per_request={blocks_per_request}: must be in 1..1024")


class Resolver:
    """Resolve for one cache, on one stream: calls share the answer, the plan and the hand-over."""

    def __init__(
        self,
        *,
        max_requests: int,
        top_k: int,
        device_buffer_size: int,
        record_bytes: int,
        req_to_host_pool: Tensor,
        page_size: int,
        rung: str = "fused",
        swap_in_block_size: int | None = None,
        blocks_per_request: int | None = None,
        skip_io: bool = False,
        record_plan: bool = False,
        checked: bool = False,
    ) -> None:
        """Allocates the buffers on the device of `req_to_host_pool` [request rows, pages] int32.

        max_requests: rows of the largest batch, padding included. device_buffer_size: B, the
        largest of all layers.
        swap_in_block_size: threads per block, a multiple of 32 up to 1024; None: one per slot, at
        most 1024. blocks_per_request: how many copy for a request; None: by the batch.
        skip_io: decide everything, fetch nothing (the no-IO oracle: the records are not valid).
        record_plan: leave `miss_plan` behind, for a `Replayer`. checked: refuse positions out of
        range.
        Raises ValueError for what the kernels cannot do; the message names the flag that helps.
        """
        if swap_in_block_size is None:
            swap_in_block_size = min(-(-device_buffer_size // 32) * 32, 1024)
        check_sizes(top_k, device_buffer_size, record_bytes, swap_in_block_size, blocks_per_request)
        if page_size < 1:
            raise ValueError(f"page_size={page_size} is less than 1")
        if rung not in RUNGS:
            raise ValueError(f"rung {rung!r} is not one of: {', '.join(RUNGS)}")
        if rung != "fused" and (skip_io or record_plan or checked):
            raise ValueError(f"rung {rung!r} has no skip_io, record_plan or checked; use 'fused'")
        self.max_requests = max_requests
        self.top_k = top_k
        self.device_buffer_size = device_buffer_size
        self.record_bytes = record_bytes
        self.req_to_host_pool = req_to_host_pool
        self.page_size = page_size
        self.rung = rung
        self.num_threads = swap_in_block_size
        self.blocks_per_request = blocks_per_request
        self.skip_io, self.record_plan, self.checked = skip_io, record_plan, checked
        device, shape = req_to_host_pool.device, (max_requests, top_k)
        self.top_k_device_locs = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.miss_plan = MissPlan(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(max_requests, dtype=torch.int32, device=device),
        )
        self._error = torch.full((1,), NO_ERROR, dtype=torch.int64, device=device)
        self._handover = torch.zeros(3 * max_requests, dtype=torch.int32, device=device)
        scratch = {"one_thread": 2, "one_block": 1, "fused": 0}[rung] * device_buffer_size
        self._scratch = torch.zeros(max_requests, scratch, dtype=torch.int32, device=device)

    def load(self) -> None:
        """Compiles or loads the kernels that `resolve` may launch: on a GPU, before any graph.

        On a CPU they are simulated, and there is nothing to do.
        Raises RuntimeError if the GPU cannot run them, ValueError if its shared memory is too
        small for them.
        """
        if self.req_to_host_pool.device.type == "cpu":
            return
        if self.rung == "one_thread":
            kernels = [(resolve_one_thread, 0)]
        elif self.rung == "one_block":
            kernels = [(resolve_one_block, self._one_block_shared_bytes(self.device_buffer_size))]
        else:
            kernels = [
                self._fused(self.record_bytes % 16 == 0, several) for several in (False, True)
            ]
        for kernel, shared_bytes in kernels:
            try:
                kernel.load(self.req_to_host_pool.device, shared_bytes)
            except ValueError as error:
                raise ValueError(f"top_k={self.top_k}: {error}; lower --top-k") from None

    def _one_block_shared_bytes(self, num_slots: int) -> int:
        return one_block_shared_bytes(self.top_k, num_slots, self.num_threads)

    def _fused(self, record_bytes_are_16s: bool, several_blocks: bool) -> FusedKernel:
        return fused_kernel(
            num_threads=self.num_threads,
            top_k=self.top_k,
            num_slots=self.device_buffer_size,
            record_bytes_are_16s=record_bytes_are_16s,
            several_blocks=several_blocks,
            skip_io=self.skip_io,
            record_plan=self.record_plan,
            checked=self.checked,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers."""
        buffers = (self.top_k_device_locs, *self.miss_plan, self._error, self._handover)
        return sum(buffer.nbytes for buffer in (*buffers, self._scratch))

    def resolve(
        self,
        positions: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        num_real_reqs: Tensor,
        *,
        device_buffer_tokens: Tensor,
        lru_slots: Tensor,
        host_records: Tensor,
        records: Tensor,
        counters: Tensor,
        num_slots: int | None = None,
    ) -> Tensor:
        """Makes the records of R requests' positions resident in one layer; their slots.

        positions [R, K] int32, seq_lens [R] int32, req_pool_indices [R] int64, num_real_reqs [1]
        int32: the batch. device_buffer_tokens [max_requests, >= B] int32, lru_slots likewise int16,
        records [max_requests, B + 1, W]: the layer's cache, changed. host_records [host rows, W]:
        the layer's host pool, pinned. counters [3] int64: hits, misses, evictions are added (by
        the fused rung). num_slots: B of this layer, where it is less than device_buffer_size.
        Returns top_k_device_locs [R, K] int32, -1 for padding; overwritten by the next call.
        Raises TypeError or ValueError before the launch; in checked mode ValueError for a position
        out of range: then no state has changed.
        """
        if self.checked and positions.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("checked waits for the kernel, which a CUDA graph cannot do")
        num_slots = self.device_buffer_size if num_slots is None else num_slots
        num_requests = len(positions)
        rows, width = len(self.req_to_host_pool), device_buffer_tokens.shape[-1]
        shapes = {
            "positions": (positions, (num_requests, self.top_k)),
            "seq_lens": (seq_lens, (num_requests,)),
            "req_pool_indices": (req_pool_indices, (num_requests,)),
            "num_real_reqs": (num_real_reqs, (1,)),
            "device_buffer_tokens": (device_buffer_tokens, (rows, max(width, num_slots))),
            "lru_slots": (lru_slots, (rows, width)),
            "records": (records, (rows, num_slots + 1, records.shape[-1])),
            "host_records": (host_records, (len(host_records), host_records.shape[-1])),
            "counters": (counters, (3,)),
        }
        self._check(num_requests, num_slots, shapes)
        answer = self.top_k_device_locs[:num_requests]
        if not num_requests:
            return answer
        common = (
            positions,
            seq_lens,
            req_pool_indices,
            num_real_reqs,
            device_buffer_tokens,
            lru_slots,
            num_slots,
            self.req_to_host_pool,
            self.page_size,
            host_records,
            records,
            self.record_bytes,
            answer,
        )
        if self.rung == "one_thread":
            blocks = -(-num_requests // 32)
            resolve_one_thread.launch(blocks, 32, *common, self._scratch)
        elif self.rung == "one_block":
            resolve_one_block.launch(
                num_requests,
                self.num_threads,
                *common,
                self._scratch,
                one_block_table_bits(self.top_k),
                shared_bytes=self._one_block_shared_bytes(num_slots),
            )
        else:
            blocks = self._blocks_per_request(num_requests)
            aligned = (host_records.data_ptr() | records.data_ptr() | self.record_bytes) % 16 == 0
            fused = self._fused(aligned, blocks > 1)
            fused.kernel.launch(
                num_requests * blocks,
                self.num_threads,
                *common,
                *self.miss_plan,
                counters,
                self._error,
                self._handover,
                blocks,
                shared_bytes=fused.shared_bytes,
            )
        if self.checked:
            self._raise_error(positions, seq_lens)
        return answer

    def _blocks_per_request(self, num_requests: int) -> int:
        if self.skip_io:
            return 1
        if self.blocks_per_request is not None:
            return self.blocks_per_request
        fills_link = num_requests >= BLOCKS_THAT_FILL_A_LINK
        return 1 if fills_link else HELPING_BLOCKS // num_requests

    def _check(self, num_requests: int, num_slots: int, shapes: dict[str, tuple]) -> None:
        """Raises ValueError if a tensor has not the shape that it must have."""
        if num_requests > self.max_requests:
            raise ValueError(
                f"positions has {num_requests} rows, more than max_requests={self.max_requests}"
            )
        if not self.top_k <= num_slots <= self.device_buffer_size:
            raise ValueError(
                f"num_slots={num_slots} is not in {self.top_k}..{self.device_buffer_size}, "
                "from top_k to device_buffer_size"
            )
        for name, (tensor, shape) in shapes.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
        for name in ("records", "host_records"):
            tensor = shapes[name][0]
            width_bytes = tensor.shape[-1] * tensor.element_size()
            if width_bytes != self.record_bytes:
                raise ValueError(
                    f"{name}: {width_bytes} bytes per record, expected {self.record_bytes}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
            if len(tensor) > 2**31:
                raise ValueError(f"{name} has {len(tensor)} rows, more than int32 can number")
            if tensor.data_ptr() % 4:
                raise ValueError(
                    f"{name} starts at address {tensor.data_ptr():#x}, no multiple of 4 bytes"
                )

    def _raise_error(self, positions: Tensor, seq_lens: Tensor) -> None:
        entry = int(self._error)
        if entry == NO_ERROR:
            return
        self._error.fill_(NO_ERROR)
        request, index = divmod(entry, self.top_k)
        raise ValueError(
            f"row {request}: position {int(positions[request, index])} is out of range: "
            f"seq_len is {int(seq_lens[request])}"
        )
