"""Rotary position embedding (RoPE): what config.json says of it, and the cos/sin table.

Position p turns the pair (x[i], x[i + D/2]) of each head by the angle p * inv_freq[i]. This is the
"rotate-half" layout of Hugging Face weights, never the interleaved one. The scaling types stretch
the low frequencies, so that a model reads further than it was trained:

    default  no scaling                 llama3   by wavelength, against the trained length
    linear   all frequencies alike      yarn     by rotations within it, and cos/sin are scaled too

Upstream names: `rope_parameters` (transformers 5), `rope_scaling`, `rope_theta` (transformers 4).
Shapes: table [positions, 2, 1, D], 8 * D bytes per position in fp32.
References: RoFormer arXiv 2104.09864; YaRN arXiv 2309.00071.
Does not know: the model around it. Two models never share a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# rope_type -> (keys it must have, keys it may have)
_KEYS = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """One RoPE, normalised: only the fields of its `rope_type` matter (see the module docstring).

    attention_factor: what cos and sin are multiplied by (yarn).
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_config(cls, config: dict) -> RopeConfig:
        """The RoPE of a parsed config.json, in the spelling of transformers 4 or 5.

        Raises ValueError: an unknown type, a key that is missing, or a key that the type does not
        use: a factor is never ignored silently.
        """
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        if old and new and old != new:
            raise ValueError(f"rope_scaling {old} and rope_parameters {new} differ; keep one")
        source = "rope_parameters" if new else "rope_scaling"
        given = new or old or {}
        if not isinstance(given, dict):
            raise ValueError(f"{source}: got {given!r}, expected an object or null")
        given = {key: value for key, value in given.items() if value is not None}

        legacy_type = given.pop("type", "default")  # transformers 4 may write both
        rope_type = given.pop("rope_type", legacy_type)
        if rope_type not in _KEYS:
            raise ValueError(
                f"{source}: rope_type {rope_type!r} is not supported; supported: {', '.join(_KEYS)}"
            )
        rotated = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated not in (None, 1):
            raise ValueError(f"partial_rotary_factor {rotated} is not supported; expected 1")
        required, optional = _KEYS[rope_type]
        if "original_max_position_embeddings" in required:
            given.setdefault(
                "original_max_position_embeddings",
                config.get("original_max_position_embeddings") or config["max_position_embeddings"],
            )
        given.setdefault("rope_theta", config.get("rope_theta") or cls.rope_theta)

        if missing := required - given.keys():
            raise ValueError(f"{source}: rope_type {rope_type!r} needs {_listed(missing)}")
        if unused := given.keys() - required - optional - {"rope_theta"}:
            raise ValueError(f"{source}: rope_type {rope_type!r} does not use {_listed(unused)}")
        for key, value in given.items():
            is_number = isinstance(value, (int, float)) and (key == "truncate" or value > 0)
            if not is_number:
                raise ValueError(f"{source}: {key} is {value!r}, expected a positive number")
        mscale, mscale_all_dim = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if rope_type == "yarn" and "attention_factor" not in given:
            given["attention_factor"] = _yarn_attention_factor(
                given["factor"], mscale, mscale_all_dim
            )
        if rope_type == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
            raise ValueError(f"{source}: high_freq_factor must be above low_freq_factor")
        return cls(rope_type=rope_type, **given)


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> Tensor:
    """cos and sin of every position, for `apply_rope`: [positions, 2, 1, D] fp32 on the CPU.

    [:, 0] is (cos, cos); [:, 1] is (-sin, sin).
    """
    # fp32 throughout, as transformers does it: models were trained with these rounded angles.
    inv_freq = 1.0 / rope.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)  # [D/2]
    kept = _unscaled_share(rope, inv_freq, head_dim)
    inv_freq = inv_freq * (kept + (1 - kept) / rope.factor)
    angles = torch.outer(torch.arange(positions).float(), inv_freq)  # [positions, D/2]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    return table.unsqueeze(2)


def rope_angles(
    max_model_len: int, rope_dim: int, rope_theta: float, device: torch.device | str = "cpu"
) -> Tensor:
    """cos and sin of position * theta ** (-2 j / rope_dim): [max_model_len, 2, rope_dim / 2] fp32.

    Rounded from fp64: fp32 angles near position 1,000,000 are 0.06 apart. For what is
    trained here; models have been trained with `rope_table`'s.
    """
    j = torch.arange(rope_dim // 2, dtype=torch.float64, device=device)
    frequencies = rope_theta ** (-2 * j / rope_dim)
    table = torch.empty(max_model_len, 2, len(j), dtype=torch.float32, device=device)
    for first in range(0, max_model_len, 1 << 16):  # fp64 needs room, too
        rows = table[first : first + (1 << 16)]
        positions = torch.arange(first, first + len(rows), dtype=torch.float64, device=device)
        angles = positions[:, None] * frequencies
        rows[:, 0], rows[:, 1] = angles.cos(), angles.sin()
    return table


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all heads of x [T, H, D]; cos, sin [T, 1, D] are rows of `rope_table`.

    out = (x1 cos - x2 sin, x2 cos + x1 sin) with x = (x1, x2): the table holds (-sin, sin), so that
    swapping the halves is all that is left to do. Three operations instead of six.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _unscaled_share(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """How much of each frequency stays as it was: 1 keeps it, 0 divides it by `factor`. [D/2]"""
    trained = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        rotations = trained * inv_freq / (2 * math.pi)  # within the trained length
        share = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return share.clamp(0, 1)
    if rope.rope_type == "yarn":

        def index_of(rotations: float) -> float:  # the frequency that turns so often in `trained`
            wavelength = trained / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

        first, last = index_of(rope.beta_fast), index_of(rope.beta_slow)
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = (last - first) or 0.001  # a ramp without width is a step
        return 1 - ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)
    return torch.zeros_like(inv_freq)


def _yarn_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    # DeepSeek's pair of exponents counts only when both are there.
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
