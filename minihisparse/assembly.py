"""From settings to a runner: which cache, which selector, and how large they are.

It deliberately does nothing that happens in a step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from minihisparse.addon import Addon, read_addon
from minihisparse.capacity import Capacity, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.full_cache import FullCache
from minihisparse.gpu_cache import HiSparseCache, check_lockstep
from minihisparse.host_store import HostPool
from minihisparse.indexer import DSASelector
from minihisparse.model import Decoder
from minihisparse.nsa import NSASelector
from minihisparse.quest import QuestSelector
from minihisparse.runner import Runner
from minihisparse.selector import Selector, SelectorSize

SELECTORS = ("quest", "dsa", "dsa-shared", "nsa")
SHIPPED = files("minihisparse.weights_scripts") / "addons"
NO_STATE = SelectorSize(unit_tokens=1, unit_bytes=0, row_bytes=0)


def make_runner(
    model: Decoder,
    *,
    cache: str,
    selector: str | Selector,
    hisparse: HiSparseConfig,
    max_model_len: int,
    selector_weights: str | Path | None = None,
    max_running_requests: int | None = None,
    hbm_budget_gib: float | None = None,
    checked: bool = False,
    skip_io: bool = False,
    kernels: bool | None = None,
) -> Runner:
    """A runner with a cache and a selector of its own; several may share one model.

    The arguments are those of LLM; skip_io and kernels are HiSparseCache's. selector: a name, or a
    selector that is there already, which is not counted in the budget.
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
    choice = None if isinstance(selector, Selector) else Choice.of(selector, selector_weights)
    if cache not in ("full", "hisparse"):
        raise ValueError(f"--cache {cache!r} is not one of: hisparse, full")
    if skip_io and cache == "full":
        raise ValueError("skip_io is for the cache hisparse: with full KV there is no IO to skip")
    kernels = model.device.type == "cuda" if kernels is None else kernels
    capacity = plan_capacity(
        model.config,
        hisparse,
        cache=cache,
        itemsize=model.dtype.itemsize,
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        hbm_budget_gib=hbm_budget_gib,
        selector=choice.size(model, hisparse, max_model_len, kernels) if choice else NO_STATE,
        num_tables=num_tables(choice.anchor_of if choice else selector.anchor_of, hisparse),
    )
    if choice is not None:
        selector = choice.make(model, hisparse, max_model_len, capacity, kernels)
    rows = capacity.max_running_requests
    if cache == "hisparse":
        kv_cache = _hisparse_cache(
            model,
            hisparse,
            max_model_len,
            rows,
            checked=checked,
            skip_io=skip_io,
            kernels=kernels,
            anchor_of=_anchors_to_prefetch(selector, hisparse),
        )
    else:
        kv_cache = FullCache(
            num_layers=model.config.num_hidden_layers,
            record_width=model.config.record_width,
            max_requests=rows,
            max_model_len=max_model_len,
            num_slots=capacity.device_slots,
            dtype=model.dtype,
            device=model.device,
            checked=checked,
            kernels=kernels,
        )
    return Runner(model, kv_cache, selector, kernels)


@dataclass(frozen=True)
class Choice:
    """A selector by name, and the add-on with its weights, None where it has none."""

    name: str
    addon: Addon | None

    @classmethod
    def of(cls, name: str, weights: str | Path | None = None) -> Choice:
        """weights: an add-on's file; None: the one that is shipped, for SmolLM2-135M-Instruct.

        Raises ValueError: an unknown name, weights for quest, or of another selector;
        FileNotFoundError.
        """
        if name not in SELECTORS:
            raise ValueError(f"--selector {name!r} is not one of: {', '.join(SELECTORS)}")
        if name == "quest":
            if weights is not None:
                raise ValueError(f"--selector-weights {weights}: quest has none; pass --selector")
            return cls(name, None)
        shipped = SHIPPED / f"smollm2-135m-{name}.safetensors"
        if weights is None and not shipped.is_file():
            raise FileNotFoundError(
                f"--selector {name}: no add-on for it is shipped; pass --selector-weights "
                "(weights_scripts/distil.py makes them)"
            )
        addon = read_addon(weights or shipped)
        if addon.selector != name:
            raise ValueError(
                f"--selector-weights {weights} is an add-on for --selector {addon.selector}, "
                f"not for {name}"
            )
        return cls(name, addon)

    @property
    def anchor_of(self) -> tuple[int, ...] | None:
        """Per layer the anchor whose selection it uses; None if every layer selects."""
        if self.addon is None or len(self.addon.anchors) == self.addon.num_layers:
            return None
        return self.addon.anchor_of

    def size(
        self, model: Decoder, hisparse: HiSparseConfig, max_model_len: int, kernels: bool
    ) -> SelectorSize:
        """What its state takes, to plan with."""
        if self.addon is None:
            return QuestSelector.size(
                model.config, hisparse, itemsize=model.dtype.itemsize, max_model_len=max_model_len
            )
        sizes = {"dtype": model.dtype, "top_k": hisparse.top_k}
        sizes |= {"max_model_len": max_model_len, "kernels": kernels}
        if self.name == "nsa":
            return NSASelector.size(self.addon, **sizes)
        return DSASelector.size(self.addon, index_dtype=hisparse.index_dtype, **sizes)

    def make(
        self,
        model: Decoder,
        hisparse: HiSparseConfig,
        max_model_len: int,
        capacity: Capacity,
        kernels: bool,
    ) -> Selector:
        config = model.config
        if self.addon is None:
            return QuestSelector(
                num_layers=config.num_hidden_layers,
                num_q_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                top_k=hisparse.top_k,
                page_size=hisparse.page_size,
                max_requests=capacity.max_running_requests,
                max_model_len=max_model_len,
                num_pages=capacity.selector_units,
                dtype=model.dtype,
                device=model.device,
                kernels=kernels,
            )
        sizes = {"top_k": hisparse.top_k, "max_model_len": max_model_len, "kernels": kernels}
        sizes["max_requests"] = capacity.max_running_requests
        units = capacity.selector_units
        if self.name == "nsa":
            return NSASelector(self.addon, model, num_blocks=units, **sizes)
        dtype = hisparse.index_dtype
        return DSASelector(self.addon, model, num_positions=units, index_dtype=dtype, **sizes)


def num_tables(anchor_of: tuple[int, ...] | None, hisparse: HiSparseConfig) -> int | None:
    """How many layers have tables of slots of their own; None: all."""
    if anchor_of is None or hisparse.enable_layer_prefetch is False:
        return None
    return len(set(anchor_of))


def _anchors_to_prefetch(selector: Selector, hisparse: HiSparseConfig) -> tuple[int, ...] | None:
    """The selector's anchors, if records are to be prefetched for those who share with them."""
    if selector.anchor_of is None and hisparse.enable_layer_prefetch:
        print(
            "minihisparse: prefetch is off: every layer of this selector selects for itself",
            file=sys.stderr,
        )
    return None if hisparse.enable_layer_prefetch is False else selector.anchor_of


def _hisparse_cache(
    model: Decoder,
    hisparse: HiSparseConfig,
    max_model_len: int,
    max_requests: int,
    *,
    anchor_of: tuple[int, ...] | None,
    **options: object,
) -> HiSparseCache:
    config = model.config
    record_bytes = config.record_width * model.dtype.itemsize
    sizes = hisparse.device_buffer_sizes_for(config.num_hidden_layers, record_bytes)
    check_lockstep(sizes, anchor_of)  # before a host pool is made
    pages_per_request = -(-max_model_len // hisparse.page_size)
    num_pages = pages_per_request * max_requests
    if hisparse.host_to_device_ratio is not None:
        mean_size = sum(sizes) / len(sizes)
        host_tokens = int(hisparse.host_to_device_ratio * mean_size * max_requests)
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
        device_buffer_size=sizes,
        device=model.device,
        anchor_of=anchor_of,
        swap_in_block_size=hisparse.swap_in_block_size,
        **options,
    )
