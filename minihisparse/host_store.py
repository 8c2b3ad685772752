"""The host KV pool: the whole history of every request, one record per position and layer.

HiSparse makes host memory the authoritative home of KV: every record is written here once and never
changed, so evicting it from the device discards a copy and writes nothing back.

Upstream names: req_to_host_pool. A request owns whole pages of `page_size` rows; its position p
lies in host row `req_to_host_pool[request, p // page_size] * page_size + p % page_size`, in every
layer.

Invariants: a page has one owner or is free; a request that is refused leaves everything as it was.
Cost: num_layers * host_rows * W elements of host memory (pinned if the device is a GPU), 4 bytes
per page and request on the device. It deliberately does not know what is cached on the device.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes: a page


class HostPool:
    """Pages of KV records in host memory, and who owns them."""

    def __init__(
        self,
        *,
        num_layers: int,
        record_width: int,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_pages_per_request: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates `records` [L, num_pages * page_size, W].

        Raises MemoryError, before it allocates, if the host has less memory free than that.
        """
        shape = (num_layers, num_pages * page_size, record_width)
        check_host_memory(num_layers * num_pages * page_size * record_width * dtype.itemsize)
        self.page_size = page_size
        self.num_pages = num_pages
        self.records = aligned_empty(shape, dtype)  # [L, host_rows, W]
        if device.type == "cuda":
            pin_in_place(self.records)
        self.req_to_host_pool = torch.full(  # [max_requests, max pages] int32
            (max_requests, max_pages_per_request), -1, dtype=torch.int32, device=device
        )
        self._free = deque(range(num_pages))
        self._pages: dict[int, list[int]] = {}

    @property
    def num_free_tokens(self) -> int:
        return len(self._free) * self.page_size

    @property
    def bytes_used(self) -> int:
        return self.records.nbytes // self.num_pages * (self.num_pages - len(self._free))

    @property
    def owners(self) -> set[int]:
        """The request rows that own pages."""
        return set(self._pages)

    @property
    def max_tokens_per_request(self) -> int:
        """What one request can have while no other has anything."""
        return min(self.num_pages, self.req_to_host_pool.shape[1]) * self.page_size

    def num_tokens_of(self, request: int) -> int:
        """Positions that the request's pages have room for; 0 if it owns none."""
        return len(self._pages.get(request, ())) * self.page_size

    def allocate(self, request: int, num_tokens: int) -> None:
        """Gives a request pages for `num_tokens` positions.

        Raises ValueError if it owns pages already, or if the pool or its table is too small.
        """
        num_pages = -(-num_tokens // self.page_size)
        if request in self._pages:
            raise ValueError(f"request row {request} owns host pages already; release it first")
        if num_pages > len(self._free):
            raise ValueError(
                f"the host pool has {self.num_free_tokens} tokens free of "
                f"{self.num_pages * self.page_size}, {num_tokens} are needed; "
                "raise --host-to-device-ratio, or lower --max-new-tokens"
            )
        if num_pages > self.req_to_host_pool.shape[1]:
            limit = self.req_to_host_pool.shape[1] * self.page_size
            raise ValueError(
                f"{num_tokens} tokens are more than a request may have, {limit}; "
                "raise --max-model-len"
            )
        pages = [self._free.popleft() for _ in range(num_pages)]
        self._pages[request] = pages
        self.req_to_host_pool[request, :num_pages] = torch.tensor(pages, dtype=torch.int32)

    def release(self, request: int) -> None:
        """Takes the request's pages back. Raises ValueError if it owns none."""
        if request not in self._pages:
            raise ValueError(f"request row {request} owns no host pages")
        self._free.extend(self._pages.pop(request))
        self.req_to_host_pool[request] = -1

    def host_rows_of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Host rows, int64, of positions in the pages of the requests (shapes broadcast)."""
        positions = positions.long()
        pages = self.req_to_host_pool[requests, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def read(self, layer: int, host_rows: Tensor) -> Tensor:
        """The records [N, W] of host rows [N], on the device where `host_rows` is."""
        return self.records[layer].index_select(0, host_rows.cpu()).to(host_rows.device)

    def write(self, layer: int, host_rows: Tensor, records: Tensor) -> None:
        """Stores records [N, W] in host rows [N]."""
        self.records[layer].index_copy_(0, host_rows.cpu(), records.to("cpu"))

    def check_integrity(self) -> None:
        """Raises AssertionError if a page has two owners or is lost, or if the table disagrees."""
        owned = [page for pages in self._pages.values() for page in pages]
        everything = sorted(owned + list(self._free))
        check(everything == list(range(self.num_pages)), "a host page is lost or owned twice")
        table = self.req_to_host_pool.tolist()
        for request, row in enumerate(table):
            pages = self._pages.get(request, [])
            expected = pages + [-1] * (len(row) - len(pages))
            check(row == expected, f"req_to_host_pool[{request}] is not what request owns")


def check(condition: bool, message: str) -> None:
    """An assertion that `python -O` keeps: integrity checks are run on purpose."""
    if not condition:
        raise AssertionError(message)


def check_host_memory(num_bytes: int) -> None:
    """Raises MemoryError, with both numbers, if the host has less than `num_bytes` free."""
    free = free_host_bytes()
    if free is not None and num_bytes > free:
        raise MemoryError(
            f"the host KV pool needs {num_bytes / 2**30:.2f} GiB, but only "
            f"{free / 2**30:.2f} GiB of host memory are free; lower --max-model-len, "
            "--max-running-requests or --host-to-device-ratio"
        )


def free_host_bytes() -> int | None:
    """Memory that this process may still take: the machine's, or its container's if that is less.

    A container's is read from cgroup v2; files that were read count as used there, but make room,
    and so are not counted here. None where the platform does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text().split()
    except OSError:
        return free
    file_cache = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return free if limit == "max" else min(free, int(limit) - used + file_cache)


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that starts at a page: torch aligns to 64 bytes only.

    The bus is read in lines of 128 bytes. Records that start in the middle of one cost a line more
    each: measured 8% of the throughput at 1152-byte records (H200, PCIe 5).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).view(shape)


def pin_in_place(tensor: Tensor) -> None:
    """Page-locks a tensor's storage, so that kernels can read it over the bus.

    Not `pin_memory=True`: torch's pinned allocator rounds sizes up to a power of two, which can
    nearly double a pool of many GiB. Costs about 0.4 s per GiB. Raises RuntimeError if refused.
    """
    cudart = torch.cuda.cudart()
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    status = cudart.cudaHostRegister(address, storage.nbytes(), 0)
    if int(status) != 0:
        raise RuntimeError(
            f"cudaHostRegister could not pin {storage.nbytes() / 2**30:.2f} GiB of host memory "
            f"(status {int(status)}); see `ulimit -l`, or lower --max-model-len or "
            "--max-running-requests"
        )
    weakref.finalize(storage, cudart.cudaHostUnregister, address)
