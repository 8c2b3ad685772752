"""Turn the GGUF of a llama-like model into a Hugging Face folder.

GGUF quantises the weights, renames them and reorders the rows of Q and K; it keeps config and
tokenizer as key-value pairs. This undoes each, so that the engine needs one format only.

Source: convert_hf_to_gguf.py of llama.cpp, and its 'smollm' pre-tokenizer.
This file does not know where the GGUF comes from, or any other architecture or tokenizer than
SmolLM2's. It cannot bring back what quantisation lost: Q4_1 keeps 4 bits per value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm

if TYPE_CHECKING:  # an extra of this package
    from gguf import ReaderTensor

TOP_NAMES = {  # GGUF's -> Hugging Face's
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {  # the same, below blk.N and model.layers.N
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's token type of <|im_start|> and the like


def gguf_to_hf(path: Path, folder: Path, dtype: torch.dtype, progress: bool = True) -> None:
    """Write weights, config, tokenizer and chat template of the GGUF at `path` to `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    weights = _dequantise(reader.tensors, meta, dtype, progress)
    save_weights(weights, folder / "model.safetensors")
    write_json(folder / "config.json", _config(meta, dtype, "lm_head.weight" not in weights))
    write_json(folder / "generation_config.json", _special_ids(meta))
    _write_tokenizer(folder, meta)


def save_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file as Hugging Face does."""
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it readable to its owner only


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- weights ----


def _dequantise(
    tensors: list[ReaderTensor], meta: dict[str, Any], dtype: torch.dtype, progress: bool
) -> dict[str, torch.Tensor]:
    """Return the weights under Hugging Face's names, in their layout and in `dtype`."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tqdm(tensors, desc="dequantise", unit="tensor", disable=not progress):
        # astype copies: what comes out does not point into the file, which is deleted soon
        array = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        array = array.reshape(tensor.shape[::-1].tolist())  # GGUF lists the fastest dimension first
        if tensor.name in TOP_NAMES:
            name = TOP_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                array = _unpermute(array, heads[part])
        weights[name] = torch.from_numpy(array).to(dtype).contiguous()
    return weights


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Give the rows of a Q or K projection back their order in Hugging Face's files.

    RoPE rotates pairs of values. GGUF keeps a pair in neighbouring rows of a head (2i, 2i + 1),
    Hugging Face half a head apart (i, i + D/2). In the wrong order the model still talks, badly.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [H, D/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# ---- config and tokenizer ----


def _config(meta: dict[str, Any], dtype: torch.dtype, tied: bool) -> dict[str, Any]:
    """Return config.json; both the new and the old key of RoPE, for readers of either."""
    theta = meta["llama.rope.freq_base"]
    eps = meta["llama.attention.layer_norm_rms_epsilon"]  # a float32: 9.999999747378752e-06
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{eps:.7g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_special_ids(meta),
    }


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    """Write the byte-level BPE tokenizer and the chat template."""
    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"got pre-tokenizer {meta['tokenizer.ggml.pre']!r}, expected 'smollm'")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # 'smollm': every digit is a word of its own, then GPT-2's pattern. transformers' GGUF reader
    # leaves the digits out, hence this rebuild.
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _special_ids(meta) | {"unk_token_id": meta["tokenizer.ggml.unknown_token_id"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role.removesuffix("_id"): tokens[index] for role, index in ids.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    write_json(folder / "tokenizer_config.json", settings)
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_bytes(template.encode())  # newlines as they are
