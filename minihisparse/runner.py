"""One forward pass: a prompt (prefill) or one new token per request (decode), layer by layer.

Decode, in each layer, is the whole of HiSparse on one screen (`decode_layer`):

    hidden -> norm -> q, k, v -> rope                                    model
       |                 '-> record -> its slot and its host row        cache.write_through
       |                 '-> selector state += the newest token         selector.write
       '-> q -> which positions to read                                 selector.select
                -> slots; misses are fetched from the host pool         cache.resolve
                -> attention over the records at the slots              attention
                -> o_proj, mlp -> hidden                                model

A layer that shares another one's selection does not select. With prefetch it does not resolve
either: it waits for the records that its anchor has sent for (`prefetcher.py`).

Prefill runs all chunks of the prompt through layer 0, then layer 1, and so on: each KV byte crosses
the bus once. The device holds the hidden states of the prompt and the KV of one layer.

A runner deliberately does not know requests, sampling, or which of the two caches it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minihisparse.anchors import check_shared
from minihisparse.attention import causal_attention, decode_attention, gated_attention
from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.kv_cache import KVCache
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.prefetcher import Prefetcher
from minihisparse.selector import Selector

if TYPE_CHECKING:
    from minihisparse.kernels.attention import DecodeAttention

PREFILL_CHUNK = 256  # tokens; bounds the workspace of attention and MLP
GPU_PREFILL_CHUNK = 4096  # there small products do not pay


class LayerResult(NamedTuple):
    """What one layer did for R requests in one decode step."""

    hidden: Tensor  # [R, hidden], the input of the next layer
    positions: Tensor  # [R, K] int32, what the selector chose
    slots: Tensor  # [R, K] int32, where Resolve says it is
    attention: Tensor  # [R, Hq, D], the attention output before o_proj


class Runner:
    """A model, a cache and a selector at work together."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        selector: Selector,
        kernels: bool | None = None,
    ) -> None:
        """kernels: attend with a kernel (simulated on a CPU) or with torch; None: on a GPU."""
        self.model = model
        self.cache = cache
        self.selector = selector
        self.num_layers = model.config.num_hidden_layers
        self.prefetcher: Prefetcher | None = None
        if isinstance(cache, HiSparseCache) and cache.has_shared_layers:
            self.prefetcher = Prefetcher(cache)
        self._positions: Tensor | None = None  # what the last anchor selected
        self._attention: DecodeAttention | None = None
        if model.device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels.attention import DecodeAttention

            self._attention = DecodeAttention(
                max_requests=cache.max_requests,
                num_q_heads=model.config.num_attention_heads,
                num_kv_heads=model.config.num_key_value_heads,
                head_dim=model.config.head_dim,
                top_k=selector.top_k,
                dtype=model.dtype,
                device=model.device,
            )
            self._attention.load()

    def admit(self, num_tokens: int) -> int:
        """Takes a request row with room for `num_tokens` positions in cache and selector.

        Raises ValueError, and nothing has changed, if one of them has no room; it says which.
        """
        row = self.cache.admit(num_tokens)
        try:
            self.selector.admit(row, num_tokens)
        except ValueError:
            self.cache.release(row)
            raise
        return row

    def use_selector(self, selector: Selector) -> None:
        """Puts another selector in place of the one there is: between steps, before any graph.

        Where the two share selections in other ways, prefetch ends.
        """
        self.selector = selector
        if self.prefetcher and selector.anchor_of != self.cache.anchor_of:
            self.prefetcher.join()
            self.prefetcher = None
            self.cache.end_sharing()
            print("minihisparse: prefetch is off: the selector was switched", file=sys.stderr)

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of the attention kernel."""
        return self._attention.device_bytes if self._attention else 0

    @property
    def longest_request(self) -> tuple[int, str, str]:
        """Tokens of a request that has everything; what limits it, and the flag that helps."""
        return min(self.cache.longest_request, self.selector.longest_request)

    def release(self, row: int) -> None:
        """Gives the request's row back, finished or aborted."""
        if self.prefetcher:
            self.prefetcher.join()  # a step may have been broken off
        self.selector.release(row)
        self.cache.release(row)

    @torch.inference_mode()
    def prefill(
        self, row: int, token_ids: Tensor, progress: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Runs the prompt [T] int64 of the request in `row`; logits [V] float32 of its end.

        progress: called after each layer.
        """
        model, num_tokens = self.model, len(token_ids)
        positions = torch.arange(num_tokens, device=model.device)
        chunk_size = GPU_PREFILL_CHUNK if model.device.type == "cuda" else PREFILL_CHUNK
        chunks = [slice(i, i + chunk_size) for i in range(0, num_tokens, chunk_size)]
        hidden = model.embed(token_ids)  # [T, hidden], overwritten chunk by chunk
        width = model.config.record_width
        records = torch.empty(num_tokens, width, dtype=model.dtype, device=model.device)
        for layer in range(self.num_layers):
            for chunk in chunks:
                inputs = model.attention_inputs(layer, hidden[chunk], positions[chunk])
                records[chunk] = inputs.records
                self.selector.write_prompt(layer, row, chunk.start, inputs)
                attention = causal_attention(inputs.q, records[: chunk.start + len(inputs.q)])
                hidden[chunk] = model.attention_output(layer, hidden[chunk], attention)
            self.cache.write_prompt(layer, row, records)
            progress()
        return model.logits(hidden[-1:])[0]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Starts a decode step: token ids [R] int64 to hidden [R, hidden]."""
        if self.prefetcher:
            self.prefetcher.join()  # the step before may have been broken off
        return self.model.embed(token_ids)

    @torch.inference_mode()
    def decode_layer(self, layer: int, hidden: Tensor, batch: Batch) -> LayerResult:
        """Runs one layer of a decode step for R requests; hidden [R, hidden]."""
        cache = self.cache
        inputs = self.model.attention_inputs(layer, hidden, batch.positions)
        cache.write_through(layer, inputs.records, batch)
        positions = self._select(layer, inputs, batch)
        slots = self._resolve(layer, positions, batch)
        attend = partial(self._attend, inputs.q, cache.slot_records(layer), batch)
        branches = self.selector.branches(layer, inputs, positions, batch)
        attention = gated_attention(attend, slots, branches) if branches else attend(slots)
        hidden = self.model.attention_output(layer, hidden, attention)
        if layer == self.num_layers - 1:
            self._positions = None
        return LayerResult(hidden, positions, slots, attention)

    def _select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """The layer's positions [R, K] int32: its own choice, or its anchor's."""
        selector = self.selector
        if selector.anchor_of is None or selector.anchor_of[layer] == layer:
            selector.write(layer, inputs, batch)
            self._positions = selector.select(layer, inputs, batch)
        elif self.cache.checked and selector.selects_in_shared_layers:
            own = selector.select(layer, inputs, batch)
            check_shared(layer, selector.anchor_of[layer], own, self._positions)
        return self._positions

    def _resolve(self, layer: int, positions: Tensor, batch: Batch) -> Tensor:
        """Their slots [R, K] int32, the records there when the current stream goes on."""
        if self.prefetcher is None:
            return self.cache.resolve(layer, positions, batch)
        if self.cache.anchor_of[layer] != layer:
            self.prefetcher.wait(layer)
            return self.prefetcher.slots(layer)
        slots = self.cache.resolve(layer, positions, batch)
        self.prefetcher.start(layer, batch)
        return slots

    def _attend(self, q: Tensor, records: Tensor, batch: Batch, slots: Tensor) -> Tensor:
        """q [R, Hq, D], records [N, W], slots [R, K] -> [R, Hq, D]."""
        first_slot, rows = self.cache.first_slot, batch.req_pool_indices
        if self._attention is None:
            return decode_attention(q, records, slots, first_slot[rows])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attention.attend(q, records, slots, first_slot, rows, out)
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Ends a decode step: hidden [R, hidden] to logits [R, V] float32."""
        return self.model.logits(hidden)

    def decode(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """A whole decode step: token ids [R] int64 to logits [R, V] float32."""
        hidden = self.embed(token_ids)
        for layer in range(self.num_layers):
            hidden = self.decode_layer(layer, hidden, batch).hidden
        return self.logits(hidden)
