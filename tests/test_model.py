"""The decoder equals transformers: each family, each RoPE type, prefill and decode, fp32 and bf16.

fp32 logits agree within 1e-4 relative or 1e-5 absolute (of values around 1): the order of sums
differs, nothing else. Guards against: interleaved RoPE (vLLM #28968), a cos/sin table that two
models share by mistake (nano-vllm #189), packing that mixes up rows.
"""

import inspect
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_reference import DenseRun, dense_logits
from safetensors.torch import load_file

from minihisparse.model import Decoder, _linear, weight_shapes
from minihisparse.model_config import ModelConfig
from minihisparse.rope import RopeConfig, rope_table

transformers = pytest.importorskip("transformers")

FP32 = {"rtol": 1e-4, "atol": 1e-5}
PROMPT_TOKENS = 50  # beyond original_max_position_embeddings = 16

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# With this base and these rotations both ends of the ramp fall between two frequencies.
YARN_UNTRUNCATED = YARN | {
    "truncate": False,
    "beta_fast": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

# name -> family, what differs from `save_model`'s sizes, shards to save it in
CASES = {
    "llama": ("Llama", {}, 1),
    "llama tied, linear": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}, 2),
    "llama biases, llama3": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
            "num_key_value_heads": 2,
        },
        3,
    ),
    "llama no GQA, yarn": ("Llama", {"num_key_value_heads": 6, "rope_parameters": YARN}, 1),
    "llama odd sizes": ("Llama", {"vocab_size": 101, "intermediate_size": 77}, 1),
    "qwen2": ("Qwen2", {"head_dim": None}, 1),
    "qwen2 tied, yarn": (
        "Qwen2",
        {"head_dim": None, "tie_word_embeddings": True, "rope_parameters": YARN_UNTRUNCATED},
        3,
    ),
    "qwen3": ("Qwen3", {}, 2),
    "qwen3 tied, biases, llama3": (
        "Qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "rope_parameters": LLAMA3,
        },
        1,
    ),
}


def save_model(folder, family, changes, shards=1):
    """A tiny random transformers model, saved to `folder` in `shards` files. Returns it."""
    sizes = {
        "vocab_size": 110,
        "hidden_size": 60,
        "intermediate_size": 74,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 14,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": DEFAULT,
    } | changes
    if sizes["head_dim"] is None:  # not a setting of Qwen2
        del sizes["head_dim"]
    sizes["rope_parameters"] = dict(sizes["rope_parameters"])  # transformers writes into it
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.3
            # Norms around 1; biases are zero in transformers, which would hide them.
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, scale)
    total = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=total if shards == 1 else total // shards + 16_000)
    assert len(list(Path(folder).glob("*.safetensors"))) == shards
    return model


def prompt(vocab_size, tokens=PROMPT_TOKENS):
    return torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """(transformers model, the folder it is saved in), for each of CASES."""
    return save_model(tmp_path, *CASES[request.param]), tmp_path


@torch.inference_mode()
def test_prefill_equals_transformers(case):
    model, folder = case
    decoder = Decoder.from_folder(folder, progress=False)
    token_ids = prompt(decoder.config.vocab_size)
    expected = model(token_ids[None]).logits[0]
    assert expected.std() > 0.3  # or the tolerance would mean nothing
    torch.testing.assert_close(dense_logits(decoder, token_ids), expected, **FP32)


@torch.inference_mode()
def test_decode_equals_transformers_with_its_cache(case):
    model, folder = case
    decoder = Decoder.from_folder(folder, progress=False)
    token_ids = prompt(decoder.config.vocab_size)
    run, cache = DenseRun(decoder), transformers.DynamicCache(config=model.config)
    renamed = "cache" in inspect.signature(model.forward).parameters  # in transformers 5.2x
    for piece in token_ids.split([20, 1, 1, 1, 1, 2, 3, 4, 5, 12]):
        expected = model(piece[None], **{"cache" if renamed else "past_key_values": cache})
        torch.testing.assert_close(run.forward(piece), expected.logits[0], **FP32)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_bf16_is_as_good_as_transformers_bf16(tmp_path, family):
    model = save_model(tmp_path, family, {"head_dim": None if family == "Qwen2" else 14})
    token_ids = prompt(110)
    exact = model(token_ids[None]).logits[0]
    theirs = model.to(torch.bfloat16)(token_ids[None]).logits[0].float()
    decoder = Decoder.from_folder(tmp_path, dtype=torch.bfloat16, progress=False)
    ours = dense_logits(decoder, token_ids)
    assert decoder.dtype == torch.bfloat16 and ours.dtype == torch.float32
    our_error, their_error = (ours - exact).abs(), (theirs - exact).abs()
    assert our_error.mean() < 1.2 * their_error.mean()
    assert our_error.max() < 1.5 * their_error.max()


def test_models_with_other_ropes_do_not_share_tables(tmp_path):
    settings = {"a": DEFAULT, "b": YARN, "c": LLAMA3, "d": DEFAULT | {"rope_theta": 50.0}}
    models = {
        k: save_model(tmp_path / k, "Llama", {"rope_parameters": settings[k]}) for k in "abcd"
    }
    decoders = {k: Decoder.from_folder(tmp_path / k, progress=False) for k in "abcd"}
    token_ids = prompt(110)
    for k in "abcdabcd":
        with torch.inference_mode():
            expected = models[k](token_ids[None]).logits[0]
        torch.testing.assert_close(dense_logits(decoders[k], token_ids), expected, **FP32)


def test_rope_table_layout():
    table = rope_table(RopeConfig(rope_theta=100.0), head_dim=4, positions=3)
    angles = [2.0, 0.2]  # position 2: frequencies 1 and 1 / sqrt(100)
    cos, sin = [math.cos(a) for a in angles], [math.sin(a) for a in angles]
    assert table.shape == (3, 2, 1, 4) and table.dtype == torch.float32
    expected = torch.tensor([cos + cos, [-s for s in sin] + sin])
    torch.testing.assert_close(table[2, :, 0], expected)


# ---- the interface ---------------------------------------------------------------------------


TINY = ModelConfig(
    vocab_size=32,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=16,
    qkv_bias=True,
    qk_norm=True,
)


def random_weights(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(config)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_shapes_and_dtypes_of_every_method():
    decoder = Decoder.random(TINY, seed=0, dtype=torch.bfloat16)
    hidden = decoder.embed(torch.tensor([1, 2, 3]))
    _, q, records = decoder.attention_inputs(1, hidden, torch.tensor([0, 7, 15]))
    assert (q.shape, records.shape) == ((3, 4, 6), (3, 2 * 2 * 6))
    before = hidden.clone()
    after = decoder.attention_output(1, hidden, q)
    assert after.shape == hidden.shape == (3, 12)
    assert torch.equal(hidden, before)  # a new tensor
    assert {t.dtype for t in (hidden, q, records, after)} == {torch.bfloat16}
    logits = decoder.logits(after)
    assert logits.shape == (3, 32) and logits.dtype == torch.float32


def test_random_models_depend_on_the_seed_alone():
    token_ids = prompt(32, 16)
    first, again, other = (Decoder.random(TINY, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(dense_logits(first, token_ids), dense_logits(again, token_ids))
    assert not torch.allclose(dense_logits(first, token_ids), dense_logits(other, token_ids))


def test_positions_are_limited_by_max_model_len():
    weights = random_weights(TINY)
    for limit, decoder in [
        (16, Decoder(TINY, dict(weights))),
        (40, Decoder(TINY, dict(weights), max_model_len=40)),
    ]:
        assert decoder.max_model_len == limit
        hidden = decoder.embed(torch.tensor([1]))
        decoder.attention_inputs(0, hidden, torch.tensor([limit - 1]))
        with pytest.raises(IndexError):
            decoder.attention_inputs(0, hidden, torch.tensor([limit]))


def test_weights_are_taken_and_counted_once(tmp_path):
    weights = random_weights(TINY)
    decoder = Decoder(TINY, weights)
    assert weights == {}
    extra = (4 + 2 - 2) * 6 * 4  # q/k norm weights, repeated per head
    expected = sum(4 * math.prod(shape) for shape in weight_shapes(TINY).values())
    assert decoder.weight_bytes == expected + extra * TINY.num_hidden_layers

    save_model(tmp_path, "Llama", {"tie_word_embeddings": True})
    on_disk = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert Decoder.from_folder(tmp_path, progress=False).weight_bytes == on_disk


def test_weights_that_do_not_fit_the_config():
    weights = random_weights(TINY)
    with pytest.raises(ValueError, match="missing tensors: model.norm.weight"):
        Decoder(TINY, {k: v for k, v in weights.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match="does not have: model.layers.2.x"):
        Decoder(TINY, weights | {"model.layers.2.x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"wrong shapes: model.norm.weight is \[3\]"):
        Decoder(TINY, weights | {"model.norm.weight": torch.ones(3)})


@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("n_out", [10, 11])
def test_few_rows_take_another_way_to_the_same_product(tokens, n_out):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in [(tokens, 8), (n_out, 8), (n_out,)]
    )
    for b in (None, bias):
        y = _linear(x, weight, b)
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, weight, b))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_cuda_equals_cpu_and_can_be_captured(dtype):
    token_ids = prompt(32, 16)
    # The kernels of a GPU want rows of whole 16 bytes.
    config = replace(TINY, hidden_size=32, intermediate_size=40, head_dim=8)
    cpu = Decoder.random(config, seed=0, dtype=dtype)
    gpu = Decoder.random(config, seed=0, dtype=dtype, device="cuda")
    expected, logits = dense_logits(cpu, token_ids), dense_logits(gpu, token_ids).cpu()
    tolerance = FP32 if dtype == torch.float32 else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(logits, expected, **tolerance)

    def step(token_ids, positions):  # attention over the token itself alone
        hidden = gpu.embed(token_ids)
        for layer in range(config.num_hidden_layers):
            _, _, records = gpu.attention_inputs(layer, hidden, positions)
            v = records.view(len(records), 2, -1, config.head_dim)[:, 1]
            hidden = gpu.attention_output(layer, hidden, v.repeat_interleave(2, dim=1))
        return gpu.logits(hidden)

    ids, positions = torch.tensor([1, 2], device="cuda"), torch.tensor([3, 9], device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(ids, positions)  # warm-up: cuBLAS allocates its workspace
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(ids, positions)
    ids.copy_(torch.tensor([5, 30]))
    positions.copy_(torch.tensor([0, 15]))
    graph.replay()
    assert torch.equal(captured, step(ids, positions))
