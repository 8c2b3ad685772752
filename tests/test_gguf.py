"""gguf_to_hf: the folder holds what the GGUF holds, as Hugging Face's libraries expect it.

Guards: Q/K rows left in GGUF's order (the model still talks, badly); a tokenizer that merges digits
(transformers' GGUF reader makes one). The oracles are the weights that a tiny GGUF was made from,
and what transformers reads from it.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from minihisparse.model import weight_shapes
from minihisparse.model_config import ModelConfig
from minihisparse.weights_scripts.gguf_to_hf import LAYER_NAMES, TOP_NAMES, gguf_to_hf

gguf = pytest.importorskip("gguf")
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "h e", "Ġ t"]  # "12" must never come out: digits are split first
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = CONTROL + BYTES + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


def tiny_weights() -> dict[str, np.ndarray]:
    """Hugging Face's names and row order."""
    sizes = (len(VOCAB), HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM)
    shapes = weight_shapes(ModelConfig(*sizes, tie_word_embeddings=True))
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does: row j of half h of a head becomes row 2j + h."""
    half = HEAD_DIM // 2
    rows = [(2 * n + h) * half + j for n in range(heads) for j in range(half) for h in (0, 1)]
    return weight[rows]


def write_tiny_gguf(path: Path) -> None:
    """The embedding is Q8_0 and the MLP Q4_1, as in the real file; the rest is F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCAB) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    for role, index in {"unk": 0, "bos": 1, "eos": 2, "pad": 2}.items():
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_chat_template(TEMPLATE)
    theirs = {ours: name for name, ours in TOP_NAMES.items()}
    for name, ours in LAYER_NAMES.items():
        for layer in range(LAYERS):
            theirs[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{name}.weight"
    kinds = gguf.GGMLQuantizationType
    for name, array in tiny_weights().items():
        if ".q_proj" in name or ".k_proj" in name:
            array = permute(array, HEADS if ".q_proj" in name else KV_HEADS)
        kind = kinds.Q4_1 if ".mlp." in name else kinds.Q8_0 if "embed" in name else kinds.F32
        writer.add_tensor(theirs[name], gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    write_tiny_gguf(path / "tiny.gguf")
    gguf_to_hf(path / "tiny.gguf", path, request.param, progress=False)
    return path


def assert_like_transformers(path: Path, folder: Path) -> None:
    """The weights equal what transformers reads from the GGUF, rounded to the folder's dtype.

    from_pretrained(gguf_file=...) calls the same function, but wants the package accelerate.
    The folder's config only gives the model whose names the tensors get.
    """
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    read = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    theirs = {name: t for name, t in read["tensors"].items() if name != "lm_head.weight"}  # tied
    ours = load_file(folder / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == config.dtype
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name


def test_weights(folder):
    ours = load_file(folder / "model.safetensors")
    for name, array in tiny_weights().items():
        expected = torch.from_numpy(array).to(ours[name].dtype)
        if ".mlp." in name or "embed" in name:  # Q4_1 has 16 levels, over about 5
            torch.testing.assert_close(ours[name], expected, atol=0.4, rtol=0)
        else:
            assert torch.equal(ours[name], expected), name
    assert_like_transformers(folder / "tiny.gguf", folder)


def test_transformers_loads_the_folder(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "t 12"}])["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>t 12<|im_end|>\n" and ids[-2] == 2


def test_tokenizer_splits_digits_and_merges_the_rest(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_end|>12").tokens == ["<|im_end|>", "1", "2"]
    assert tokenizer.encode("he t").tokens == ["he", "Ġt"]


@pytest.mark.model
def test_real_tokenizer(smollm2_dir):
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.encode("a 2048").tokens == ["a", "Ġ", "2", "0", "4", "8"]
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    assert special[:3] == CONTROL and len(special) == 17
