"""config.json -> ModelConfig: both spellings, every refusal, no setting ignored in silence.

Guards against: a RoPE factor that is skipped (vLLM #1956, #21174), a KeyError for an unknown model
(gpt-fast #30), a hub id that ends in a stack trace (nano-vllm #97).
"""

import json

import pytest
import torch

from minihisparse.model_config import ModelConfig
from minihisparse.rope import RopeConfig

BASE = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def load(tmp_path):
    """load(key=value, ...): ModelConfig of BASE with these keys changed; `...` leaves one out."""

    def load(generation=None, **changes):
        raw = {key: value for key, value in (BASE | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_folder(tmp_path)

    return load


def test_fields_and_defaults(load):
    config = load()
    assert (config.num_hidden_layers, config.rms_norm_eps) == (3, 1e-5)
    assert (config.num_key_value_heads, config.head_dim) == (2, 8)
    assert config.record_width == 2 * 2 * 8
    assert config.rope == RopeConfig() and config.rope.rope_theta == 10_000
    assert (config.tie_word_embeddings, config.qk_norm, config.mlp_bias) == (False, False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((), None, None)
    assert load(num_key_value_heads=...).num_key_value_heads == 6
    assert load(num_key_value_heads=None).num_key_value_heads == 6
    assert load(head_dim=None).head_dim == 8
    assert load(head_dim=20).head_dim == 20
    hash(config)


@pytest.mark.parametrize(
    "family, attention_bias, expected",  # expected: qkv_bias, o_bias, qk_norm, head_dim
    [
        ("llama", False, (False, False, False, 8)),
        ("llama", True, (True, True, False, 8)),
        ("qwen2", ..., (True, False, False, 8)),
        ("qwen2", False, (True, False, False, 8)),  # transformers has no such key for Qwen2
        ("qwen3", False, (False, False, True, 128)),
        ("qwen3", True, (True, True, True, 128)),
    ],
)
def test_families(load, family, attention_bias, expected):
    config = load(model_type=family, attention_bias=attention_bias, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim) == expected
    assert config.mlp_bias == (family == "llama")


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_rope_is_the_same_in_all_spellings(load, scaling):
    old_type = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    v5 = load(rope_parameters=scaling | {"rope_theta": 5e5}).rope
    v4 = load(rope_scaling=scaling, rope_theta=5e5).rope
    v4_old = load(rope_scaling=old_type, rope_theta=5e5).rope
    both = load(rope_scaling=scaling, rope_parameters=scaling, rope_theta=5e5).rope
    assert v5 == v4 == v4_old == both
    assert (v5.rope_type, v5.rope_theta, v5.factor) == (
        scaling["rope_type"],
        5e5,
        scaling["factor"],
    )


def test_rope_defaults(load):
    assert load(rope_scaling=None, rope_theta=1e6).rope == RopeConfig(rope_theta=1e6)
    without = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert load(rope_scaling=without).rope.original_max_position_embeddings == 128
    assert load(rope_scaling=YARN).rope.attention_factor == pytest.approx(1.1386294)
    assert load(rope_scaling=YARN | {"attention_factor": 0.7}).rope.attention_factor == 0.7
    pair = YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}
    assert load(rope_scaling=pair).rope.attention_factor == pytest.approx(1.0693147 / 1.1386294)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported.*default, linear"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs high_freq_factor, low_freq_factor"),
        ({"rope_type": "default", "factor": 2.0}, "'default' does not use factor"),
        ({"factor": 2.0}, "'default' does not use factor"),
        (LLAMA3 | {"beta_fast": 32}, "'llama3' does not use beta_fast"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be above"),
        ({"full_attention": {"rope_type": "default"}}, "does not use full_attention"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0, expected a positive number"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2', expected a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ([1], "expected an object or null"),
    ],
)
def test_rope_errors(load, rope, message):
    for spelling in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=f"config.json: .*{message}"):
            load(**{spelling: rope})


def test_rope_spellings_that_contradict_each_other(load):
    with pytest.raises(ValueError, match="differ; keep one"):
        load(rope_scaling=YARN, rope_parameters=LLAMA3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported.*llama, qwen2, qwen3"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported.*silu"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*'gptq'"),
        ({"vocab_size": ...}, "'vocab_size' is missing"),
        ({"rms_norm_eps": ...}, "'rms_norm_eps' is missing"),
        ({"vocab_size": "99"}, "vocab_size is '99', expected a whole number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of .* 4"),
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple of num_attention_heads 6"),
        ({"head_dim": 9}, "head_dim 9 is odd"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_errors_name_file_and_key(load, change, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load(**change)


def test_tokens_that_end_a_text(load):
    assert load(eos_token_id=2, bos_token_id=1).eos_token_ids == (2,)
    assert load(eos_token_id=[5, 0]).eos_token_ids == (5, 0)
    assert load(eos_token_id=None).eos_token_ids == ()
    config = load(eos_token_id=2, generation={"eos_token_id": [7, 2], "bos_token_id": 3})
    assert config.eos_token_ids == (7, 2)
    assert load(eos_token_id=4, generation={"eos_token_id": None}).eos_token_ids == (4,)
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is 'x'"):
        load(generation={"eos_token_id": "x"})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(load, key):
    assert load(**{key: "bfloat16"}).dtype == torch.bfloat16
    assert load(**{key: "float16"}).dtype == torch.float16


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere$"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="`hf download org/some-model --local-dir DIR`"):
        ModelConfig.from_folder("org/some-model")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match="model.gguf is a file; expected the folder"):
        ModelConfig.from_folder(tmp_path / "model.gguf")


def test_files_that_are_not_json(tmp_path, load):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: expected a JSON object, got list"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json: not valid JSON"):
        load()
