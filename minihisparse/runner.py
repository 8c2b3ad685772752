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
from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.attention import causal_attention, decode_attention
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.gpu_cache import FullCache, HiSparseCache, KVCache
from minihisparse.host_store import HostPool
from minihisparse.indexer import QuestSelector
from minihisparse.model import Decoder

PREFILL_CHUNK = 256  # tokens; bounds the workspace of attention and MLP


class LayerResult(NamedTuple):
    """What one layer did for R requests in one decode step."""

    hidden: Tensor  # [R, hidden], the input of the next layer
    positions: Tensor  # [R, K] int32, what the selector chose
    slots: Tensor  # [R, K] int64, where Resolve says it is
    attention: Tensor  # [R, Hq, D], the attention output before o_proj


class Runner:
    """A model, a cache and a selector at work together."""

    def __init__(self, model: Decoder, cache: KVCache, selector: QuestSelector) -> None:
        self.model = model
        self.cache = cache
        self.selector = selector
        self.num_layers = model.config.num_hidden_layers

    @torch.inference_mode()
    def prefill(
        self, row: int, token_ids: Tensor, progress: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Runs the prompt [T] int64 of the request in `row`; logits [V] float32 of its end.

        progress: called after each layer.
        """
        model, num_tokens = self.model, len(token_ids)
        positions = torch.arange(num_tokens, device=model.device)
        chunks = [slice(i, i + PREFILL_CHUNK) for i in range(0, num_tokens, PREFILL_CHUNK)]
        hidden = model.embed(token_ids)  # [T, hidden], overwritten chunk by chunk
        width = model.config.record_width
        records = torch.empty(num_tokens, width, dtype=model.dtype, device=model.device)
        for layer in range(self.num_layers):
            for chunk in chunks:
                q, k, v = model.attention_inputs(layer, hidden[chunk], positions[chunk])
                records[chunk] = make_records(k, v)
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
        q, k, v = self.model.attention_inputs(layer, hidden, batch.positions)
        self.cache.write_through(layer, make_records(k, v), batch)
        self.selector.write(layer, k, batch)
        positions = self.selector.select(layer, q, batch)
        slots = self.cache.resolve(layer, positions, batch)
        records = self.cache.records[layer]
        attention = decode_attention(q, records, slots, batch.req_pool_indices)
        hidden = self.model.attention_output(layer, hidden, attention)
        return LayerResult(hidden, positions, slots, attention)

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


def make_records(k: Tensor, v: Tensor) -> Tensor:
    """K and V [T, Hkv, D] side by side, all heads of K first: records [T, 2 * Hkv * D]."""
    return torch.cat([k.flatten(1), v.flatten(1)], dim=1)


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
    max_running_requests: int,
    checked: bool = False,
) -> Runner:
    """A runner with a cache and a selector of its own; several may share one model.

    The arguments are those of LLM. Raises ValueError: a setting out of its limits, the flag named;
    MemoryError: the host pool is larger than free memory.
    """
    if not 1 <= max_model_len <= model.max_model_len:
        raise ValueError(
            f"--max-model-len {max_model_len} is not in 1..{model.max_model_len}, which is what "
            "the model was made for"
        )
    if max_running_requests < 1:
        raise ValueError(f"--max-running-requests {max_running_requests} is less than 1")
    if selector != "quest":
        raise ValueError(f"--selector {selector!r} is not one of: quest")
    if cache == "hisparse":
        kv_cache = _hisparse_cache(model, hisparse, max_model_len, max_running_requests, checked)
    elif cache == "full":
        kv_cache = FullCache(
            num_layers=model.config.num_hidden_layers,
            record_width=model.config.record_width,
            max_requests=max_running_requests,
            max_model_len=max_model_len,
            dtype=model.dtype,
            device=model.device,
            checked=checked,
        )
    else:
        raise ValueError(f"--cache {cache!r} is not one of: hisparse, full")
    quest = QuestSelector(
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=model.config.num_key_value_heads,
        head_dim=model.config.head_dim,
        top_k=hisparse.top_k,
        page_size=hisparse.page_size,
        max_requests=max_running_requests,
        max_model_len=max_model_len,
        dtype=model.dtype,
        device=model.device,
    )
    return Runner(model, kv_cache, quest)


def _hisparse_cache(
    model: Decoder, hisparse: HiSparseConfig, max_model_len: int, max_requests: int, checked: bool
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
    )
