"""Add-on files: the trained weights of a selector, beside a model that stays as it is.

An add-on is one safetensors file. Its header says what it is for, as strings, JSON where they are
not plain text:

    format               minihisparse-addon-1
    selector             dsa, dsa-shared or nsa
    model                the name of the model that it was trained on
    num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads, head_dim
    settings             the selector's own: heads, dims, RoPE, positions that are always read ...
    anchors              the layers that select (`anchors.py`); tensors are theirs alone
    weights_fingerprint  of the model's weights (`fingerprint`)
    scores, training     what was measured, and how it was made
    licence, created

An add-on for a model of another shape or name is refused; for other weights of that model (another
quantisation) it is used with a warning, since its scores were measured on other weights.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minihisparse.anchors import anchor_of_layers
from minihisparse.model import Decoder

FORMAT = "minihisparse-addon-1"
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True)
class Addon:
    """selector: its name. settings: its numbers. anchors: the layers that select, ascending.
    tensors: by name, as stored. metadata: the header's other entries, strings.
    """

    selector: str
    settings: Mapping[str, float]
    anchors: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return int(self.metadata["num_hidden_layers"])

    @property
    def anchor_of(self) -> tuple[int, ...]:
        """Per layer the anchor whose selection it uses."""
        return anchor_of_layers(self.anchors, self.num_layers)

    def check_settings(self, *names: str) -> None:
        """Raises ValueError if one of these settings is missing."""
        missing = [name for name in names if name not in self.settings]
        if missing:
            raise ValueError(f"the {self.selector} add-on's settings lack {', '.join(missing)}")

    def check_model(self, model: Decoder) -> None:
        """Raises ValueError if the model's shape or name is not the one that it was trained on;
        warns if its weights are not.
        """
        name = self.metadata.get("model", "?")
        for key in SIZES:
            ours, theirs = getattr(model.config, key), int(self.metadata[key])
            if ours != theirs:
                raise ValueError(
                    f"the {self.selector} add-on was trained on {name}, whose {key} is {theirs}; "
                    f"this model's is {ours}; pass --selector-weights with one made for this model "
                    "(weights_scripts/distil.py), or --selector quest, which needs none"
                )
        ours = model.config.name
        if ours is not None and name.lower() not in ours.lower():
            raise ValueError(
                f"the {self.selector} add-on was trained on {name}, this model is {ours}; pass "
                "--selector-weights with one made for it, or --selector quest, which needs none"
            )
        if fingerprint(model) != self.metadata.get("weights_fingerprint"):
            warnings.warn(
                f"the {self.selector} add-on was trained and measured on other weights of {name} "
                "(another quantisation?): its scores need not hold here",
                stacklevel=2,
            )


def fingerprint(model: Decoder) -> str:
    """A sha256 over the first and the last layer's projections of q, k and v, and the final norm.

    Of the weights rounded to a hundredth of the largest, so that it is the same in fp32, bf16 and
    fp16 if the weights' file is in bf16. Rounding numbers of more digits to bf16 changes it.
    """
    digest = hashlib.sha256()
    for weight in (model.layers[0].qkv, model.layers[-1].qkv, model.final_norm):
        weight = weight.float().cpu()
        rounded = (weight / weight.abs().max() * 100).round().to(torch.int8)
        digest.update(rounded.numpy().tobytes())
    return digest.hexdigest()


def write_addon(path: str | Path, addon: Addon) -> None:
    """Writes an add-on's file; an existing one is replaced."""
    header = {
        **addon.metadata,
        "format": FORMAT,
        "selector": addon.selector,
        "settings": json.dumps(dict(addon.settings)),
        "anchors": json.dumps(list(addon.anchors)),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in addon.tensors.items()}
    save_file(tensors, path, header)


def read_addon(path: str | Path) -> Addon:
    """Reads an add-on. Raises FileNotFoundError; ValueError, which names the file: it is none, it
    is damaged, or its anchors do not cover the layers.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file; --selector-weights names an add-on"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.pop("format", None) != FORMAT:
                raise ValueError(f"its header lacks 'format': '{FORMAT}'")
            missing = {"selector", "settings", "anchors", "model", *SIZES} - header.keys()
            if missing:
                raise ValueError(f"its header lacks {', '.join(sorted(missing))}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        settings, anchors = _parsed(header, "settings", dict), _parsed(header, "anchors", list)
        for size in SIZES:
            _parsed(header, size, int)
        selector, *_ = (header.pop(key) for key in ("selector", "settings", "anchors"))
        addon = Addon(selector, settings, tuple(anchors), tensors, header)
        anchor_of_layers(addon.anchors, addon.num_layers)  # raises if a layer has none
        return addon
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no selector add-on: {error}") from None


def _parsed(header: Mapping[str, str], key: str, kind: type) -> Any:
    """The header's entry, JSON of this kind. Raises ValueError that names it."""
    try:
        value = json.loads(header[key])
    except json.JSONDecodeError:
        value = None
    if type(value) is not kind:
        raise ValueError(f"its header has {key} {header[key]!r}, expected JSON: {kind.__name__}")
    return value


def take(addon: Addon, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the add-on. Raises ValueError: it is missing, or has another shape."""
    tensor = addon.tensors.get(name)
    if tensor is None:
        raise ValueError(f"the {addon.selector} add-on lacks the tensor {name}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"the {addon.selector} add-on: {name} is {tuple(tensor.shape)}, its settings and the "
            f"model ask for {shape}"
        )
    return tensor
