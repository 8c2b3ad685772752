"""Add-ons for tiny models: random weights, so that selections are varied and mean nothing."""

from pathlib import Path

import torch

from minihisparse.addon import SIZES, Addon, fingerprint, write_addon
from minihisparse.anchors import anchors_of_every
from minihisparse.model import Decoder

DSA_SETTINGS = {
    "index_n_heads": 2,
    "index_head_dim": 16,
    "rope_dim": 8,
    "rope_theta": 10000.0,
    "num_sinks": 1,
    "num_recent": 2,
    "top_k": 8,
}


def tiny_addon(
    decoder: Decoder,
    selector: str = "dsa",
    anchors: tuple[int, ...] | None = None,
    seed: int = 0,
    **settings: float,
) -> Addon:
    """An add-on for the decoder's shape and weights, tensors in bf16.

    selector: dsa or dsa-shared. anchors: None: every layer, of dsa-shared every second one.
    settings: in place of some of DSA_SETTINGS.
    """
    config, settings = decoder.config, DSA_SETTINGS | settings
    num_layers, hidden = config.num_hidden_layers, config.hidden_size
    if anchors is None:
        anchors = anchors_of_every(2 if selector == "dsa-shared" else 1, num_layers)
    heads, head_dim = settings["index_n_heads"], settings["index_head_dim"]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {}
    for layer in anchors:
        prefix = f"model.layers.{layer}.self_attn.indexer"
        tensors |= {
            f"{prefix}.wq.weight": noise(heads * head_dim, hidden) / hidden**0.5,
            f"{prefix}.wk.weight": noise(head_dim, hidden) / hidden**0.5,
            f"{prefix}.weights_proj.weight": noise(heads, hidden),
            f"{prefix}.k_norm.weight": 1 + 0.3 * noise(head_dim),
            f"{prefix}.k_norm.bias": 0.3 * noise(head_dim),
        }
    metadata = {size: str(getattr(config, size)) for size in SIZES} | {
        "model": Path(config.name or "tiny").name,
        "weights_fingerprint": fingerprint(decoder),
        "licence": "Apache-2.0",
    }
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return Addon(selector, settings, tuple(anchors), tensors, metadata)


def tiny_addon_file(folder: Path, decoder: Decoder, *args, **options) -> Path:
    """`tiny_addon`, as a file in the folder."""
    addon = tiny_addon(decoder, *args, **options)
    path = folder / f"tiny-{addon.selector}.safetensors"
    write_addon(path, addon)
    return path
