"""The bridge to SGLang: a B found here as its flags, and the host memory that they take.

What is needed, and where SGLang's repository (sgl-project/sglang, main branch, 2026) says so;
nothing was run here, and it changes quickly:

    --enable-hisparse         docs/advanced_features/hisparse_guide.md; for models with DSA. (And
                              DeepSeek V4, whose compressed records are not counted here.)
    --hisparse-config         there too: top_k, device_buffer_size, host_to_device_ratio, all whole
                              numbers; swap_in_block_size is left at its default
    --disable-radix-cache     refused without it: python/sglang/srt/arg_groups/hisparse_hook.py
    --max-total-tokens        tokens of the device pool; without it, what fits into GPU memory, and
                              so the host pool would be as many times larger as that
    --max-running-requests, --context-length

    device pool   whole pages; DSA sets 64 tokens: arg_groups/. A request takes device_buffer_size
                  and one page more: managers/hisparse_coordinator.py
    host pool     device pool * host_to_device_ratio, and a page: mem_cache/pool_host/base.py; each
                  rank has its own. It is refused if less than 10 GiB stay free.

The line is for one server that does prefill too, so its device pool must hold the longest request.
The guide recommends a decode server beside one for prefill: add `--disaggregation-mode decode` and
the transfer's flags. Flags for several GPUs (`--tp-size` ...) are the user's. SGLang has one B for
all layers. It deliberately does not know where B comes from.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

PAGE_SIZE = 64  # tokens
LARGEST_BUFFER = 32_767 // PAGE_SIZE * PAGE_SIZE  # its LRU order is int16


@dataclass(frozen=True)
class SGLangFlags:
    """For num_requests requests at once (in each rank) of up to max_model_len tokens, with B slots.

    device_buffer_size: of any number; SGLang gets whole pages.
    """

    top_k: int
    device_buffer_size: int
    max_model_len: int
    num_requests: int

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the device pool: all requests' buffers, or if that is more, a whole request."""
        buffers = self.num_requests * (self._buffer_tokens + PAGE_SIZE)
        return max(buffers, _whole_pages(self.max_model_len))

    @property
    def host_to_device_ratio(self) -> int:
        """The least with which the host pool holds all requests."""
        tokens = self.num_requests * _whole_pages(self.max_model_len)
        return -(-tokens // self.max_total_tokens)

    @property
    def hisparse_config(self) -> dict[str, int]:
        """The value of --hisparse-config."""
        return {
            "top_k": self.top_k,
            "device_buffer_size": self._buffer_tokens,
            "host_to_device_ratio": self.host_to_device_ratio,
        }

    def host_bytes(self, num_layers: int, record_bytes: int) -> int:
        """Pinned host memory of a rank: its pool's tokens, in each layer a record."""
        tokens = self.max_total_tokens * self.host_to_device_ratio + PAGE_SIZE
        return tokens * num_layers * record_bytes

    def config_flag(self) -> str:
        """--hisparse-config and its JSON, for a shell."""
        return f"--hisparse-config {shlex.quote(json.dumps(self.hisparse_config))}"

    def launch_line(self, model: str) -> str:
        """The command that serves a model so, for a shell."""
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(model)} "
            f"--disable-radix-cache --enable-hisparse {self.config_flag()} "
            f"--max-running-requests {self.num_requests} --context-length {self.max_model_len} "
            f"--max-total-tokens {self.max_total_tokens}"
        )

    def report(self) -> dict[str, Any]:
        """The flags by name."""
        return {
            "hisparse_config": self.hisparse_config,
            "max_running_requests": self.num_requests,
            "context_length": self.max_model_len,
            "max_total_tokens": self.max_total_tokens,
        }

    @property
    def _buffer_tokens(self) -> int:
        return min(_whole_pages(self.device_buffer_size), LARGEST_BUFFER)


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE
