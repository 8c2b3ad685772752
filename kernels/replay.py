"""Replays a miss plan: what Resolve fetched for one layer is fetched for another one, and no more.

Layers that share a selection and are in lockstep (the same slots hold the same positions) need one
Resolve: it has decided which slots are filled from which host rows, and host rows and slots are the
same in every layer. So the layers that follow copy records, and decide nothing.

    counts   [2, 0, 3]                     of three requests, one after the other in one line:
    record    0  1  2  3  4                of all requests
    request   0  0  2  2  2                by a search in the sums of the counts [0, 2, 2]
    block     0  0  1  1  2                with 3 blocks: an equal share each, whoever misses

The number of blocks is a parameter and does not grow with the batch: the copy runs beside other
work and must leave it the chip. On the link a few blocks suffice (16 of 512 threads have 384 KiB
under way; at 50 GB/s, 100 KiB hide 2 us). One launch per layer, so that the next layer can start
while the ones after it are still fetched.

Shapes: host_rows, slots [max_requests, K] int32, counts [max_requests] int32, as `Resolver` leaves
them; records [max_requests, B + 1, W].
Traffic per launch: record_bytes per miss over the bus, as many into the slots; 8 bytes of plan per
miss; each block reads the counts of all requests.

It deliberately does not know which layers share, nor when the copy may run (`prefetcher.py`).
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from minihisparse.kernels.copy_records import copy_function
from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    HOST_ADDRESS,
    Kernel,
    cuda,
    int32,
    int64,
    kernel,
    uint32,
)
from minihisparse.kernels.resolver import MissPlan

REPLAY_BLOCKS = 16
SIMULATED_BLOCKS = 2
MAX_THREADS = 512  # so that a block finds room beside other kernels
MAX_REQUESTS = 4096  # their counts and sums lie in shared memory


@cache
def replay_kernel(*, num_threads: int, max_requests: int, record_bytes_are_16s: bool) -> Kernel:
    """The kernel, made for batches up to a size and one width of access."""
    THREADS, REQUESTS = num_threads, max_requests
    copy_records = copy_function(record_bytes_are_16s)

    @kernel(max_threads=num_threads)
    def replay(
        miss_host_rows: int32[:, ::1],  # [>= R, K] read up to each count
        miss_slots: int32[:, ::1],  # [>= R, K] likewise
        miss_counts: int32[::1],  # [>= R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        host_records: HOST_ADDRESS,  # [host_rows, record_bytes] read
        records: DEVICE_ADDRESS,  # [max_requests, B + 1, record_bytes] missed records are written
        slots_per_request: int64,  # B + 1
        record_bytes: int64,
    ):
        counts = cuda.shared.array(REQUESTS, int32)
        starts = cuda.shared.array(REQUESTS, int32)  # records of all requests before
        host_rows = cuda.shared.array(THREADS, int32)  # of the records at hand
        slots = cuda.shared.array(THREADS, int32)  # likewise, counted from request row 0
        tid = cuda.threadIdx.x & 1023  # the mask tells the compiler that it is not negative

        num_requests = int64(min(req_pool_indices.shape[0], num_real_reqs[0]))
        if num_requests <= 0:
            return

        # ---- sums of the counts: each thread adds its own, there is no order to wait for
        for r in range(tid, num_requests, THREADS):
            counts[r] = miss_counts[r]
        cuda.syncthreads()
        for r in range(tid, num_requests, THREADS):
            before = int32(0)
            for other in range(r):
                before = int32(before + counts[other])
            starts[r] = before
        cuda.syncthreads()

        # ---- this block's share, as many records at a time as it has threads
        total = uint32(starts[num_requests - 1] + counts[num_requests - 1])
        num_blocks = uint32(cuda.gridDim.x)
        share = int64((total + num_blocks - uint32(1)) // num_blocks)
        first = int64(cuda.blockIdx.x) * share
        end = min(first + share, int64(total))
        while first < end:
            num_records = min(end - first, THREADS)
            if tid < num_records:
                record = first + tid
                request, last = int64(0), num_requests - 1
                while request < last:  # the last one that starts at or before the record
                    middle = (request + last + 1) >> 1
                    if starts[middle] <= record:
                        request = middle
                    else:
                        last = middle - 1
                i = record - starts[request]
                host_rows[tid] = miss_host_rows[request, i]
                row = req_pool_indices[request]
                slots[tid] = row * slots_per_request + miss_slots[request, i]
            cuda.syncthreads()
            copy_records(
                num_records,
                host_rows,
                slots,
                host_records,
                records,
                record_bytes,
                tid,
                THREADS,
            )
            cuda.syncthreads()  # the lists are read: the next records may have them
            first += THREADS

    return replay


class Replayer:
    """Replays the plan that a `Resolver` (with record_plan) has left behind, into other layers."""

    def __init__(
        self,
        plan: MissPlan,
        *,
        device_buffer_size: int,
        record_bytes: int,
        replay_blocks: int | None = None,
    ) -> None:
        """device_buffer_size: B, the largest of all layers. replay_blocks: blocks per launch; None:
        16 on a GPU, 2 simulated. Allocates nothing.

        Raises ValueError for what the kernel cannot do.
        """
        max_requests, top_k = plan.host_rows.shape
        self.plan = plan
        self.device = plan.counts.device
        if replay_blocks is None:
            replay_blocks = REPLAY_BLOCKS if self.device.type == "cuda" else SIMULATED_BLOCKS
        if replay_blocks not in range(1, 1025):
            raise ValueError(f"replay_blocks={replay_blocks}: must be in 1..1024")
        if record_bytes % 4 or record_bytes < 4:
            raise ValueError(f"records of {record_bytes} bytes: must be a multiple of 4 bytes")
        if max_requests > MAX_REQUESTS:
            raise ValueError(f"max_requests={max_requests}: a replay can have {MAX_REQUESTS}")
        self.replay_blocks = replay_blocks
        self.device_buffer_size = device_buffer_size
        self.record_bytes = record_bytes
        # No more threads than one request can have pieces of 16 bytes: simulated ones cost time.
        pieces = top_k * -(-record_bytes // 16)
        self.num_threads = min(-(-pieces // 32) * 32, MAX_THREADS)

    def _kernel(self, record_bytes_are_16s: bool) -> Kernel:
        # Few sizes, so that a cache of another size finds the machine code of the last one.
        size = max(256, 1 << (len(self.plan.counts) - 1).bit_length())
        return replay_kernel(
            num_threads=self.num_threads,
            max_requests=size,
            record_bytes_are_16s=record_bytes_are_16s,
        )

    def load(self) -> None:
        """Compiles or loads the kernel: on a GPU, before any graph. Raises as `Resolver.load`."""
        if self.device.type == "cuda":
            self._kernel(self.record_bytes % 16 == 0).load(self.device)

    def replay(
        self,
        req_pool_indices: Tensor,
        num_real_reqs: Tensor,
        *,
        host_records: Tensor,
        records: Tensor,
        num_slots: int | None = None,
    ) -> None:
        """Fetches the plan's records of one layer.

        req_pool_indices [R] int64, num_real_reqs [1] int32: the batch that the plan was made for.
        host_records [host rows, W]: the layer's host pool, pinned. records [max_requests, B + 1,
        W]: the layer's cache, changed in the plan's slots. num_slots: B of this layer, the same as
        its anchor's, where it is less than device_buffer_size.
        Allocates nothing and does not wait: a CUDA graph can hold it, once `load` has been called.
        Raises TypeError or ValueError before the launch.
        """
        num_requests = len(req_pool_indices)
        num_slots = self.device_buffer_size if num_slots is None else num_slots
        slots_per_request = num_slots + 1
        if num_requests > len(self.plan.counts):
            raise ValueError(
                f"req_pool_indices has {num_requests} rows, the plan {len(self.plan.counts)}"
            )
        if tuple(num_real_reqs.shape) != (1,):
            raise ValueError(f"num_real_reqs is {tuple(num_real_reqs.shape)}, expected (1,)")
        if records.ndim != 3 or records.shape[1] != slots_per_request:
            raise ValueError(
                f"records is {tuple(records.shape)}, expected [rows, {slots_per_request}, W]"
            )
        if records.shape[0] * slots_per_request > 2**31:
            raise ValueError(f"records is {tuple(records.shape)}: more slots than int32 can number")
        for name, tensor in (("records", records), ("host_records", host_records)):
            _check_records(name, tensor, self.record_bytes)
        if not num_requests:
            return
        aligned = (host_records.data_ptr() | records.data_ptr() | self.record_bytes) % 16 == 0
        self._kernel(aligned).launch(
            self.replay_blocks,
            self.num_threads,
            *self.plan,
            req_pool_indices,
            num_real_reqs,
            host_records,
            records,
            slots_per_request,
            self.record_bytes,
        )


def _check_records(name: str, tensor: Tensor, record_bytes: int) -> None:
    """Raises ValueError unless a tensor is whole records, one after the other."""
    width_bytes = tensor.shape[-1] * tensor.element_size()
    if width_bytes != record_bytes:
        raise ValueError(f"{name}: {width_bytes} bytes per record, expected {record_bytes}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if tensor.data_ptr() % 4:
        raise ValueError(f"{name} starts at {tensor.data_ptr():#x}, no multiple of 4 bytes")
