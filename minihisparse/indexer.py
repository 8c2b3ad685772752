"""DSA's lightning indexer: single positions, scored by a small trained attention of its own.

    I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) / sqrt(H d)

q (H index heads), k (one key for all of them) and w are linear in the layer's normed input x; k
goes through a LayerNorm; RoPE (rotate-half) turns the first `rope_dim` numbers of q and k. The
first `num_sinks` positions and the newest `num_recent` are always read, counted inside K; the rest
by score, ties to the lowest position. (DeepSeek-V3.2-Exp's report; the weights come from an add-on,
`addon.py`, and were distilled by `weights_scripts/distil.py`.)

Layers may share a selection: then only anchors have an indexer, and state (`anchors.py`).

Cost: d elements per position and anchor layer on the device, 128 bytes at d = 64 in bf16 where a
record of SmolLM2 has 768; with index_dtype fp8 d + 4 bytes. They are read once per step and layer.
On a GPU a selection is one matrix product and two kernels (`kernels/lightning_indexer.py`), on a
CPU torch operations, below.

Shapes: keys [anchors, num_positions, d]; scales [anchors, num_positions] float32, with fp8 alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minihisparse.addon import Addon, take
from minihisparse.batch import Batch
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.rope import rope_angles
from minihisparse.selector import Selector, SelectorSize

if TYPE_CHECKING:
    from minihisparse.kernels.lightning_indexer import LightningIndexer

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
NORM_EPS = 1e-6


class IndexerWeights(NamedTuple):
    """Of one anchor, in the model's dtype."""

    product: Tensor  # [>= H * d + d + H, hidden]: rows of wq, wk, weights_proj; zeros to whole 8s
    gain: Tensor  # [d], of the LayerNorm
    bias: Tensor  # [d]


class DSASelector(Selector):
    """A lightning indexer per anchor layer."""

    unit_name = "positions"

    def __init__(
        self,
        addon: Addon,
        model: Decoder,
        *,
        top_k: int,
        max_requests: int,
        max_model_len: int,
        num_positions: int | None = None,
        index_dtype: str = "auto",
        kernels: bool | None = None,
    ) -> None:
        """num_positions: of all requests together; None: for max_requests of max_model_len tokens.
        index_dtype: "auto", the model's, or "fp8" (e4m3, one scale per key). kernels: select with
        kernels (simulated on a CPU) or with torch; None: kernels on a GPU.

        Raises ValueError if the add-on is for another model or lacks a tensor, or if top_k is less
        than the positions that are always read.
        """
        check_settings(addon, top_k)
        addon.check_model(model)
        super().__init__(
            top_k=top_k,
            unit_tokens=1,
            num_units=num_positions,
            max_requests=max_requests,
            max_model_len=max_model_len,
            device=model.device,
        )
        settings = addon.settings
        self.num_heads, self.head_dim = settings["index_n_heads"], settings["index_head_dim"]
        self.rope_dim = settings["rope_dim"]
        self.num_sinks, self.num_recent = settings["num_sinks"], settings["num_recent"]
        if len(addon.anchors) < addon.num_layers:
            self.anchor_of = addon.anchor_of
        self._state_of = {layer: index for index, layer in enumerate(addon.anchors)}
        self._weights = [self._load(addon, model, layer) for layer in addon.anchors]
        state_dtype = FP8 if index_dtype == "fp8" else model.dtype
        shape = (len(addon.anchors), self.extents.num_units, self.head_dim)
        self.keys = torch.zeros(shape, dtype=state_dtype, device=model.device)
        self.scales = None
        if state_dtype == FP8:
            self.scales = torch.zeros(shape[:2], dtype=torch.float32, device=model.device)
        self._kernels: LightningIndexer | None = None
        if model.device.type == "cuda" if kernels is None else kernels:
            self._kernels = _make_kernels(
                addon, model.dtype, state_dtype, top_k, max_requests, max_model_len, model.device
            )
            self._kernels.load()
        else:
            theta = settings["rope_theta"]
            self._angles = rope_angles(max_model_len, self.rope_dim, theta, model.device)

    @staticmethod
    def size(
        addon: Addon,
        *,
        dtype: torch.dtype,
        index_dtype: str,
        top_k: int,
        max_model_len: int,
        kernels: bool,
    ) -> SelectorSize:
        """What the state takes; with kernels, their buffers included. Not the weights.

        Raises ValueError for settings that the constructor refuses.
        """
        check_settings(addon, top_k)
        head_dim, anchors = addon.settings["index_head_dim"], len(addon.anchors)
        fp8 = index_dtype == "fp8"
        key_bytes = head_dim + 4 if fp8 else head_dim * dtype.itemsize
        fixed, row = max_model_len * addon.settings["rope_dim"] * 4, 0
        if kernels:  # made without memory, to be asked
            meta, state_dtype = torch.device("meta"), FP8 if fp8 else dtype
            one, two = (
                _make_kernels(addon, dtype, state_dtype, top_k, rows, max_model_len, meta)
                for rows in (1, 2)
            )
            row = two.device_bytes - one.device_bytes
            fixed = one.device_bytes - row
        return SelectorSize(1, anchors * key_bytes, 8 + row, fixed)

    @property
    def unit_state(self) -> tuple[Tensor, ...]:
        return (self.keys,) if self.scales is None else (self.keys, self.scales)

    @property
    def state_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        own = self._kernels.device_bytes if self._kernels else self._angles.nbytes
        return self.keys.nbytes + scales + self.extents.first.nbytes + own

    def _load(self, addon: Addon, model: Decoder, layer: int) -> IndexerWeights:
        heads, head_dim, hidden = self.num_heads, self.head_dim, model.config.hidden_size
        prefix = f"model.layers.{layer}.self_attn.indexer"
        product = torch.cat(
            [
                take(addon, f"{prefix}.wq.weight", (heads * head_dim, hidden)),
                take(addon, f"{prefix}.wk.weight", (head_dim, hidden)),
                take(addon, f"{prefix}.weights_proj.weight", (heads, hidden)),
            ]
        )
        norm = [take(addon, f"{prefix}.k_norm.{kind}", (head_dim,)) for kind in ("weight", "bias")]
        product = F.pad(product, (0, 0, 0, -len(product) % 8))
        return IndexerWeights(*(t.to(model.device, model.dtype) for t in (product, *norm)))

    def _layer(self, layer: int) -> tuple[IndexerWeights, Tensor, Tensor | None]:
        """A layer's weights, keys and scales."""
        index = self._state_of[layer]
        scales = None if self.scales is None else self.scales[index]
        return self._weights[index], self.keys[index], scales

    def write_prompt(
        self, layer: int, row: int, first_position: int, inputs: AttentionInputs
    ) -> None:
        if layer not in self._state_of:
            return
        weights, keys, scales = self._layer(layer)
        first_slot = self.extents.extent_of(row)[0]
        product = F.linear(inputs.x, weights.product)
        if self._kernels:
            self._kernels.write_prompt(
                keys, scales, first_slot, first_position, product, weights.gain, weights.bias
            )
            return
        positions = torch.arange(first_position, first_position + len(product))
        self._write_keys(weights, keys, scales, first_slot + positions, product, positions)

    def write(self, layer: int, inputs: AttentionInputs, batch: Batch) -> None:
        """Nothing yet: `select` writes the newest keys too, from the same product."""

    def select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        weights, keys, scales = self._layer(layer)
        product = F.linear(inputs.x, weights.product)
        if self._kernels:
            return self._kernels.select(
                keys,
                scales,
                self.extents.first,
                product,
                weights.gain,
                weights.bias,
                *batch.tensors,
            )
        num_rows, product, batch = len(product), product[: batch.num_real_reqs], batch.real
        first_slots = self.extents.first[batch.req_pool_indices]
        slots = first_slots + batch.positions
        self._write_keys(weights, keys, scales, slots, product, batch.positions)
        scores = self._scores(product, keys, scales, first_slots, batch)
        positions = top_k_positions(scores, batch.seq_lens, self.top_k)
        return F.pad(positions, (0, 0, 0, num_rows - len(positions)), value=-1)

    def _write_keys(
        self,
        weights: IndexerWeights,
        keys: Tensor,
        scales: Tensor | None,
        slots: Tensor,
        product: Tensor,
        positions: Tensor,
    ) -> None:
        """LayerNorm, RoPE and rounding of T keys, product [T, H * d + d + H], into their slots."""
        head_dim, queries = self.head_dim, self.num_heads * self.head_dim
        k = product[:, queries : queries + head_dim].float()
        k = F.layer_norm(k, (head_dim,), weights.gain.float(), weights.bias.float(), NORM_EPS)
        k = rotate(k[:, None], self._angles[positions])[:, 0]
        if scales is not None:
            scales[slots] = scale = k.abs().amax(dim=1) / LARGEST_FP8
            k = torch.where(scale[:, None] > 0, k / scale[:, None], 0.0)
        keys.view(torch.uint8)[slots] = k.to(keys.dtype).view(torch.uint8)

    def _scores(
        self,
        product: Tensor,
        keys: Tensor,
        scales: Tensor | None,
        first_slots: Tensor,
        batch: Batch,
    ) -> Tensor:
        """I of the newest queries, [R, S] float32; inf where always read, -inf from seq_len on."""
        heads, head_dim = self.num_heads, self.head_dim
        q = product[:, : heads * head_dim].view(-1, heads, head_dim).float()
        q = rotate(q, self._angles[batch.positions]).to(product.dtype).float()
        first = heads * head_dim + head_dim
        w = product[:, first : first + heads].float() * (heads * head_dim) ** -0.5
        position = torch.arange(max(batch.max_seq_len, 1), device=product.device)
        # A shorter request's keys may end before those of the batch: what is read is masked.
        slots = (first_slots[:, None] + position).clamp(max=len(keys) - 1)
        k = keys.view(torch.uint8)[slots].view(keys.dtype).float()  # [R, S, d]
        if scales is not None:
            k = k * scales[slots][:, :, None]
        scores = (w[:, None] @ (q @ k.transpose(1, 2)).relu_())[:, 0]
        seq_lens = batch.seq_lens[:, None]
        always = (position < self.num_sinks) | (position >= seq_lens - self.num_recent)
        scores.masked_fill_(always, torch.inf)
        return scores.masked_fill_(position >= seq_lens, -torch.inf)


def check_settings(addon: Addon, top_k: int) -> None:
    """Raises ValueError: a setting is missing or wrong, or more is always read than top_k."""
    addon.check_settings(
        "index_n_heads", "index_head_dim", "rope_dim", "rope_theta", "num_sinks", "num_recent"
    )
    settings = addon.settings
    sinks, recent = settings["num_sinks"], settings["num_recent"]
    if sinks < 0 or recent < 1:
        raise ValueError(
            f"the {addon.selector} add-on: num_sinks {sinks} must be at least 0 and num_recent "
            f"{recent} at least 1, the newest position"
        )
    if settings["rope_dim"] % 2 or not 2 <= settings["rope_dim"] <= settings["index_head_dim"]:
        raise ValueError(
            f"the {addon.selector} add-on: rope_dim {settings['rope_dim']} must be even and in "
            f"2..index_head_dim, {settings['index_head_dim']}"
        )
    if top_k < sinks + recent:
        raise ValueError(
            f"top_k={top_k} is less than the {sinks} first and {recent} newest positions that the "
            f"{addon.selector} add-on always reads; raise --top-k"
        )


def _make_kernels(
    addon: Addon,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    top_k: int,
    max_requests: int,
    max_model_len: int,
    device: torch.device,
) -> LightningIndexer:
    from minihisparse.kernels.lightning_indexer import LightningIndexer

    settings = addon.settings
    return LightningIndexer(
        max_requests=max_requests,
        max_model_len=max_model_len,
        num_heads=settings["index_n_heads"],
        head_dim=settings["index_head_dim"],
        rope_dim=settings["rope_dim"],
        rope_theta=settings["rope_theta"],
        num_sinks=settings["num_sinks"],
        num_recent=settings["num_recent"],
        top_k=top_k,
        dtype=dtype,
        state_dtype=state_dtype,
        device=device,
    )


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE (rotate-half) on the first numbers of x [T, H, d] float32; the others stay.

    angles [T, 2, n]: cos and sin, for the first 2 n numbers.
    """
    cos, sin = angles[:, :1], angles[:, 1:]  # [T, 1, n] each
    a, b, rest = x.split([cos.shape[2], cos.shape[2], x.shape[2] - 2 * cos.shape[2]], dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=2)


def top_k_positions(scores: Tensor, seq_lens: Tensor, top_k: int) -> Tensor:
    """The K best of each row, ascending, ties to the lowest position: [R, K] int32, -1 at the end.

    scores [R, S] float32, -inf from seq_lens [R] on.
    """
    num_selected = min(top_k, scores.shape[1])
    threshold = scores.topk(num_selected, dim=1).values[:, -1:]  # [R, 1]
    exists = torch.arange(scores.shape[1], device=scores.device) < seq_lens[:, None]
    above, ties = (scores > threshold) & exists, (scores == threshold) & exists
    chosen = above | (ties & (ties.cumsum(1) <= num_selected - above.sum(1, keepdim=True)))
    rank = torch.where(chosen, chosen.cumsum(1) - 1, top_k)  # top_k: beside what is returned
    positions = torch.full((len(scores), top_k + 1), -1, device=scores.device)
    position = torch.arange(scores.shape[1], device=scores.device).expand_as(rank)
    return positions.scatter_(1, rank, position)[:, :top_k].int()
