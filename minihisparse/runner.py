"""One forward pass: a prompt (prefill) or one new token per request (decode), layer by layer.

Decode, in each layer, is the whole of HiSparse on one screen (`decode_layer`):

    hidden -> norm -> q, k, v -> rope                                    model
       |                 '-> record -> its slot and its host row        cache.write_through
       |                 '-> page bounds += k                           selector.write
       '-> q -> which positions to read                                 selector.select
                -> slots; misses are fetched from the host pool         cache.resolve
                -> attention over the records at the slots              attention
                -> o_proj, mlp -> hidden                                model

Prefill runs all chunks of the prompt through layer 0, then layer 1, and so on: each KV byte crosses
the bus once. The device holds the hidden states of the prompt and the KV of one layer.

A runner deliberately does not know requests, sampling, or which of the two caches it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minihisparse.attention import causal_attention, decode_attention
from minihisparse.batch import Batch
from minihisparse.capacity import plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.full_cache import FullCache
from minihisparse.gpu_cache import HiSparseCache, KVCache
from minihisparse.host_store import HostPool
from minihisparse.indexer import QuestSelector
from minihisparse.model import Decoder

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
        selector: QuestSelector,
        kernels: bool | None = None,
    ) -> None:
        """kernels: attend with a kernel (simulated on a CPU) or with torch; None: on a GPU."""
        self.model = model
        self.cache = cache
        self.selector = selector
        self.num_layers = model.config.num_hidden_layers
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
                q, records[chunk] = model.attention_inputs(layer, hidden[chunk], positions[chunk])
                attention = causal_attention(q, records[: chunk.start + len(q)])
                hidden[chunk] = model.attention_output(layer, hidden[chunk], attention)
            self.cache.write_prompt(layer, row, records)
            self.selector.write_prompt(layer, row, keys_of(records, model.config.head_dim))
            progress()
        return model.logits(hidden[-1:])[0]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Starts a decode step: token ids [R] int64 to hidden [R, hidden]."""
        return self.model.embed(token_ids)

    @torch.inference_mode()
    def decode_layer(self, layer: int, hidden: Tensor, batch: Batch) -> LayerResult:
        """Runs one layer of a decode step for R requests; hidden [R, hidden]."""
        cache, selector = self.cache, self.selector
        q, records = self.model.attention_inputs(layer, hidden, batch.positions)
        cache.write_through(layer, records, batch)
        selector.write(layer, keys_of(records, q.shape[2]), batch)
        positions = selector.select(layer, q, batch)
        slots = cache.resolve(layer, positions, batch)
        attention = self._attend(q, cache.slot_records(layer), slots, batch)
        hidden = self.model.attention_output(layer, hidden, attention)
        return LayerResult(hidden, positions, slots, attention)

    def _attend(self, q: Tensor, records: Tensor, slots: Tensor, batch: Batch) -> Tensor:
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


def keys_of(records: Tensor, head_dim: int) -> Tensor:
    """The K half [T, Hkv, D] of records [T, 2 * Hkv * D]."""
    return records.view(len(records), 2, -1, head_dim)[:, 0]


def make_runner(
    model: Decoder,
    *,
    cache: str,
    selector: str,
    hisparse: HiSparseConfig,
    max_model_len: int,
    max_running_requests: int | None = None,
    hbm_budget_gib: float | None = None,
    checked: bool = False,
    skip_io: bool = False,
    kernels: bool | None = None,
) -> Runner:
    """A runner with a cache and a selector of its own; several may share one model.

    The arguments are those of LLM; skip_io and kernels are HiSparseCache's.
    Raises ValueError: a setting out of its limits, the flag named; MemoryError: the host pool is
    larger than free memory, or the device has not enough for the rest.
    """
    if not 1 <= max_model_len <= model.max_model_len:
        raise ValueError(
            f"--max-model-len {max_model_len} is not in 1..{model.max_model_len}, which is what "
            "the model was made for; see --allow-beyond-model-limit"
        )
    if max_running_requests is not None and max_running_requests < 1:
        raise ValueError(f"--max-running-requests {max_running_requests} is less than 1")
    if selector != "quest":
        raise ValueError(f"--selector {selector!r} is not one of: quest")
    if cache not in ("full", "hisparse"):
        raise ValueError(f"--cache {cache!r} is not one of: hisparse, full")
    if skip_io and cache == "full":
        raise ValueError("skip_io is for the cache hisparse: with full KV there is no IO to skip")
    config = model.config
    capacity = plan_capacity(
        config,
        hisparse,
        cache=cache,
        itemsize=model.dtype.itemsize,
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        hbm_budget_gib=hbm_budget_gib,
    )
    rows = capacity.max_running_requests
    if cache == "hisparse":
        kv_cache = _hisparse_cache(model, hisparse, max_model_len, rows, checked, skip_io, kernels)
    else:
        kv_cache = FullCache(
            num_layers=config.num_hidden_layers,
            record_width=config.record_width,
            max_requests=rows,
            max_model_len=max_model_len,
            num_slots=capacity.device_slots,
            dtype=model.dtype,
            device=model.device,
            checked=checked,
            kernels=kernels,
        )
    quest = QuestSelector(
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        top_k=hisparse.top_k,
        page_size=hisparse.page_size,
        max_requests=rows,
        max_model_len=max_model_len,
        num_pages=capacity.selector_pages,
        dtype=model.dtype,
        device=model.device,
        kernels=kernels,
    )
    return Runner(model, kv_cache, quest, kernels)


def _hisparse_cache(
    model: Decoder,
    hisparse: HiSparseConfig,
    max_model_len: int,
    max_requests: int,
    checked: bool,
    skip_io: bool,
    kernels: bool | None,
) -> HiSparseCache:
    config = model.config
    record_bytes = config.record_width * model.dtype.itemsize
    size = hisparse.device_buffer_size_for(config.num_hidden_layers, record_bytes)
    pages_per_request = -(-max_model_len // hisparse.page_size)
    num_pages = pages_per_request * max_requests
    if hisparse.host_to_device_ratio is not None:
        host_tokens = int(hisparse.host_to_device_ratio * size * max_requests)
        num_pages = max(1, host_tokens // hisparse.page_size)
    host = HostPool(
        num_layers=config.num_hidden_layers,
        record_width=config.record_width,
        num_pages=num_pages,
        page_size=hisparse.page_size,
        max_requests=max_requests,
        max_pages_per_request=pages_per_request,
        dtype=model.dtype,
        device=model.device,
    )
    return HiSparseCache(
        host=host,
        max_requests=max_requests,
        top_k=hisparse.top_k,
        device_buffer_size=size,
        device=model.device,
        checked=checked,
        swap_in_block_size=hisparse.swap_in_block_size,
        skip_io=skip_io,
        kernels=kernels,
    )
