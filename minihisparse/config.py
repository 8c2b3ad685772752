"""How HiSparse caches a model, and where the model runs. (What the model is: model_config.py.)

Upstream names: top_k, device_buffer_size, host_to_device_ratio and swap_in_block_size are keys of
SGLang's `--hisparse-config`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

import torch

MAX_DEVICE_BUFFER_SIZE = 32_767  # lru_slots is int16
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class HiSparseConfig:
    """How many records a request keeps on the device, and how many of them one step reads.

    top_k: positions that the selector picks per request and layer (K); whole pages.
    device_buffer_size: slots per request and layer (B), beside the one of the newest token;
        K <= B <= 32,767. One for all layers, or a sequence of as many as there are layers. None:
        2K, the paper's default (useful range 2K to 4K, its Figure 7).
    cache_size_mb: instead of device_buffer_size: device memory per request over all layers, in MiB,
        of which `device_buffer_sizes_for` makes the largest B that fits, the same in all layers.
    host_to_device_ratio: tokens of the host pool over all device slots, B (the mean of all layers)
        * max_running_requests. None: max_model_len tokens per running request: nothing runs out.
    page_size: tokens per page, of the host pool and of Quest alike.
    swap_in_block_size: threads per block of the Resolve kernel, a multiple of 32 up to 1,024; None:
        one per slot (of the largest B), at most 1,024. Of no effect on a CPU, and never on what
        comes out.
    index_dtype: of DSA's index keys: "auto", the model's, or "fp8" (e4m3 with a scale per key).
    enable_layer_prefetch: fetch for layers that share a selection before it is their turn. None:
        where the selector shares. Never of effect on what comes out.

    Raises ValueError: a value outside its limits; the message names the flag that helps.
    """

    top_k: int = 256
    device_buffer_size: int | tuple[int, ...] | None = None
    cache_size_mb: float | None = None
    host_to_device_ratio: float | None = None
    page_size: int = 16
    swap_in_block_size: int | None = None
    index_dtype: str = "auto"
    enable_layer_prefetch: bool | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "page_size"):
            self._check(name, _is_int(getattr(self, name)), "an integer >= 1")
        for name in ("cache_size_mb", "host_to_device_ratio"):
            value = getattr(self, name)
            self._check(name, value is None or _is_positive(value), "a number > 0")
        self._check("index_dtype", self.index_dtype in ("auto", "fp8"), "auto or fp8")
        prefetch = self.enable_layer_prefetch
        self._check("enable_layer_prefetch", prefetch in (None, True, False), "true or false")
        threads = self.swap_in_block_size
        allowed = threads is None or (_is_int(threads) and threads in range(32, 1025, 32))
        self._check("swap_in_block_size", allowed, "a multiple of 32 in 32..1024")
        if threads is not None and self.top_k > 64 * threads:
            raise ValueError(
                f"swap_in_block_size={threads}: a thread can have 64 positions, so "
                f"top_k={self.top_k} needs more threads; raise --swap-in-block-size"
            )
        if self.top_k % self.page_size:
            raise ValueError(
                f"top_k={self.top_k} is not a multiple of page_size={self.page_size}: whole pages "
                "are selected; change --top-k or --page-size"
            )
        if self.cache_size_mb is not None and self.device_buffer_size is not None:
            raise ValueError(
                f"got device_buffer_size={self.device_buffer_size} and "
                f"cache_size_mb={self.cache_size_mb}, which both set B; pass one of them"
            )
        if self.cache_size_mb is None:
            size = 2 * self.top_k if self.device_buffer_size is None else self.device_buffer_size
            if isinstance(size, Sequence) and not isinstance(size, str):
                size = tuple(size)
                if not size:
                    raise ValueError("--device-buffer-size is an empty list; give one per layer")
                for layer, size_of_layer in enumerate(size):
                    self._check_size(size_of_layer, f" of layer {layer}")
                size = tuple(map(int, size))
            else:
                self._check_size(size)
            object.__setattr__(self, "device_buffer_size", size)

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

    def _check_size(self, size: object, where: str = "") -> None:
        if not _is_int(size) or size > MAX_DEVICE_BUFFER_SIZE:
            raise ValueError(
                f"device_buffer_size={size!r}{where} must be an integer in "
                f"1..{MAX_DEVICE_BUFFER_SIZE} (lru_slots is int16); change "
                "--device-buffer-size, or lower --top-k"
            )
        self._check_top_k_fits(size, "--device-buffer-size", where)

    def _check_top_k_fits(self, size: int, flag: str, where: str = "") -> None:
        if size < self.top_k:
            raise ValueError(
                f"top_k={self.top_k} > device_buffer_size={size}{where}: one step's records must "
                f"fit into the device cache; raise {flag} or lower --top-k"
            )

    def device_buffer_sizes_for(self, num_layers: int, record_bytes: int) -> tuple[int, ...]:
        """B of each layer, for a model of `num_layers` layers and records of `record_bytes` bytes.

        Raises ValueError if `cache_size_mb` holds fewer than `top_k` records per layer, or if there
        are not as many B as layers.
        """
        if self.cache_size_mb is None:
            return sizes_of_layers(self.device_buffer_size, num_layers)
        records = int(self.cache_size_mb * 2**20) // (num_layers * record_bytes)
        size = min(records - 1, MAX_DEVICE_BUFFER_SIZE)  # one slot is the newest token's
        self._check_top_k_fits(size, f"--cache-size-mb ({self.cache_size_mb:g})")
        return (size,) * num_layers

    @classmethod
    def from_json(cls, text: str) -> HiSparseConfig:
        """From the JSON of `--hisparse-config`. Raises ValueError: not JSON, unknown keys."""
        known = [field.name for field in fields(cls)]
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--hisparse-config is not JSON: {error}; got {text!r}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--hisparse-config must be a JSON object; got {text!r}")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"--hisparse-config: unknown keys {unknown}; known are {known}")
        return cls(**values)


def sizes_of_layers(device_buffer_size: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """B of each layer, from one for all of them or one for each.

    Raises ValueError if there are not as many as layers.
    """
    if isinstance(device_buffer_size, Integral):
        return (int(device_buffer_size),) * num_layers
    sizes = tuple(map(int, device_buffer_size))
    if len(sizes) != num_layers:
        raise ValueError(
            f"--device-buffer-size: got {len(sizes)} sizes for {num_layers} layers; give one, or "
            "one for each layer"
        )
    return sizes


def parse_device_buffer_size(text: str) -> int | tuple[int, ...]:
    """What --device-buffer-size says: "512" is 512, "512,768" is (512, 768), one per layer.

    Raises ValueError for anything else.
    """
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(
            f"--device-buffer-size {text!r} is neither a number nor a list, like 512,768, of one "
            "per layer"
        ) from None
    return sizes if len(sizes) > 1 else sizes[0]


def choose_device(
    device: str = "auto", dtype: str = "auto"
) -> tuple[torch.device, torch.dtype, str]:
    """Picks what "auto" leaves open; the third result says what was picked, and why, in one line.

    Device: the GPU if there is one. Dtype: fp32 on a CPU; bf16 from compute capability 8.0 on, fp16
    below. Raises ValueError: an unknown name, no such device, or bf16 on a GPU that lacks it.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        chosen = torch.device("cuda" if has_gpu else "cpu")
        reason = "a CUDA device was found" if has_gpu else "no CUDA device was found"
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise ValueError(f"--device {device!r} is not auto, cpu or cuda[:N]") from None
        if chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {device!r} is not auto, cpu or cuda[:N]")
        count = torch.cuda.device_count() if has_gpu else 0
        if chosen.type == "cuda" and (chosen.index or 0) >= count:
            found = "no CUDA device" if count == 0 else f"{count} CUDA devices"
            raise ValueError(f"--device {device}: torch finds {found}; use --device cpu")
        reason = "as asked"

    has_bf16 = chosen.type == "cpu" or torch.cuda.get_device_capability(chosen) >= (8, 0)
    if dtype != "auto":
        picked, why = DTYPES[dtype], "as asked"
        if picked == torch.bfloat16 and not has_bf16:
            capability = ".".join(map(str, torch.cuda.get_device_capability(chosen)))
            raise ValueError(
                f"--dtype {dtype} needs compute capability 8.0, this GPU has {capability}; "
                "use --dtype fp16 or fp32"
            )
    elif chosen.type == "cpu":
        picked, why = torch.float32, "fastest exact type on a CPU"
    elif has_bf16:
        picked, why = torch.bfloat16, "compute capability 8.0 or later"
    else:
        picked, why = torch.float16, "compute capability below 8.0"
    name = str(picked).removeprefix("torch.")
    return chosen, picked, f"device {chosen} ({reason}), dtype {name} ({why})"


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < value < float("inf")
