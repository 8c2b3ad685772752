"""DSA's lightning indexer on a GPU: the newest key of each request, scores, and the best positions.

After one matrix product per layer, p = x @ W.T with W the rows of wq, wk and weights_proj, all of a
decode step is two launches:

    index_scores    queries, keys and weights of p; the newest keys into the state; a score per
                    position (`index_scores.py`)
    top_k_of_rows   the K best of each request, ascending (`top_k.py`)

and of a prompt one, `index_keys` (`index_keys.py`), which rounds as the decode step does.

    indexer = LightningIndexer(max_requests=8, max_model_len=8192, num_heads=4, head_dim=64, ...)
    indexer.write_prompt(keys, None, first_slot, first_position, p, gain, bias)
    positions = indexer.select(keys, None, first_slots, p, gain, bias, seq_lens, ...)

The first positions and the most recent ones are always selected, counted inside K; the rest by
score, ties to the lowest position. A request of up to K positions gets all of them.

On tensors of a GPU the kernels run compiled, on tensors of a CPU simulated. Calls allocate nothing
and do not wait, so a CUDA graph can hold them, once `load` has been called. Grids depend on R only.

Shapes: keys [slots, d] of one layer, in the model's dtype, or float8_e4m3fn with scales [slots]
float32; a request row's slots are contiguous, from first_slot[row] on. p [R, W], with
W >= H * d + d + H: what is behind these numbers does not matter.

Cost on the device: rope_dim * 4 bytes per position of the table of angles (a state of 30 layers and
d = 64 in bf16 has 3,840 per position of each request), 4 * max_model_len of scores per request, and
the scratch of TopK. A selection reads every key once.

It deliberately does not know what a layer is, nor where the KV of the positions lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.kernels.index_keys import KEY_THREADS, prompt_key_kernel
from minihisparse.kernels.index_scores import SCORE_THREADS, score_kernel, tile_positions
from minihisparse.kernels.numbers import dtype_name
from minihisparse.kernels.top_k import TopK
from minihisparse.rope import rope_angles

HEAD_DIMS = (16, 32, 64, 128)
MAX_HEADS = 64
# Blocks of a launch, if there is work for so many: as many as run at once.
SCORE_BLOCKS = 512


class LightningIndexer:
    """The indexer for the layers of one model, on one stream: calls share scratch and answer."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_model_len: int,
        num_heads: int,
        head_dim: int,
        rope_dim: int,
        rope_theta: float,
        num_sinks: int,
        num_recent: int,
        top_k: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates scratch for a batch of max_requests rows, padding included, on `device`.

        num_heads, head_dim: H and d of the indexer. rope_dim: of d, how many are rotated.
        num_sinks, num_recent: first and most recent positions that are always selected.
        dtype: the model's. state_dtype: the same, or torch.float8_e4m3fn.
        Raises ValueError for what the kernels cannot do.
        """
        name = dtype_name(dtype)
        if state_dtype not in (dtype, torch.float8_e4m3fn):
            raise ValueError(f"state_dtype={state_dtype} is neither {dtype} nor float8_e4m3fn")
        if head_dim not in HEAD_DIMS or not 1 <= num_heads <= MAX_HEADS:
            raise ValueError(
                f"head_dim={head_dim} must be one of {HEAD_DIMS}, num_heads={num_heads} in "
                f"1..{MAX_HEADS}"
            )
        if rope_dim % 2 or not 2 <= rope_dim <= head_dim:
            raise ValueError(f"rope_dim={rope_dim} must be even, and in 2..head_dim={head_dim}")
        if num_recent < 1 or num_sinks < 0 or num_sinks + num_recent > top_k:
            raise ValueError(
                f"num_sinks={num_sinks} must be at least 0, num_recent={num_recent} at least 1 "
                f"(the newest position), and both together at most top_k={top_k}"
            )
        if min(max_requests, max_model_len) < 1:
            raise ValueError(f"{max_requests=} and {max_model_len=} must be at least 1")
        self.max_requests, self.max_model_len = max_requests, max_model_len
        self.num_heads, self.head_dim, self.top_k = num_heads, head_dim, top_k
        self.dtype, self.state_dtype, self.device = dtype, state_dtype, device
        self.has_scales = state_dtype != dtype
        self.product_width = num_heads * head_dim + head_dim + num_heads
        state = "e4m3" if self.has_scales else name
        sizes = {"dtype": name, "state": state, "head_dim": head_dim, "rope_dim": rope_dim}
        self._prompt_keys = prompt_key_kernel(**sizes)
        self._scores_and_keys = score_kernel(
            **sizes, num_heads=num_heads, num_sinks=num_sinks, num_recent=num_recent, top_k=top_k
        )
        self._keys_per_block = KEY_THREADS * 4 // head_dim
        self._max_tiles = -(-max_model_len // tile_positions(state, head_dim))
        width = -(-max_model_len // 4) * 4  # rows start at multiples of 16 bytes
        self._top_k = TopK(max_rows=max_requests, max_length=width, top_k=top_k, device=device)
        self.angles = rope_angles(max_model_len, rope_dim, rope_theta, device)
        self._scores = torch.zeros(max_requests, width, dtype=torch.float32, device=device)
        self._lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        shape = (max_requests, top_k)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=device)

    def load(self) -> None:
        """Compiles or loads the kernels: on a GPU, before any graph.

        On a CPU they are simulated, and there is nothing to do. Raises RuntimeError if the GPU
        cannot run them.
        """
        if self.device.type != "cpu":
            self._prompt_keys.load(self._scores.device)
            self._scores_and_keys.load(self._scores.device)
            self._top_k.load()

    @property
    def device_bytes(self) -> int:
        """Bytes of the table, the scratch and the answer; the state is the caller's."""
        own = (self.angles, self._scores, self._lens, self.positions)
        return sum(tensor.nbytes for tensor in own) + self._top_k.device_bytes

    def write_prompt(
        self,
        keys: Tensor,
        scales: Tensor | None,
        first_slot: int,
        first_position: int,
        p: Tensor,
        gain: Tensor,
        bias: Tensor,
    ) -> None:
        """Writes the keys of T positions of one request, from first_position on.

        keys, scales: of one layer, changed. first_slot: of the request, position 0. p [T, W]: only
        its columns of wk are read. gain, bias [d]: of k_norm.
        Raises TypeError or ValueError for tensors that do not fit.
        """
        num_rows = len(p)
        self._check(keys, scales, p, gain, bias)
        if first_position < 0 or first_position + num_rows > self.max_model_len:
            raise ValueError(
                f"positions {first_position}..{first_position + num_rows - 1} are not in "
                f"0..{self.max_model_len - 1}"
            )
        slot = first_slot + first_position
        if first_slot < 0 or slot + num_rows > len(keys):
            raise ValueError(
                f"slots {slot}..{slot + num_rows - 1} are not all among the {len(keys)} there are"
            )
        if num_rows:
            columns = p[:, self.num_heads * self.head_dim :][:, : self.head_dim]
            self._prompt_keys.launch(
                -(-num_rows // self._keys_per_block),
                KEY_THREADS,
                columns,
                p.stride(0) * p.element_size(),
                num_rows,
                first_position,
                slot,
                gain,
                bias,
                self.angles,
                keys,
                keys if scales is None else scales,
            )

    def select(
        self,
        keys: Tensor,
        scales: Tensor | None,
        first_slot: Tensor,
        p: Tensor,
        gain: Tensor,
        bias: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        num_real_reqs: Tensor,
    ) -> Tensor:
        """Writes each real request's newest key, of position S - 1, and selects in one layer.

        keys, scales: of the layer, the newest keys are changed. first_slot [request rows] int64.
        p [R, W]: queries, key and weights, rows may lie apart. gain, bias [d]: of k_norm.
        seq_lens [R] int32: S, the new token included, at most max_model_len. req_pool_indices [R]
        int64; num_real_reqs [1] int32. Two requests must not share a row.
        Returns int32 [R, K]: ascending, less than S, -1 at the end; all -1 for padding and S = 0,
        which write no key. The next call overwrites what is returned.
        Raises TypeError or ValueError for tensors that do not fit.
        """
        num_requests = len(p)
        self._check(keys, scales, p, gain, bias)
        if num_requests > self.max_requests:
            raise ValueError(f"p has {num_requests} rows, more than {self.max_requests=}")
        for what, tensor in (("seq_lens", seq_lens), ("req_pool_indices", req_pool_indices)):
            if tuple(tensor.shape) != (num_requests,):
                raise ValueError(f"{what} is {tuple(tensor.shape)}, expected {(num_requests,)}")
        positions = self.positions[:num_requests]
        if not num_requests:
            return positions
        blocks_per_request = min(-(-SCORE_BLOCKS // num_requests), self._max_tiles)
        self._scores_and_keys.launch(
            num_requests * blocks_per_request,
            SCORE_THREADS,
            keys,
            keys if scales is None else scales,
            first_slot,
            p,
            p.stride(0) * p.element_size(),
            gain,
            bias,
            self.angles,
            seq_lens,
            req_pool_indices,
            num_real_reqs,
            self._scores,
            self._scores.stride(0) * 4,
            self._lens,
            blocks_per_request,
        )
        self._top_k.select(self._scores[:num_requests], self._lens[:num_requests], positions)
        return positions

    def _check(
        self, keys: Tensor, scales: Tensor | None, p: Tensor, gain: Tensor, bias: Tensor
    ) -> None:
        """Raises ValueError for a shape, dtype or address that the kernels would misread."""
        if keys.dtype != self.state_dtype or tuple(keys.shape) != (len(keys), self.head_dim):
            raise ValueError(
                f"keys is {keys.dtype} {tuple(keys.shape)}, expected {self.state_dtype} "
                f"[slots, {self.head_dim}]"
            )
        if not keys.is_contiguous() or keys.data_ptr() % 16:
            raise ValueError(
                f"keys must be contiguous and at a multiple of 16 bytes, got strides "
                f"{keys.stride()} at {keys.data_ptr():#x}"
            )
        if (scales is not None) != self.has_scales:
            raise ValueError(f"scales must be given for float8_e4m3fn alone, got {type(scales)}")
        if scales is not None:
            found = scales.dtype, tuple(scales.shape)
            if found != (torch.float32, (len(keys),)) or not scales.is_contiguous():
                raise ValueError(f"scales is {found}, expected float32 [{len(keys)}], contiguous")
        if p.dtype != self.dtype or p.ndim != 2 or p.shape[1] < self.product_width:
            raise ValueError(
                f"p is {p.dtype} {tuple(p.shape)}, expected {self.dtype} with 2 dimensions and at "
                f"least {self.product_width} columns"
            )
        row_bytes, size = p.stride(0) * p.element_size(), p.element_size()
        if p.stride(1) != 1 or (p.data_ptr() | row_bytes | p.shape[1] * size) % 4:
            raise ValueError(
                f"p: address, row stride and row must be multiples of 4 bytes (of 16-bit numbers, "
                f"give W an even number of rows), got {p.data_ptr():#x}, {row_bytes} and "
                f"{p.shape[1] * size}"
            )
        for what, tensor in (("gain", gain), ("bias", bias)):
            if tensor.dtype != self.dtype or tuple(tensor.shape) != (self.head_dim,):
                raise ValueError(
                    f"{what} is {tensor.dtype} {tuple(tensor.shape)}, expected {self.dtype} "
                    f"[{self.head_dim}]"
                )
            if tensor.data_ptr() % 4 or not tensor.is_contiguous():
                raise ValueError(f"{what} must be contiguous, at a multiple of 4 bytes")
