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
the bus once. The device holds the hidden states of the prompt and the KV of one layer. What the
prompt shares with another (`prefix.py`) is not computed: its KV is read back, layer by layer.

A runner deliberately does not know requests, sampling, or which of the two caches it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from minihisparse.prefix import Prefixes
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
        self.prefixes = Prefixes()
        self.prefetcher: Prefetcher | None = None
        if isinstance(cache, HiSparseCache) and cache.has_shared_layers:
            self.prefetcher = Prefetcher(cache)
        self._positions: Tensor | None = None  # what the last anchor selected
        self.tap: Tensor | None = None  # [max_requests, L, K] int32: gets what anchors select
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

    def admit(self, num_tokens: int, prompt_ids: Sequence[int] | None = None) -> int:
        """Takes a request row with room for `num_tokens` positions in cache and selector.

        prompt_ids: the prompt that will be prefilled, if its beginning may be shared with requests
            that were admitted with theirs (`prefix.py`); None: nothing is shared.
        Raises ValueError, and nothing has changed, if one of them has no room; it says which.
        """
        prefix = None
        if prompt_ids is not None:
            prefix = self.prefixes.find(prompt_ids, self.selector.unit_tokens)
        with ExitStack() as undo:  # on Ctrl-C too
            row = self.cache.admit(num_tokens, prefix)
            undo.callback(self.cache.release, row)
            self.selector.admit(row, num_tokens)
            undo.callback(self.selector.release, row)
            if prefix is not None:
                self.selector.copy_prefix(row, prefix)
            if prompt_ids is not None:
                self.prefixes.admit(row, prompt_ids, prefix)
            undo.pop_all()
        return row

    def use_selector(self, selector: Selector) -> None:
        """Puts another selector in place of the one there is: between steps, before any graph.

        Where the two share selections in other ways, prefetch ends.
        """
        self.selector = selector
        self.prefixes.clear()  # it has no state of theirs
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
        self.prefixes.remove(row)
        self.selector.release(row)
        self.cache.release(row)

    def prefix_report(self) -> dict:
        """What sharing prefixes saved so far, for JSON; with sharing off it counts all the same.

        requests: prefilled. requests_sharing: of these, with a prefix of another's.
        tokens_computed, tokens_shared: of their prompts, prefilled and not.
        pages_shared: how often a host page was given to one more request.
        host_bytes_peak: host pages in use at once, at most; the pool itself is allocated once and
            larger. host_bytes_saved: most at once that was not needed, because pages were shared.
        The last three are None for FullCache, which has no host pages.
        """
        prefixes, host = self.prefixes, self.cache.host
        return {
            "requests": prefixes.num_requests,
            "requests_sharing": prefixes.num_sharing,
            "tokens_computed": prefixes.num_computed,
            "tokens_shared": prefixes.num_shared,
            "pages_shared": None if host is None else host.num_shared_pages,
            "host_bytes_peak": None if host is None else host.peak_pages * host.page_bytes,
            "host_bytes_saved": None if host is None else host.peak_saved_pages * host.page_bytes,
        }

    def reset_counters(self) -> None:
        """Counts hits, misses and what `prefix_report` says anew, from here on."""
        self.prefixes.reset_counters()
        if self.cache.counters is not None:
            self.cache.reset_counters()
        if self.cache.host is not None:
            self.cache.host.reset_counters()

    @torch.inference_mode()
    def prefill(
        self, row: int, token_ids: Tensor, progress: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Runs the prompt [T] int64 of the request in `row`; logits [V] float32 of its end.

        If it was admitted with its prompt, these are the same tokens, and what is shared of them
        is not computed.
        progress: called after each layer.
        """
        model, num_tokens = self.model, len(token_ids)
        first = self.prefixes.first_position(row)
        positions = torch.arange(first, num_tokens, device=model.device)
        chunk_size = GPU_PREFILL_CHUNK if model.device.type == "cuda" else PREFILL_CHUNK
        chunks = [slice(i, i + chunk_size) for i in range(0, num_tokens - first, chunk_size)]
        hidden = model.embed(token_ids[first:])  # [T - first, hidden], overwritten by chunks
        width = model.config.record_width
        records = torch.empty(num_tokens, width, dtype=model.dtype, device=model.device)
        for layer in range(self.num_layers):
            if first:
                self.cache.read_first(layer, row, records[:first])
            for chunk in chunks:
                inputs = model.attention_inputs(layer, hidden[chunk], positions[chunk])
                start = first + chunk.start
                end = start + len(inputs.q)
                records[start:end] = inputs.records
                self.selector.write_prompt(layer, row, start, inputs)
                attention = causal_attention(inputs.q, records[:end])
                hidden[chunk] = model.attention_output(layer, hidden[chunk], attention)
            self.cache.write_prompt(layer, row, records)
            progress()
        self.prefixes.complete(row, num_tokens)
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
        attend = partial(self._attend, layer, inputs.q, batch)
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
            if self.tap is not None:  # somebody records: trace_recorder.py
                self.tap[: len(self._positions), layer] = self._positions
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

    def _attend(self, layer: int, q: Tensor, batch: Batch, slots: Tensor) -> Tensor:
        """q [R, Hq, D], slots [R, K] -> [R, Hq, D], over the layer's records."""
        records, rows = self.cache.slot_records(layer), batch.req_pool_indices
        first_slot = self.cache.first_slots(layer)
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
