"""What a run cost: device memory, time, and the traffic of the cache, as the JSON of every command.

Memory is reported by kind, in bytes, and never as one number: KV records, selector state and tables
are allocated once and stay; workspace is the peak of everything else while a prompt is prefilled.
On a GPU torch's allocator counts the workspace; on a CPU, where host and device memory are the same
to torch, `AllocationAccount` counts what operations allocate.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minihisparse
from minihisparse.decode_step import DecodeStep
from minihisparse.kv_cache import KVCache
from minihisparse.runner import Runner
from minihisparse.selector import Selector


class AllocationAccount(TorchDispatchMode):
    """Counts the bytes of storages that operations create: `live_bytes` now, `peak_bytes` at most.

    Storages that existed before are not counted, even if `out=` makes them grow, nor are the
    temporaries inside one operation. Costs some ten microseconds per operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            _storage_id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor: its argument is the new one
            before = set()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage_id(tensor) not in before:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = weakref.finalize(storage, self._remove, key, num_bytes)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.live_bytes -= num_bytes


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Workspace:
    """The largest number of device bytes that `measure` saw allocated beyond what was there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            peak = torch.cuda.max_memory_allocated(self.device) - before
        else:
            with AllocationAccount() as account:
                yield
            peak = account.peak_bytes
        self.peak_bytes = max(self.peak_bytes, peak)


@dataclass
class Timings:
    """Times of a run, filled as it goes. A decode step gives one token to each running request."""

    ttft_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    num_decode_tokens: int = 0

    def add_step(self, seconds: float, num_tokens: int) -> None:
        self.step_ms.append(1e3 * seconds)
        self.num_decode_tokens += num_tokens

    def report(self) -> dict:
        """Decode tokens per second, median time to first token, percentiles over decode steps."""

        def percentile(values: list[float], q: float) -> float | None:
            return round(float(np.percentile(values, q)), 3) if values else None

        seconds = sum(self.step_ms) / 1e3
        return {
            "steps": len(self.step_ms),
            "tokens_per_second": round(self.num_decode_tokens / seconds, 3) if seconds else None,
            "ttft_ms": percentile(self.ttft_ms, 50),
            "tpot_ms_p50": percentile(self.step_ms, 50),
            "tpot_ms_p99": percentile(self.step_ms, 99),
        }


def cache_report(cache: KVCache) -> dict:
    """Hits, misses and evictions of all layers since the cache was made.

    A hit is a selected position that was on the device already, the newest one included. All None
    for FullCache.
    """
    if cache.counters is None:  # full KV: everything is a hit, and nobody counts
        return dict.fromkeys(("hits", "misses", "hit_rate", "evictions", "bytes_h2d"))
    hits, misses, evictions = cache.counters.sum(0).tolist()
    return {
        "hits": hits,
        "misses": misses,
        "hit_rate": round(hits / (hits + misses), 6) if hits + misses else None,
        "evictions": evictions,
        "bytes_h2d": misses * cache.record_bytes,
    }


def memory_report(
    cache: KVCache,
    selector: Selector,
    workspace: Workspace,
    num_tokens: Sequence[int],
    step: DecodeStep | None = None,
) -> dict:
    """Bytes by kind. num_tokens: positions of each request, for what full KV would take.

    device_kv_bytes, selector_bytes, metadata_bytes: allocated on the device, for all request rows.
    workspace_bytes: see `Workspace`. host_pool_bytes: the pool's size (0 for FullCache).
    full_kv_bytes: the records of these requests, all of them, on the device.
    step: adds step_bytes, what the decode step's kernels and libraries keep on the device, and
        graph_bytes. On a GPU the first three and these two are what torch has allocated, beside
        the weights.
    """
    held = {} if step is None else {"step_bytes": step.step_bytes, "graph_bytes": step.graph_bytes}
    return {
        "device_kv_bytes": cache.device_kv_bytes,
        "selector_bytes": selector.state_bytes,
        "metadata_bytes": cache.metadata_bytes,
        "workspace_bytes": workspace.peak_bytes,
        "host_pool_bytes": cache.host.records.nbytes if cache.host is not None else 0,
        "full_kv_bytes": sum(num_tokens) * cache.num_layers * cache.record_bytes,
        **held,
    }


def report_run(
    report: dict,
    runner: Runner,
    timings: Timings,
    workspace: Workspace,
    num_tokens: Sequence[int],
    step: DecodeStep | None = None,
) -> None:
    """Puts into a command's report what a run of its runner cost: times, cache, memory, prefix.

    In place, and times first: they are reported also where a broken device gives no counters.
    num_tokens, step: as in `memory_report`.
    """
    report.update(timings.report())
    report["cache"] = cache_report(runner.cache)
    report["memory"] = memory_report(runner.cache, runner.selector, workspace, num_tokens, step)
    report["prefix"] = runner.prefix_report()


def environment_report(command: str, device: torch.device, dtype: torch.dtype, seed: int) -> dict:
    """The keys that every command's JSON starts with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "command": command,
        "version": minihisparse.__version__,
        "torch": torch.__version__,
        "device": str(device),
        "device_name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
    }
