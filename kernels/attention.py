"""Launches decode attention: the scratch that it needs, and the checks before a launch.

    attention = DecodeAttention(max_requests=8, num_q_heads=9, num_kv_heads=3, head_dim=64, ...)
    attention.attend(q, records, slots, first_slot, req_pool_indices, out)     # one layer

The kernel is in `attention_kernel.py`; it is the same for both caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.kernels.attention_kernel import MAX_HEAD_BYTES, attention_kernel
from minihisparse.kernels.numbers import dtype_name


class DecodeAttention:
    """Launches the kernel, for all layers of a model, on one stream: calls share the scratch.

    `attend` allocates nothing and does not wait, so a CUDA graph can hold it, once `load` has been
    called. On tensors of a CPU the kernel is simulated.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """max_requests: rows of the largest batch, padding included. top_k: K, slots per request.

        Raises ValueError for what the kernel cannot do.
        """
        if min(max_requests, num_q_heads, num_kv_heads, head_dim, top_k) < 1:
            raise ValueError(
                f"got {max_requests=}, {num_q_heads=}, {num_kv_heads=}, {head_dim=}, {top_k=}; "
                "all must be at least 1"
            )
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}"
            )
        name = dtype_name(dtype)
        head_bytes = head_dim * dtype.itemsize
        if head_bytes % 16 or head_bytes > MAX_HEAD_BYTES:
            raise ValueError(
                f"head_dim={head_dim} in {name} is {head_bytes} bytes: must be a multiple of 16, "
                f"at most {MAX_HEAD_BYTES}"
            )
        self.max_requests, self.top_k = max_requests, top_k
        self.num_q_heads, self.head_dim = num_q_heads, head_dim
        self.record_width = 2 * num_kv_heads * head_dim
        self.dtype = dtype
        self._made = attention_kernel(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            top_k=top_k,
            dtype=name,
        )
        num_tickets = max_requests * self._made.num_groups
        num_blocks = num_tickets * self._made.num_splits
        rows = num_blocks if self._made.num_splits > 1 else 0
        shape = (rows, self._made.num_partials)
        self._partials = torch.zeros(shape, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(num_tickets, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(4, dtype=torch.int32, device=device)

    def load(self) -> None:
        """Compiles or loads the kernel: on a GPU, before a graph is captured.

        Raises RuntimeError if the GPU cannot run it.
        """
        if self._zeros.is_cuda:
            self._made.kernel.load(self._zeros.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of the scratch."""
        return sum(buffer.nbytes for buffer in (self._partials, self._tickets, self._zeros))

    def attend(
        self,
        q: Tensor,
        records: Tensor,
        slots: Tensor,
        first_slot: Tensor,
        req_pool_indices: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Attends R queries to the records of one layer at their requests' slots; returns `out`.

        q [R, Hq, D], each row contiguous, rows may lie apart. records [N, W], W = 2 * Hkv * D: K of
        all KV heads, then V. slots [R, K] int32: -1 anywhere is padding; a row without any slot
        gives zeros. first_slot [request rows] int64: where in records a request row's slot 0 is;
        req_pool_indices [R] int64: the request rows. out [R, Hq, D] is written, all of it.
        Raises TypeError or ValueError before the launch.
        """
        num_requests = len(q)
        if num_requests > self.max_requests:
            raise ValueError(f"q has {num_requests} rows, more than {self.max_requests=}")
        shape = (num_requests, self.num_q_heads, self.head_dim)
        expected = {
            "q": (q, shape, self.dtype),
            "records": (records, (len(records), self.record_width), self.dtype),
            "slots": (slots, (num_requests, self.top_k), torch.int32),
            "first_slot": (first_slot, (max(len(first_slot), 1),), torch.int64),
            "req_pool_indices": (req_pool_indices, (num_requests,), torch.int64),
            "out": (out, shape, self.dtype),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
                )
        for name, tensor in (("records", records), ("out", out)):
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        q_row_bytes = q.stride(0) * q.element_size() if num_requests > 1 else 0
        for name, address, multiple in (
            ("q", q.data_ptr() | q_row_bytes, 16),
            ("records", records.data_ptr(), 16),
            ("out", out.data_ptr(), 4),
        ):
            if address % multiple:
                raise ValueError(f"{name}: rows do not start at multiples of {multiple} bytes")
        if num_requests:
            self._made.kernel.launch(
                num_requests * self._made.num_splits * self._made.num_groups,
                self._made.num_threads,
                q,
                q_row_bytes,
                records,
                slots,
                first_slot,
                req_pool_indices,
                out,
                self._zeros,
                self._partials,
                self._tickets,
            )
        return out
