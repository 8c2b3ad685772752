"""What a model is: `config.json` and `generation_config.json` of a Hugging Face folder, validated.

One frozen dataclass describes the three families; what tells them apart (biases, q/k norm) are
flags. Everything that would change the mathematics and is not built raises, with key and value.

Upstream names: those of config.json, except where a comment says otherwise.
References: transformers, models/{llama,qwen2,qwen3}.
Does not know: weights, devices, caches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minihisparse.anchors import anchor_of_layers, anchors_of_every, anchors_of_pattern
from minihisparse.rope import RopeConfig

SUPPORTED = ("llama", "qwen2", "qwen3")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model.

    qkv_bias, o_bias, mlp_bias: which projections have one. qk_norm: RMSNorm over each head of q and
    k, before RoPE. eos_token_ids: tokens that end a text, of both files. dtype: the one the weights
    are stored in, None where config.json does not say. name: config.json's _name_or_path, else the
    folder's path; None without a folder. index_topk_freq, index_topk_pattern: which layers select
    for themselves (`anchors.py`), where the model says so.

    Raises ValueError: values that fit no model; the message starts with the key.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = RopeConfig()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: torch.dtype | None = None
    name: str | None = None
    index_topk_freq: int | None = None
    index_topk_pattern: str | None = None

    def __post_init__(self) -> None:
        for key, kind in ModelConfig.__annotations__.items():
            value = getattr(self, key)
            if kind == "int":
                _check_count(key, value)
            if kind == "bool" and type(value) is not bool:
                raise ValueError(f"{key} is {value!r}, expected true or false")
        if not isinstance(self.rms_norm_eps, (int, float)) or self.rms_norm_eps <= 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}, expected a positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE turns pairs")
        if self.index_topk_freq is not None:
            _check_count("index_topk_freq", self.index_topk_freq)
        _ = self.anchor_of  # raises if a layer has none

    @property
    def anchor_of(self) -> tuple[int, ...] | None:
        """Per layer the anchor whose selection it uses; None if the model does not say."""
        if self.index_topk_pattern is not None:
            anchors = anchors_of_pattern(self.index_topk_pattern, self.num_hidden_layers)
        elif self.index_topk_freq is not None:
            anchors = anchors_of_every(self.index_topk_freq, self.num_hidden_layers)
        else:
            return None
        return anchor_of_layers(anchors, self.num_hidden_layers)

    @property
    def record_width(self) -> int:
        """Elements in one position's K and V of one layer: W = 2 * Hkv * D."""
        return 2 * self.num_key_value_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json`.

        Raises FileNotFoundError: no such folder or file. ValueError: everything else; the message
        names the file and the key.
        """
        folder = find_folder(folder)
        config_file, generation_file = folder / "config.json", folder / "generation_config.json"
        config = cls.from_file(config_file, generation_file)
        return config if config.name else replace(config, name=str(folder.resolve()))

    @classmethod
    def from_file(cls, config_file: str | Path, generation_file: str | Path = "") -> ModelConfig:
        """Read a config.json, and a generation_config.json if there is one. Raises the same."""
        config_file, generation_file = Path(config_file), Path(generation_file)
        raw = _read_json(config_file)
        generation = _read_json(generation_file) if generation_file.is_file() else {}
        with _errors_name(generation_file):
            end_tokens = _token_ids("eos_token_id", generation)
        with _errors_name(config_file):
            return cls(**_fields(raw, end_tokens))


def find_folder(folder: str | Path) -> Path:
    """`folder` as a Path, `~` expanded. Raises FileNotFoundError, with help, if it is not one."""
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file; expected the folder with config.json")
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        hint = (
            f". Nothing is downloaded here; if this is a hub id: "
            f"`hf download {folder} --local-dir DIR`, then pass DIR"
        )
    raise FileNotFoundError(f"there is no folder {path}{hint}")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing; expected a Hugging Face model folder "
            f"(config.json, *.safetensors, tokenizer.json)"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


@contextmanager
def _errors_name(file: Path) -> Iterator[None]:
    """Put the file in front of what the parsing inside raises."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{file}: {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _fields(raw: dict[str, Any], end_tokens: list[int]) -> dict[str, Any]:
    """The fields of ModelConfig; `end_tokens` are those of generation_config.json.

    Raises KeyError: a required key is absent. ValueError: everything else.
    """
    family = raw.get("model_type")
    if family not in SUPPORTED:
        raise ValueError(
            f"model_type {family!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    _refuse_unsupported(raw)
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    fields = {key: raw[key] for key in required}
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = _or(raw.get("num_key_value_heads"), heads)
    fields["head_dim"] = raw.get("head_dim")
    if fields["head_dim"] is None:
        fields["head_dim"] = _default_head_dim(family, fields["hidden_size"], heads)

    # The families' own defaults; Qwen2 fixes its biases and has no key for them.
    bias = family == "qwen2" or _or(raw.get("attention_bias"), False)
    return fields | {
        "tie_word_embeddings": _or(raw.get("tie_word_embeddings"), False),
        "qkv_bias": bias,
        "o_bias": bias if family != "qwen2" else False,
        "mlp_bias": _or(raw.get("mlp_bias"), False) if family == "llama" else False,
        "qk_norm": family == "qwen3",
        "rope": RopeConfig.from_config(raw),
        "eos_token_ids": tuple(dict.fromkeys(end_tokens + _token_ids("eos_token_id", raw))),
        "bos_token_id": next(iter(_token_ids("bos_token_id", raw)), None),
        "dtype": _dtype(_or(raw.get("dtype"), raw.get("torch_dtype"))),
        "name": raw.get("_name_or_path"),
        "index_topk_freq": raw.get("index_topk_freq"),
        "index_topk_pattern": raw.get("index_topk_pattern"),
    }


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported; supported: silu")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window true is not supported: every layer sees all positions")
    for layer_type in raw.get("layer_types") or ():
        if layer_type != "full_attention":
            raise ValueError(
                f"layer_types has {layer_type!r}; supported: full_attention in every layer"
            )
    if quantization := raw.get("quantization_config"):
        raise ValueError(
            f"quantization_config {quantization} is not supported; use the unquantised model"
        )


def _default_head_dim(family: str, hidden_size: int, heads: int) -> int:
    if family == "qwen3":
        return 128  # transformers' default for this family, whatever the hidden size
    _check_count("hidden_size", hidden_size)
    _check_count("num_attention_heads", heads)
    if hidden_size % heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, "
            f"and there is no head_dim"
        )
    return hidden_size // heads


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, expected a whole number above 0")


def _token_ids(key: str, raw: dict[str, Any]) -> list[int]:
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{key} is {value!r}, expected a token id, a list of them, or null")
    return ids


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _or(value: Any, default: Any) -> Any:
    """`value`, unless the key was absent or null (config.json uses both)."""
    return default if value is None else value
