"""Loading is complete or fails before a weight is read.

Guards against: a layer or head left random (vLLM #16555, nano-vllm #97), a stray duplicate file
that is read instead of the shards (mlx-vlm #1464), shards that are missing (sglang #32279).
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from minihisparse import weights as weights_module
from minihisparse.weights import EMBEDDING, HEAD, load_weights

SHAPES = {EMBEDDING: (7, 4), "model.layers.0.a.weight": (3, 4), "model.norm.weight": (4,)}
UNTIED = SHAPES | {HEAD: (7, 4)}


def tensors_of(shapes, dtype=torch.float32):
    """Distinct values in every tensor."""
    return {
        name: (torch.arange(torch.Size(shape).numel()) + 100 * i).reshape(shape).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def save_shards(folder, tensors, count):
    """Write `tensors` as `count` shards with an index."""
    weight_map = {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::count]}
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(folder, expected=SHAPES, dtype=torch.float32, **kwargs):
    return load_weights(folder, expected, device="cpu", dtype=dtype, progress=False, **kwargs)


def assert_same(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.fixture
def no_read(monkeypatch):
    """Turns any progress, and so any reading of weights, into a failure."""

    def fail(*args, **kwargs):
        pytest.fail("weights were read before the check was complete")

    monkeypatch.setattr(weights_module, "tqdm", fail)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_equal_a_single_file(tmp_path, shards):
    tensors = tensors_of(SHAPES)
    save_shards(tmp_path, tensors, shards)
    assert_same(load(tmp_path), tensors)


def test_single_file_and_dtype(tmp_path):
    tensors = tensors_of(SHAPES, torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), {name: t.float() for name, t in tensors.items()})
    loaded = load(str(tmp_path), dtype=torch.bfloat16)
    assert_same(loaded, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"")  # they do not live in the file
    assert_same(loaded, tensors)


def test_index_wins_over_a_stray_single_file(tmp_path):
    tensors = tensors_of(SHAPES)
    save_shards(tmp_path, tensors, 2)
    save_file({name: -t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), tensors)


def test_old_frequencies_are_tolerated(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors_of(SHAPES) | extra, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), tensors_of(SHAPES))


def test_missing_shards_are_listed(tmp_path, no_read):
    save_shards(tmp_path, tensors_of(SHAPES), 3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of-00003.*, model-00003-of-00003"):
        load(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path, no_read):
    save_shards(tmp_path, tensors_of(SHAPES), 2)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="00002-of-00002.*model.layers.0.a.weight is not in it"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}'])
def test_broken_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="index.json: not a safetensors index"):
        load(tmp_path)


def test_missing_superfluous_and_wrong_tensors_are_listed(tmp_path, no_read):
    save_file(tensors_of(SHAPES), tmp_path / "model.safetensors")
    more = {f"model.layers.{i}.b.weight": (1,) for i in range(20)}
    with pytest.raises(ValueError, match="missing tensors: model.layers.0.b.* and 12 more"):
        load(tmp_path, SHAPES | more)
    fewer = {name: SHAPES[name] for name in (EMBEDDING, "model.norm.weight")}
    with pytest.raises(ValueError, match="does not have: model.layers.0.a.weight"):
        load(tmp_path, fewer)
    with pytest.raises(ValueError, match=r"norm.weight is \[4\], expected \[5\]"):
        load(tmp_path, SHAPES | {"model.norm.weight": (5,)})


def test_head_of_its_own(tmp_path):
    save_file(tensors_of(UNTIED), tmp_path / "model.safetensors")
    assert_same(load(tmp_path, UNTIED), tensors_of(UNTIED))


def test_head_is_never_left_random(tmp_path, no_read):
    save_file(tensors_of(SHAPES), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing tensors: lm_head.weight .*tie_word_embeddings"):
        load(tmp_path, UNTIED)


def test_tied_head_may_be_in_the_file_if_it_is_equal(tmp_path):
    tensors = tensors_of(SHAPES)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), tensors)
    save_file(tensors | {HEAD: tensors[EMBEDDING] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        load(tmp_path)


@pytest.mark.parametrize(
    "file, message",
    [
        (None, "was the download complete"),
        ("model-Q4.gguf", "only GGUF; use the model's safetensors folder"),
        ("pytorch_model.bin", "only pickled weights; convert them"),
        ("model-00001-of-00002.safetensors", "shards cannot be read without their index"),
    ],
)
def test_folder_without_weights(tmp_path, file, message):
    if file:
        (tmp_path / file).touch()
    with pytest.raises(FileNotFoundError, match=f"has neither model.safetensors nor.*{message}"):
        load(tmp_path)


def test_damaged_and_quantised_files(tmp_path, no_read):
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(SHAPES), file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        load(tmp_path)
    save_file(tensors_of(SHAPES, torch.int8), file)
    with pytest.raises(ValueError, match="is I8, supported: F64, F32, F16, BF16"):
        load(tmp_path)


def test_progress_goes_to_stderr(tmp_path, capsys):
    save_file(tensors_of(SHAPES), tmp_path / "model.safetensors")
    load_weights(tmp_path, SHAPES, device="cpu", dtype=torch.float32)
    captured = capsys.readouterr()
    assert captured.out == "" and "weights" in captured.err
