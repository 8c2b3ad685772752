"""A whole decode step, from token ids to logits: replayed as a CUDA graph, or run as it is.

On a GPU a step is hundreds of launches of a few microseconds each; Python needs longer to ask for
them than the GPU to run them. A CUDA graph records them once per batch size and replays them in one
call. It freezes everything that Python computed while it was recorded, so whatever changes from
step to step lies in device tensors: token ids, request rows, lengths, the number of real requests.

The sizes are 1, 2, 4, 8 and then in steps; a batch is padded to the next one. Padded rows have
length 0, change nobody's state, and cost time only. An eager step is padded in the same way, so it
gives the same bits.

Upstream names: num_real_reqs, req_pool_indices, seq_lens, enforce_eager.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from minihisparse.batch import Batch
from minihisparse.runner import Runner

WARM_UP_STEPS = 2  # libraries choose and load their kernels in the first one


def batch_sizes(max_running_requests: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ..., max_running_requests: few graphs, little padding."""
    sizes, size = [1, 2, 4], 8
    while size < max_running_requests:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [*(s for s in sizes if s < max_running_requests), max_running_requests]


class DecodeStep:
    """Decodes one token for each of some requests.

    use_graphs: whether steps are replayed graphs. graph_bytes: tensors that these hold on the
    device. step_bytes: what a step keeps there besides: the attention kernel's scratch, and what
    the libraries of the matrix products took in their first step.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        enforce_eager: bool = False,
        progress: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Captures the graphs, on a GPU and unless `enforce_eager`. sizes: of batches; None: see
        `batch_sizes`.

        Raises RuntimeError if the device's memory does not suffice; the message names the flags.
        """
        self.runner = runner
        self.device = runner.model.device
        self.on_gpu = self.device.type == "cuda"
        self.use_graphs = self.on_gpu and not enforce_eager and not runner.cache.checked
        self.sizes = list(sizes or batch_sizes(runner.cache.max_requests))
        self.graph_bytes = self.step_bytes = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if not self.on_gpu:
            return
        # Per size: token ids, request rows, lengths, and how many of them are real.
        shape = 3 * self.sizes[-1] + 1
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._host_inputs = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        before = torch.cuda.memory_allocated(self.device)
        with _memory_errors_name_flags("a decode step"):
            for _ in range(WARM_UP_STEPS):
                self._run(1)
        self.step_bytes = torch.cuda.memory_allocated(self.device) - before
        self.step_bytes += runner.scratch_bytes + self._inputs.nbytes
        if self.use_graphs:
            self._capture(progress)

    def __call__(
        self, token_ids: Sequence[int], rows: Sequence[int], seq_lens: Sequence[int]
    ) -> Tensor:
        """Logits [R, V] float32 of R requests: their newest tokens, request rows and lengths, the
        newest token included. The next call overwrites them.
        """
        num_requests = len(token_ids)
        if not self.on_gpu:
            batch = Batch.make(rows, seq_lens, self.device)
            return self.runner.decode(torch.tensor(token_ids, device=self.device), batch)
        size = next(size for size in self.sizes if size >= num_requests)
        padding = [0] * (size - num_requests)
        inputs = [*token_ids, *padding, *rows, *padding, *seq_lens, *padding, num_requests]
        # The last call's copy is over: somebody has waited for its logits to choose these tokens.
        staged = self._host_inputs[: len(inputs)]
        staged.copy_(torch.tensor(inputs))
        self._inputs[: len(inputs)].copy_(staged, non_blocking=True)
        if self.use_graphs:
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            logits = self._run(size)
        return logits[:num_requests]

    @torch.inference_mode()
    def _run(self, size: int) -> Tensor:
        """A step of `size` rows, all of it on the device: what is captured."""
        token_ids, rows, seq_lens = self._inputs[: 3 * size].view(3, size)
        num_real_reqs = self._inputs[3 * size : 3 * size + 1].int()
        return self.runner.decode(token_ids, Batch(rows, seq_lens.int(), num_real_reqs))

    def _capture(self, progress: bool) -> None:
        """Records a graph per size, the largest first: the others fit into its memory."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        start = perf_counter()
        pool = None
        sizes = sorted(self.sizes, reverse=True)
        with tqdm(sizes, desc="Capturing graphs", unit="graph", disable=not progress) as bar:
            for size in bar:
                bar.set_postfix(batch=size)
                with _memory_errors_name_flags(f"the decode graph of {size} requests"):
                    self._inputs.zero_()  # no request is real: nobody's state changes
                    for _ in range(WARM_UP_STEPS):
                        self._run(size)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        logits = self._run(size)
                pool = pool or graph.pool()
                self._graphs[size] = graph, logits
        torch.cuda.synchronize(self.device)
        self.graph_bytes = torch.cuda.memory_allocated(self.device) - before
        if progress:  # graphs also take memory that torch does not count
            taken = free - torch.cuda.mem_get_info(self.device)[0]
            print(
                f"captured {len(sizes)} decode graphs in {perf_counter() - start:.1f} s, "
                f"{taken / 2**20:.0f} MiB",
                file=sys.stderr,
            )


@contextmanager
def _memory_errors_name_flags(what: str) -> Iterator[None]:
    """Turns the device's out-of-memory error into one that says what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"no device memory for {what} ({str(error).splitlines()[0]}); lower "
            "--max-running-requests or --hbm-budget-gib, or pass --enforce-eager"
        ) from None
