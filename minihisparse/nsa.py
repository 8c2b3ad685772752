"""NSA: attention in three gated parts, one of them over compressed blocks, which also select.

    compressed   one trained record per complete block of `block_size` positions, all of them
    selected     the positions of the blocks whose compressed keys draw most attention
    window       the newest `window` positions
    out = g_c * compressed + g_s * selected + g_w * window;   g = sigmoid(x W + b), per head

A block's K and V are means of its positions' K and V, with trained weights that depend on the place
in the block and on the token (its normed input x), then a matrix per KV head:

    w[t, j] = exp(x[t] . pool[j] + place[t mod block_size, j])      j: one of the 2 * Hkv vectors
    record[j] = proj[j] (sum_t w[t, j] vector[t, j] / sum_t w[t, j])

So an incomplete block is a running sum. Keys are pooled as they are, rotated: what turns fast
within a block cancels out, and a far query sees it at random anyway. Blocks are ranked by the
softmax over compressed keys, heads summed; the first `num_first_blocks` and the newest
`num_last_blocks` are always read. The newest one may have few positions yet, so that the window
can reach into a block before them; the list still never has more than K. (arXiv 2502.11089; here
one selection per layer, and trained beside a frozen dense model by `weights_scripts/distil.py`: the
prompt is read densely.)

Shapes: records [L, units + 1, W]; sums [L, max_requests + 1, 2 * Hkv, D + 1] float32, the last
number the sum of the weights. The last unit and row are nobody's: padding writes there.
Cost: a record per block, 1/32 of the KV; it is read twice per step and layer, once to be gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minihisparse.addon import Addon, take
from minihisparse.attention import Branches
from minihisparse.batch import Batch
from minihisparse.indexer import top_k_positions
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.selector import Selector, SelectorSize

if TYPE_CHECKING:
    from minihisparse.kernels.top_k import TopK

LARGEST_LOGIT = 8.0  # of a position's weight, either sign: sums of exp stay in range
NUM_BRANCHES = 3
NOWHERE = 2**31 - 1  # sorts behind all positions; odd


class NSAWeights(NamedTuple):
    """Of one layer."""

    pool: Tensor  # [2 * Hkv, hidden], the model's dtype
    place: Tensor  # [block_size, 2 * Hkv] float32
    proj: Tensor  # [2 * Hkv, D, D] float32, [out, in]
    gate: Tensor  # [Hq * 3, hidden], the model's dtype: compressed, selected, window of each head
    gate_bias: Tensor  # [Hq * 3], the model's dtype


def weight_shapes(
    num_q_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int, block_size: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors in an add-on, in the order of NSAWeights."""
    return {
        "pool.weight": (2 * num_kv_heads, hidden_size),
        "place": (block_size, 2 * num_kv_heads),
        "proj.weight": (2 * num_kv_heads, head_dim, head_dim),
        "gate.weight": (NUM_BRANCHES * num_q_heads, hidden_size),
        "gate.bias": (NUM_BRANCHES * num_q_heads,),
    }


def tensor_name(layer: int, name: str) -> str:
    """The name in an add-on file."""
    return f"model.layers.{layer}.self_attn.nsa.{name}"


def weighted(logits: Tensor, vectors: Tensor) -> Tensor:
    """What T positions add to their blocks' sums: [T, 2 * Hkv, D + 1] float32.

    logits [T, 2 * Hkv] float32, of the weights; vectors [T, 2 * Hkv, D], K of all heads, then V.
    """
    weights = logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).exp()[:, :, None]
    return torch.cat([vectors.float() * weights, weights], dim=2)


def compress(sums: Tensor, proj: Tensor) -> Tensor:
    """Sums of N blocks [N, 2 * Hkv, D + 1] to their vectors [N, 2 * Hkv, D] float32."""
    means = sums[:, :, :-1] / sums[:, :, -1:]
    return (means.transpose(0, 1) @ proj.transpose(1, 2)).transpose(0, 1)


def gates(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, hidden] -> [T, Hq, 3] float32 in 0..1."""
    return F.linear(x, weight, bias).float().sigmoid().unflatten(1, (-1, NUM_BRANCHES))


class _Step(NamedTuple):
    """What the layers of a decode step have in common: R rows, M blocks. Padding has length 0."""

    batch: Batch
    rows: Tensor  # [R] int64, where the sums of the newest blocks are
    unit: Tensor  # [R] int64, where the newest blocks' records are
    places: Tensor  # [R] int64, of the newest tokens in their blocks
    begins: Tensor  # [R, 1, 1] bool, they are the first
    units: Tensor  # [R * M] int64, where all blocks' records are
    incomplete: Tensor  # [R, M] bool, or not there at all
    forced: Tensor  # [R, M] bool, always read
    num_blocks: Tensor  # [R] int32, the incomplete one included
    seq_lens: Tensor  # [R, 1] int32
    recent: Tensor  # [R, window] int32, the positions of the window, the newest first; may be < 0
    offsets: Tensor  # [block_size] int32: 0, 1, ...


class NSASelector(Selector):
    """Compressed records of all layers, and the selection that they make."""

    unit_name = "blocks"

    def __init__(
        self,
        addon: Addon,
        model: Decoder,
        *,
        top_k: int,
        max_requests: int,
        max_model_len: int,
        num_blocks: int | None = None,
        kernels: bool | None = None,
    ) -> None:
        """num_blocks: of all requests together; None: for max_requests of max_model_len tokens.
        kernels: rank blocks with a kernel (simulated on a CPU) or with torch; None: on a GPU.

        Raises ValueError if the add-on is for another model or lacks a tensor, or if top_k is not a
        number of blocks, or fewer than are always read.
        """
        addon.check_model(model)
        settings, config = addon.settings, model.config
        self.block_size, self.window = settings["block_size"], settings["window"]
        self.num_first, self.num_last = settings["num_first_blocks"], settings["num_last_blocks"]
        check_settings(addon, top_k)
        super().__init__(
            top_k=top_k,
            unit_tokens=self.block_size,
            num_units=num_blocks,
            max_requests=max_requests,
            max_model_len=max_model_len,
            device=model.device,
        )
        self.max_blocks = -(-max_model_len // self.block_size)  # of a request
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        layers, num_vectors = config.num_hidden_layers, 2 * self.num_kv_heads
        self._weights = [_load(addon, model, layer) for layer in range(layers)]
        shape = (layers, self.extents.num_units + 1, config.record_width)
        self.records = torch.zeros(shape, dtype=model.dtype, device=model.device)
        shape = (layers, max_requests + 1, num_vectors, self.head_dim + 1)
        self.sums = torch.zeros(shape, dtype=torch.float32, device=model.device)
        self._step: _Step | None = None
        self._compressed = self._selected = torch.empty(0)  # of the last `select`
        self._top_blocks: TopK | None = None
        if model.device.type == "cuda" if kernels is None else kernels:
            self._top_blocks = _make_top_blocks(
                top_k // self.block_size, max_requests, self.max_blocks, model.device
            )
            self._top_blocks.load()

    @staticmethod
    def size(
        addon: Addon, *, dtype: torch.dtype, top_k: int, max_model_len: int, kernels: bool
    ) -> SelectorSize:
        """What the state takes; with kernels, their buffers included. Not the weights."""
        sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        layers, kv_heads, head_dim = (int(addon.metadata[name]) for name in sizes)
        block_size = addon.settings["block_size"]
        record_bytes = layers * 2 * kv_heads * head_dim * dtype.itemsize
        sums_bytes = layers * 2 * kv_heads * (head_dim + 1) * 4
        kernel_bytes = [0, 0]  # for one row, for two
        if kernels:  # made without memory, to be asked
            max_blocks, meta = -(-max_model_len // block_size), torch.device("meta")
            kernel_bytes = [
                _make_top_blocks(top_k // block_size, rows, max_blocks, meta).device_bytes
                for rows in (1, 2)
            ]
        row = kernel_bytes[1] - kernel_bytes[0]
        return SelectorSize(
            unit_tokens=block_size,
            unit_bytes=record_bytes,
            row_bytes=8 + sums_bytes + row,
            fixed_bytes=record_bytes + sums_bytes + kernel_bytes[0] - row,
        )

    @property
    def unit_state(self) -> tuple[Tensor, ...]:
        """The sums are of a block that is not whole."""
        return (self.records,)

    @property
    def state_bytes(self) -> int:
        own = self._top_blocks.device_bytes if self._top_blocks else 0
        return self.records.nbytes + self.sums.nbytes + self.extents.first.nbytes + own

    def _weighted(self, layer: int, inputs: AttentionInputs, places: Tensor) -> Tensor:
        """What tokens at these places [T] in their blocks add to the sums."""
        weights = self._weights[layer]
        logits = F.linear(inputs.x, weights.pool).float() + weights.place[places]
        return weighted(logits, inputs.records.unflatten(1, (-1, self.head_dim)))

    def write_prompt(
        self, layer: int, row: int, first_position: int, inputs: AttentionInputs
    ) -> None:
        size, num_tokens = self.block_size, len(inputs.x)
        head = first_position % size  # positions of the first block that came in earlier chunks
        places = (torch.arange(num_tokens, device=inputs.x.device) + head) % size
        added = self._weighted(layer, inputs, places)
        tail = -(head + num_tokens) % size
        added = F.pad(added, (0, 0, 0, 0, head, tail)).unflatten(0, (-1, size)).sum(dim=1)
        if head:
            added[0] += self.sums[layer, row]
        self.sums[layer, row] = added[-1]
        first = self.extents.extent_of(row)[0] + first_position // size
        records = compress(added, self._weights[layer].proj).flatten(1)
        self.records[layer, first : first + len(records)] = records.to(self.records.dtype)

    def write(self, layer: int, inputs: AttentionInputs, batch: Batch) -> None:
        """Adds the newest tokens; an incomplete block's record is made anew each time."""
        step = self._step_of(batch)
        sums, records = self.sums[layer], self.records[layer]
        added = self._weighted(layer, inputs, step.places)
        # The sums of a block that begins may be anything: they are not added to.
        added = torch.where(step.begins, added, sums[step.rows] + added)
        sums[step.rows] = added
        made = compress(added, self._weights[layer].proj).flatten(1)
        records[step.unit] = made.to(records.dtype)

    def select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        step, q = self._step_of(batch), inputs.q
        (num_rows, num_heads, head_dim), num_kv_heads = q.shape, self.num_kv_heads
        records = self.records[layer].index_select(0, step.units)
        records = records.view(num_rows, -1, 2, num_kv_heads, head_dim)
        records = records.masked_fill(step.incomplete[:, :, None, None, None], 0).float()
        k, v = records.permute(2, 0, 3, 1, 4)  # [R, Hkv, M, D] each
        grouped = q.float().view(num_rows, num_kv_heads, -1, head_dim) * head_dim**-0.5
        scores = grouped @ k.transpose(2, 3)  # [R, Hkv, Hq / Hkv, M]
        # Finite: a row without a complete block is no NaN then; it has equal shares of zeros.
        shares = scores.masked_fill_(step.incomplete[:, None, None], -1e30).softmax(dim=3)
        self._compressed = (shares @ v).view(num_rows, num_heads, head_dim).to(q.dtype)
        positions, self._selected = self._positions(
            self._best_blocks(shares.sum((1, 2)), step), step
        )
        return positions

    def _best_blocks(self, scores: Tensor, step: _Step) -> Tensor:
        """scores [R, M] float32 -> [R, K / block_size] int32, ascending, -1 at the end."""
        num_blocks = self.top_k // self.block_size
        scores.masked_fill_(step.forced, torch.inf)
        if self._top_blocks:
            blocks = torch.empty(len(scores), num_blocks, dtype=torch.int32, device=scores.device)
            self._top_blocks.select(scores, step.num_blocks, blocks)
            return blocks
        block = torch.arange(scores.shape[1], device=scores.device)
        scores.masked_fill_(block >= step.num_blocks[:, None], -torch.inf)
        return top_k_positions(scores, step.num_blocks, num_blocks)

    def _positions(self, blocks: Tensor, step: _Step) -> tuple[Tensor, Tensor]:
        """The positions of blocks [R, n] and of the window: [R, K] int32, and [R, K] bool: it is
        one of a block.
        """
        size, recent = self.block_size, step.recent
        read = (blocks[:, :, None] * size + step.offsets).flatten(1)  # [R, K]
        read = (read * 2).masked_fill((read < 0) | (read >= step.seq_lens), NOWHERE)
        twice = ((recent // size)[:, :, None] == blocks[:, None]).any(dim=2)  # [R, window]
        recent = (recent * 2 + 1).masked_fill((recent < 0) | twice, NOWHERE)  # odd: in no block
        order = torch.cat([read, recent], dim=1).sort(dim=1).values[:, : self.top_k]
        empty = order == NOWHERE
        return (order >> 1).masked_fill(empty, -1), order % 2 == 0

    def branches(
        self, layer: int, inputs: AttentionInputs, positions: Tensor, batch: Batch
    ) -> Branches:
        weights = self._weights[layer]
        oldest = self._step_of(batch).recent[:, -1:].clamp(min=0)
        gate = gates(inputs.x, weights.gate, weights.gate_bias)
        return Branches(self._compressed, self._selected, positions >= oldest, gate)

    def _step_of(self, batch: Batch) -> _Step:
        if self._step is None or self._step.batch is not batch:
            self._step = self._make_step(batch)
        return self._step

    def _make_step(self, batch: Batch) -> _Step:
        """From device tensors alone with kernels: a CUDA graph may hold it."""
        size, device = self.block_size, batch.seq_lens.device
        max_blocks = self.max_blocks
        if self._top_blocks is None:  # no more than the batch has
            max_blocks = max(-(-batch.max_seq_len // size), 1)
        rows, first = batch.req_pool_indices, self.extents.first[batch.req_pool_indices]
        is_real = torch.arange(len(rows), device=device) < batch.num_real_reqs_tensor
        seq_lens = batch.seq_lens.masked_fill(~is_real, 0)
        back = torch.arange(self.window, dtype=torch.int32, device=device)
        places = batch.positions % size
        num_blocks = (seq_lens + size - 1) // size
        block = torch.arange(max_blocks, device=device)
        # A shorter request's blocks may end before those of the batch: what is read is masked.
        units = (first[:, None] + block).clamp(max=self.extents.num_units)
        return _Step(
            batch=batch,
            rows=rows.masked_fill(~is_real, self.sums.shape[1] - 1),
            unit=(first + batch.positions // size).masked_fill(~is_real, self.extents.num_units),
            places=places,
            begins=(places == 0)[:, None, None],
            units=units.flatten(),
            incomplete=block >= (seq_lens // size)[:, None],
            forced=(block < self.num_first) | (block >= (num_blocks - self.num_last)[:, None]),
            num_blocks=num_blocks,
            seq_lens=seq_lens[:, None],
            recent=seq_lens[:, None] - 1 - back,
            offsets=torch.arange(size, dtype=torch.int32, device=device),
        )


def check_settings(addon: Addon, top_k: int) -> None:
    """Raises ValueError if K positions cannot hold what the add-on reads."""
    settings = addon.settings
    size, num_last = settings["block_size"], settings["num_last_blocks"]
    always = settings["num_first_blocks"] + num_last
    if top_k % size or top_k < always * size:
        raise ValueError(
            f"nsa reads whole blocks of {size}: top_k={top_k} must be a multiple of it, at least "
            f"{always * size} for the {always} blocks that are always read; change --top-k"
        )
    if num_last < 1 or not 0 < settings["window"] <= num_last * size:
        raise ValueError(
            f"the nsa add-on's window of {settings['window']} positions must lie in its {num_last} "
            f"newest blocks of {size}"
        )


def _load(addon: Addon, model: Decoder, layer: int) -> NSAWeights:
    c = model.config
    shapes = weight_shapes(
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.hidden_size,
        addon.settings["block_size"],
    )
    tensors = (take(addon, tensor_name(layer, name), shape) for name, shape in shapes.items())
    pool, place, proj, gate, bias = (tensor.to(model.device) for tensor in tensors)
    return NSAWeights(
        pool.to(model.dtype),
        place.float(),
        proj.float(),
        gate.to(model.dtype),
        bias.to(model.dtype),
    )


def _make_top_blocks(top_k: int, max_rows: int, max_length: int, device: torch.device) -> TopK:
    from minihisparse.kernels.top_k import TopK

    return TopK(max_rows=max_rows, max_length=max_length, top_k=top_k, device=device)
