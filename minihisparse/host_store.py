"""The host KV pool: the whole history of every request, one record per position and layer.

HiSparse makes host memory the authoritative home of KV: every record is written here once and never
changed, so evicting it from the device discards a copy and writes nothing back.

Upstream names: req_to_host_pool. A request owns whole pages of `page_size` rows; its position p
lies in host row `req_to_host_pool[request, p // page_size] * page_size + p % page_size`, in every
layer.

Requests with a common prefix share its whole pages (`prefix.py`): a page is free again when its
last user has left. A page that is common in part is copied.

Invariants: a page is free or has users, as many as are counted; nobody writes into a page that has
several, because what comes after the prefix is in pages of the request's own; a request that is
refused, or interrupted while its prefix is copied, leaves everything as it was.
Cost: num_layers * host_rows * W elements of host memory (pinned if the device is a GPU), 4 bytes
per page and request on the device. It deliberately does not know what is cached on the device.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter, deque
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minihisparse.prefix import Prefix

ALIGNMENT = 4096  # bytes: a page


class HostPool:
    """Pages of KV records in host memory, and who owns them.

    num_shared_pages: how often a page was given to one more user. peak_pages: most in use at once;
    peak_saved_pages: most at once that would be in use besides, if nothing were shared.
    """

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
        self._num_users = [0] * num_pages
        self._num_shared: dict[int, int] = {}  # pages that a request was given from another's
        self.reset_counters()

    def reset_counters(self) -> None:
        """Counts from here on; the peaks begin with what is in use."""
        self.num_shared_pages = self.peak_pages = self.peak_saved_pages = 0
        self._note_peaks()

    def _note_peaks(self) -> None:
        in_use = self.num_pages - len(self._free)
        saved = sum(map(len, self._pages.values())) - in_use
        self.peak_pages = max(self.peak_pages, in_use)
        self.peak_saved_pages = max(self.peak_saved_pages, saved)

    @property
    def num_free_tokens(self) -> int:
        return len(self._free) * self.page_size

    @property
    def bytes_used(self) -> int:
        return self.page_bytes * (self.num_pages - len(self._free))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers."""
        return self.records.nbytes // self.num_pages

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

    def num_shared_tokens_of(self, request: int) -> int:
        """Positions in pages that it was given from another request: it must not write there."""
        return self._num_shared.get(request, 0) * self.page_size

    def allocate(self, request: int, num_tokens: int, prefix: Prefix | None = None) -> None:
        """Gives a request pages for `num_tokens` positions.

        prefix: its first tokens are another's, whose records are there: their whole pages are
            shared, and the records in the last one, if it is common in part, are copied.
        Raises ValueError if it owns pages already, or if the pool or its table is too small, or if
        the other request has no such prefix.
        """
        if request in self._pages:
            raise ValueError(f"request row {request} owns host pages already; release it first")
        num_pages = -(-num_tokens // self.page_size)
        num_shared, num_rows_to_copy, donor = 0, 0, []
        if prefix is not None:
            if prefix.num_tokens > min(num_tokens, self.num_tokens_of(prefix.row)):
                raise ValueError(
                    f"{prefix.num_tokens} tokens cannot be shared: request row {prefix.row} has "
                    f"room for {self.num_tokens_of(prefix.row)}, the new one for {num_tokens}"
                )
            donor = self._pages[prefix.row]
            num_shared, num_rows_to_copy = divmod(prefix.num_tokens, self.page_size)
        num_own = num_pages - num_shared
        if num_own > len(self._free):
            raise ValueError(
                f"the host pool has {self.num_free_tokens} tokens free of "
                f"{self.num_pages * self.page_size}, {num_tokens - num_shared * self.page_size} "
                "are needed; raise --host-to-device-ratio, or lower --max-new-tokens"
            )
        if num_pages > self.req_to_host_pool.shape[1]:
            limit = self.req_to_host_pool.shape[1] * self.page_size
            raise ValueError(
                f"{num_tokens} tokens are more than a request may have, {limit}; raise "
                "--max-model-len"
            )
        pages = donor[:num_shared] + list(islice(self._free, num_own))
        if num_rows_to_copy:  # into a page that is still free: whoever interrupts changes nothing
            self._copy_rows(donor[num_shared], pages[num_shared], num_rows_to_copy)
        for _ in range(num_own):
            self._free.popleft()
        for page in pages:
            self._num_users[page] += 1
        self._pages[request] = pages
        self._num_shared[request] = num_shared
        self.num_shared_pages += num_shared
        self._note_peaks()
        self.req_to_host_pool[request, :num_pages] = torch.tensor(pages, dtype=torch.int32)

    def _copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copies the first rows of a page, all layers."""
        if self.req_to_host_pool.is_cuda:  # a kernel may still write them, or read what was there
            torch.cuda.synchronize(self.req_to_host_pool.device)
        source, target = source * self.page_size, target * self.page_size
        self.records[:, target : target + num_rows] = self.records[:, source : source + num_rows]

    def release(self, request: int) -> None:
        """Takes the request's pages back, but for those that others use. Raises ValueError if it
        owns none.
        """
        if request not in self._pages:
            raise ValueError(f"request row {request} owns no host pages")
        for page in self._pages.pop(request):
            self._num_users[page] -= 1
            if not self._num_users[page]:
                self._free.append(page)
        del self._num_shared[request]
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

    def read_first(self, layer: int, request: int, records: Tensor) -> None:
        """Copies the records of positions 0..T-1 of a request into `records` [T, W], on any device.

        One copy for pages that lie side by side; on a GPU in the order of the current stream.
        """
        size, num_tokens = self.page_size, len(records)
        if not num_tokens:
            return
        pages = np.array(self._pages[request][: -(-num_tokens // size)])
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
        start = 0
        for run in runs:
            end = min(start + len(run) * size, num_tokens)
            row = int(run[0]) * size
            source = self.records[layer, row : row + end - start]
            records[start:end].copy_(source, non_blocking=True)
            start = end

    def check_integrity(self) -> None:
        """Raises AssertionError if a page is lost or its users are miscounted, or if the table
        disagrees.
        """
        users = Counter(page for pages in self._pages.values() for page in set(pages))
        num_owned = sum(len(pages) for pages in self._pages.values())
        everything = sorted([*users, *self._free])
        counts = [users[page] for page in range(self.num_pages)]
        check(
            everything == list(range(self.num_pages))
            and counts == self._num_users
            and num_owned == sum(counts),
            "a host page is lost or owned twice",
        )
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
