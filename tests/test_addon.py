"""Guards: an add-on that is used with a model of another shape or name; one that is damaged, or no
add-on at all, and ends in something else than a ValueError that names the file and what is wrong; a
warning for the right weights, or none for wrong ones; numbers that change on the way to the file.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from addon_rig import tiny_addon, tiny_addon_file
from conftest import make_tiny_config
from rig import assert_same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minihisparse.addon import SIZES, Addon, fingerprint, read_addon, take, write_addon
from minihisparse.assembly import SHIPPED, Choice
from minihisparse.indexer import DSASelector
from minihisparse.model import Decoder, weight_shapes
from minihisparse.weights_scripts.distil_report import card

INDEXER = "model.layers.1.self_attn.indexer"


@pytest.fixture
def model(tiny_decoder) -> Decoder:
    return tiny_decoder()


@pytest.fixture
def path(tmp_path, model) -> Path:
    return tiny_addon_file(tmp_path, model)


def rewrite(path: Path, change: Callable[[dict, dict], None]) -> None:
    """change(header, tensors) of a file, in place."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    change(header, tensors)
    save_file(tensors, path, header)


def changed(addon: Addon, **metadata: str) -> Addon:
    return dataclasses.replace(addon, metadata={**addon.metadata, **metadata})


def select_with(addon: Addon, model: Decoder, top_k: int = 8, **options) -> DSASelector:
    return DSASelector(addon, model, top_k=top_k, max_requests=1, max_model_len=16, **options)


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector, anchors", [("dsa", None), ("dsa-shared", (0, 2))])
def test_round_trip(tmp_path, model, selector, anchors):
    addon = tiny_addon(model, selector, anchors, num_recent=3, rope_theta=12345.5)
    path = tmp_path / "addon.safetensors"
    path.write_bytes(b"an older one")
    write_addon(path, addon)
    read = read_addon(str(path))
    assert (read.selector, read.anchors) == (addon.selector, addon.anchors)
    assert read.settings == addon.settings and read.metadata == addon.metadata
    assert type(read.settings["num_recent"]) is int and read.settings["rope_theta"] == 12345.5
    assert read.num_layers == 3
    assert read.anchor_of == ((0, 1, 2) if anchors is None else (0, 0, 2))
    assert read.tensors.keys() == addon.tensors.keys()
    for name, tensor in addon.tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert_same_bits(read.tensors[name], tensor, name)


def test_views_are_written_as_they_look(tmp_path, model):
    """Tensors may be transposed, or parts of larger ones."""
    addon = tiny_addon(model)
    name = f"{INDEXER}.wk.weight"
    tensor = addon.tensors[name]
    view = tensor.T.contiguous().T
    assert not view.is_contiguous()
    path = tmp_path / "addon.safetensors"
    write_addon(path, dataclasses.replace(addon, tensors={**addon.tensors, name: view}))
    assert_same_bits(read_addon(path).tensors[name], tensor)


def test_the_home_folder(monkeypatch, path):
    monkeypatch.setenv("HOME", str(path.parent))
    assert read_addon(f"~/{path.name}").selector == "dsa"


def test_a_missing_file(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):  # a folder is none either
        with pytest.raises(FileNotFoundError, match=f"{path}: .* --selector-weights"):
            read_addon(path)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(path, kept):
    data = path.read_bytes()
    size = int(len(data) * kept) if isinstance(kept, float) else kept
    path.write_bytes(data[:size])
    with pytest.raises(ValueError, match=f"{path} is no selector add-on"):
        read_addon(path)


@pytest.mark.parametrize("content", [b"garbage", b"PK\3\4" * 100, b"\0" * 64, b"\xff" * 64])
def test_garbage(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is no selector add-on"):
        read_addon(path)


def test_another_safetensors_file(tmp_path, tiny_folder):
    """A model's weights, with a header and without."""
    path = tmp_path / "other.safetensors"
    for header in ({"format": "pt"}, None):
        save_file({"x": torch.zeros(2)}, path, header)
        with pytest.raises(ValueError, match=f"{path} is no .* lacks 'format': 'minihisparse-ad"):
            read_addon(path)
    with pytest.raises(ValueError, match="lacks 'format'"):
        read_addon(tiny_folder / "model.safetensors")


def test_another_version(path):
    rewrite(path, lambda header, _: header.update(format="minihisparse-addon-2"))
    with pytest.raises(ValueError, match="lacks 'format': 'minihisparse-addon-1'"):
        read_addon(path)


@pytest.mark.parametrize("key", ["selector", "settings", "anchors", "model", *SIZES])
def test_a_header_without_a_key(path, key):
    rewrite(path, lambda header, _: header.pop(key))
    with pytest.raises(ValueError, match=f"{path} is no selector add-on: its header lacks {key}$"):
        read_addon(path)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("anchors", "[0, 3]", r"the model's layers are 0\.\.2"),
        ("anchors", "[1, 2]", "layer 0 is none"),
        ("anchors", "[]", "layer 0 is none"),
        ("anchors", "[0, 2, 1]", "must be layer numbers that ascend"),
        ("anchors", '["0"]', "layer 0 is none"),
        ("anchors", "0", "anchors '0', expected JSON: list"),
        ("anchors", "[0,", r"anchors '\[0,'"),
        ("num_hidden_layers", "2", r"the model's layers are 0\.\.1"),
        ("num_hidden_layers", "many", "num_hidden_layers"),
        ("hidden_size", "4.5", "hidden_size '4.5', expected JSON: int"),
        ("settings", "{", "settings '{', expected JSON: dict"),
        ("settings", "[1]", "settings"),
        ("settings", "null", "settings"),
    ],
)
def test_a_header_with_wrong_values(path, key, value, message):
    rewrite(path, lambda header, _: header.update({key: value}))
    with pytest.raises(ValueError, match=f"{path} is no selector add-on: .*{message}"):
        read_addon(path)


# -- its tensors ------------------------------------------------------------------------------


def test_take(model):
    addon = tiny_addon(model)
    name = f"{INDEXER}.wk.weight"
    assert take(addon, name, (16, 48)) is addon.tensors[name]
    with pytest.raises(ValueError, match="the dsa add-on lacks the tensor nothing"):
        take(addon, "nothing", (1,))
    with pytest.raises(ValueError, match=rf"{name} is \(16, 48\), .* ask for \(48, 16\)"):
        take(addon, name, (48, 16))


@pytest.mark.parametrize(
    "tensor", ["wq.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"]
)
def test_missing_and_misshapen_tensors(path, model, tensor):
    """Of any anchor; found when the selector is made, before anything runs."""
    name = f"{INDEXER}.{tensor}"

    def cut(_, tensors):
        tensors[name] = tensors[name][:-1].clone()

    rewrite(path, cut)
    shape = r"\(\d+,.*\)"
    with pytest.raises(ValueError, match=rf"dsa add-on: {name} is {shape}, .* ask for {shape}"):
        select_with(read_addon(path), model)
    rewrite(path, lambda _, tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"the dsa add-on lacks the tensor {name}"):
        select_with(read_addon(path), model)


@pytest.mark.parametrize(
    "setting",
    ["index_n_heads", "index_head_dim", "rope_dim", "rope_theta", "num_sinks", "num_recent"],
)
@pytest.mark.parametrize("kernels", [False, True])
def test_a_missing_setting(model, setting, kernels):
    """Already when it is planned how much memory there is for whom."""
    addon = tiny_addon(model)
    settings = {key: value for key, value in addon.settings.items() if key != setting}
    addon = dataclasses.replace(addon, settings=settings)
    message = f"the dsa add-on's settings lack {setting}"
    with pytest.raises(ValueError, match=message):
        select_with(addon, model, kernels=kernels)
    with pytest.raises(ValueError, match=message):
        DSASelector.size(
            addon,
            dtype=torch.float32,
            index_dtype="auto",
            top_k=8,
            max_model_len=16,
            kernels=kernels,
        )


@pytest.mark.parametrize("kernels", [False, True])
def test_top_k_below_what_is_always_read(model, kernels):
    addon = tiny_addon(model, num_sinks=3, num_recent=4)
    select_with(addon, model, top_k=7, kernels=kernels)
    message = "top_k=6 is less than the 3 first and 4 newest positions .* dsa add-on .*--top-k"
    with pytest.raises(ValueError, match=message):
        select_with(addon, model, top_k=6, kernels=kernels)
    with pytest.raises(ValueError, match=message):
        DSASelector.size(
            addon,
            dtype=torch.float32,
            index_dtype="auto",
            top_k=6,
            max_model_len=16,
            kernels=kernels,
        )


# -- its model --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_another_shape_is_refused(model, size):
    theirs = getattr(model.config, size)
    addon = changed(tiny_addon(model), **{size: str(2 * theirs)})
    message = f"trained on tiny, whose {size} is {2 * theirs}; this model's is {theirs}; .*quest"
    with pytest.raises(ValueError, match=message):
        addon.check_model(model)
    with pytest.raises(ValueError, match=message):
        select_with(addon, model)


def named(model: Decoder, name: str | None) -> Decoder:
    """A model of the same shape, from a folder of this name."""
    config = dataclasses.replace(model.config, name=name)
    return Decoder.random(config, seed=0)


@pytest.mark.parametrize("name", [None, "/models/Tiny", "/models/some-TINY-Q4_1-bf16", "org/tiny"])
def test_names_that_fit(model, name):
    """A folder may say more than the name, and in other letters; a model without one is trusted."""
    ours = named(model, name)
    addon = changed(tiny_addon(ours), model="tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        addon.check_model(ours)


@pytest.mark.parametrize("name", ["/models/tin", "org/other-model"])
def test_another_name_is_refused(model, name):
    ours = named(model, name)
    addon = changed(tiny_addon(ours), model="tiny")
    with pytest.raises(ValueError, match=f"trained on tiny, this model is {name}; .*quest"):
        addon.check_model(ours)


# -- its weights ------------------------------------------------------------------------------


def from_bf16_file(dtype: torch.dtype, change: float = 0.0) -> Decoder:
    """A model whose weights are bf16 numbers, loaded in another type."""
    config = make_tiny_config()
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(config).items()
    }
    weights["model.layers.2.self_attn.q_proj.weight"][0, 0] += change
    return Decoder(config, {n: w.bfloat16().to(dtype) for n, w in weights.items()})


def test_the_same_weights_in_another_type():
    """bf16 numbers are the same in all three types: neither fingerprint nor warning."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    models = [from_bf16_file(dtype) for dtype in dtypes]
    prints = {fingerprint(model) for model in models}
    assert len(prints) == 1 and len(prints.pop()) == 64
    addon = tiny_addon(models[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in models:
            addon.check_model(model)


def test_other_weights_warn():
    """One number of the last layer suffices; the selector works all the same."""
    addon = tiny_addon(from_bf16_file(torch.float32))
    other = from_bf16_file(torch.float32, change=0.5)
    with pytest.warns(UserWarning, match="the dsa add-on .* other weights of tiny"):
        addon.check_model(other)
    with pytest.warns(UserWarning, match="other weights"):
        assert select_with(addon, other).top_k == 8
    with pytest.warns(UserWarning, match="other weights"):
        metadata = {k: v for k, v in addon.metadata.items() if k != "weights_fingerprint"}
        dataclasses.replace(addon, metadata=metadata).check_model(from_bf16_file(torch.float32))


# -- chosen by name ---------------------------------------------------------------------------


def test_choice(tmp_path, model):
    assert Choice.of("quest") == Choice("quest", None)
    for selector in ("dsa", "dsa-shared"):
        choice = Choice.of(selector, tiny_addon_file(tmp_path, model, selector))
        assert choice.name == selector and choice.addon.selector == selector


def test_choices_that_are_none(tmp_path, model):
    path = tiny_addon_file(tmp_path, model)
    with pytest.raises(ValueError, match="--selector 'best' is not one of: quest, dsa, dsa-shared"):
        Choice.of("best", path)
    with pytest.raises(ValueError, match=f"--selector-weights {path}: quest has none"):
        Choice.of("quest", path)
    message = f"--selector-weights {path} is an add-on for --selector dsa, not for dsa-shared"
    with pytest.raises(ValueError, match=message):
        Choice.of("dsa-shared", path)
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file"):
        Choice.of("dsa", tmp_path / "nowhere")


def test_the_header_is_strings_alone(path):
    """What any reader of safetensors can show: JSON where it is not plain text."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["format"] == "minihisparse-addon-1" and header["selector"] == "dsa"
    assert json.loads(header["anchors"]) == [0, 1, 2]
    assert json.loads(header["settings"])["index_head_dim"] == 16


# ---- what is shipped ----

MOST_BYTES = {"dsa": 12e6, "dsa-shared": 6e6, "nsa": 6e6}
# Blocks that attention asks for change more often than those that look alike on average.
FAILED = {"nsa": ["LRU miss rate at 2K"]}


@pytest.mark.parametrize("selector", MOST_BYTES)
def test_shipped(selector):
    """The files are those that were measured, and passed all gates but those that are named."""
    path = SHIPPED / f"smollm2-135m-{selector}.safetensors"
    assert path.stat().st_size <= MOST_BYTES[selector]
    addon = read_addon(path)
    assert addon.selector == selector and addon.metadata["licence"] == "Apache-2.0"
    scores = json.loads(addon.metadata["scores"])
    assert (scores["num_positions"], addon.settings["top_k"]) == (8192, 256)
    failed = [gate["name"] for gate in scores["gates"] if not gate["passed"]]
    assert len(scores["gates"]) >= 5 and failed == FAILED.get(selector, [])
    assert addon.anchors == tuple(range(0, 30, 2 if selector == "dsa-shared" else 1))


def test_the_card_is_that_of_the_files():
    assert (SHIPPED / "README.md").read_text(encoding="utf-8") == card(SHIPPED)
