"""Guards: settings that are wrong but accepted, errors that name no flag or the wrong one, a cache
that takes more memory than was given, and a dtype that the device does not have.
"""

import json
import re
from dataclasses import FrozenInstanceError

import pytest
import torch

from minihisparse.config import (
    DTYPES,
    MAX_DEVICE_BUFFER_SIZE,
    HiSparseConfig,
    choose_device,
    parse_device_buffer_size,
    sizes_of_layers,
)

# -- HiSparseConfig ---------------------------------------------------------------------------


def test_defaults():
    """B = 2K, the paper's default, also when only K is given."""
    config = HiSparseConfig()
    assert (config.top_k, config.device_buffer_size, config.page_size) == (256, 512, 16)
    assert config.cache_size_mb is None and config.host_to_device_ratio is None
    assert HiSparseConfig(top_k=48).device_buffer_size == 96
    assert HiSparseConfig(top_k=48) == HiSparseConfig(top_k=48, device_buffer_size=96)


def test_frozen():
    with pytest.raises(FrozenInstanceError):
        HiSparseConfig().top_k = 3
    with pytest.raises(TypeError, match="topk"):
        HiSparseConfig(topk=3)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "page_size": 1, "device_buffer_size": 1},
        {"top_k": 16, "device_buffer_size": 16},
        {"top_k": 16, "device_buffer_size": MAX_DEVICE_BUFFER_SIZE},
        {"top_k": MAX_DEVICE_BUFFER_SIZE, "device_buffer_size": MAX_DEVICE_BUFFER_SIZE,
         "page_size": 1},
        {"cache_size_mb": 1e-3},
        {"cache_size_mb": 3, "host_to_device_ratio": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_values_at_their_limits(options):
    config = HiSparseConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize("value", [32, 96, 1024, None])
def test_swap_in_block_size(value):
    assert HiSparseConfig(swap_in_block_size=value).swap_in_block_size == value


@pytest.mark.parametrize("value", [0, 16, 33, 1056, 2048, -32, 64.0, True, "64"], ids=repr)
def test_swap_in_block_size_must_be_whole_warps(value):
    expected = f"swap_in_block_size: got {value!r}, expected a multiple of 32 in 32..1024"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        HiSparseConfig(swap_in_block_size=value)


def test_swap_in_block_size_must_be_enough_for_top_k():
    """The kernel keeps a bit for each of a thread's positions."""
    assert HiSparseConfig(top_k=2048, swap_in_block_size=32).swap_in_block_size == 32
    expected = "swap_in_block_size=32: .* top_k=2064 needs more threads; raise --swap-in-block-size"
    with pytest.raises(ValueError, match=expected):
        HiSparseConfig(top_k=2064, swap_in_block_size=32)


NOT_POSITIVE_INTEGERS = [0, -1, 1.5, 16.0, True, "16", None]
NOT_POSITIVE_NUMBERS = [0, -1.0, True, "3", float("inf"), float("nan")]


@pytest.mark.parametrize("name", ["top_k", "page_size"])
@pytest.mark.parametrize("value", NOT_POSITIVE_INTEGERS, ids=repr)
def test_counts_must_be_positive_integers(name, value):
    expected = re.escape(f"{name}: got {value!r}, expected an integer >= 1")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        HiSparseConfig(**{name: value})


@pytest.mark.parametrize("name", ["cache_size_mb", "host_to_device_ratio"])
@pytest.mark.parametrize("value", NOT_POSITIVE_NUMBERS, ids=repr)
def test_sizes_must_be_positive_numbers(name, value):
    expected = re.escape(f"{name}: got {value!r}, expected a number > 0")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        HiSparseConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 512.0, True, "512"], ids=repr)
def test_device_buffer_size_must_be_a_positive_integer(value):
    with pytest.raises(
        ValueError, match=re.escape(f"device_buffer_size={value!r} must be an integer in 1..")
    ):
        HiSparseConfig(device_buffer_size=value)


@pytest.mark.parametrize("top_k, page_size", [(250, 16), (8, 16), (16, 3)])
def test_top_k_must_be_whole_pages(top_k, page_size):
    message = f"top_k={top_k} is not a multiple of page_size={page_size}.*--top-k or --page-size"
    with pytest.raises(ValueError, match=message):
        HiSparseConfig(top_k=top_k, page_size=page_size)


@pytest.mark.parametrize("top_k, size", [(256, 255), (256, 1), (32, 31)])
def test_one_step_must_fit_into_the_slots(top_k, size):
    message = (
        f"top_k={top_k} > device_buffer_size={size}: .*raise --device-buffer-size or lower --top-k"
    )
    with pytest.raises(ValueError, match=message):
        HiSparseConfig(top_k=top_k, device_buffer_size=size)


@pytest.mark.parametrize(
    "options, size",
    [({"device_buffer_size": 32_768}, 32_768), ({"top_k": 16_384}, 32_768)],
    ids=["given", "2K"],
)
def test_more_slots_than_int16_can_name(options, size):
    message = (
        f"device_buffer_size={size} must be an integer in 1..32767 .*"
        "change --device-buffer-size, or lower --top-k"
    )
    with pytest.raises(ValueError, match=message):
        HiSparseConfig(**options)


def test_the_largest_buffer_fits_into_lru_slots():
    assert MAX_DEVICE_BUFFER_SIZE == torch.iinfo(torch.int16).max


def test_two_sizes_of_one_buffer():
    with pytest.raises(ValueError, match="device_buffer_size=512 and cache_size_mb=8, .*one of"):
        HiSparseConfig(device_buffer_size=512, cache_size_mb=8)


# -- a B per layer ----------------------------------------------------------------------------


def test_a_buffer_size_per_layer():
    """K and the most that int16 can name are both allowed; a list becomes a tuple."""
    config = HiSparseConfig(top_k=32, device_buffer_size=[32, MAX_DEVICE_BUFFER_SIZE, 77])
    assert config.device_buffer_size == (32, MAX_DEVICE_BUFFER_SIZE, 77)
    assert config.device_buffer_sizes_for(3, 999) == config.device_buffer_size
    assert config == HiSparseConfig(top_k=32, device_buffer_size=config.device_buffer_size)
    assert hash(config) == hash(HiSparseConfig(top_k=32, device_buffer_size=[32, 32_767, 77]))
    again = HiSparseConfig.from_json('{"top_k": 32, "device_buffer_size": [32, 32767, 77]}')
    assert again == config
    assert HiSparseConfig.from_json(json.dumps(vars(config))) == config


@pytest.mark.parametrize(
    "sizes, message",
    [
        ([512, 255], "top_k=256 > device_buffer_size=255 of layer 1: .*--device-buffer-size"),
        ([32_768, 512], "device_buffer_size=32768 of layer 0 must be an integer in 1..32767"),
        ([512, 0], "device_buffer_size=0 of layer 1 must be"),
        ([512, "512"], "device_buffer_size='512' of layer 1 must be"),
        ([512, None], "device_buffer_size=None of layer 1 must be"),
        ([512, 512.0], r"device_buffer_size=512\.0 of layer 1 must be"),
        ([512, True], "device_buffer_size=True of layer 1 must be"),
        ([], "--device-buffer-size is an empty list"),
        ("512,768", "device_buffer_size='512,768' must be an integer"),
    ],
    ids=str,
)
def test_wrong_sizes_name_the_layer(sizes, message):
    with pytest.raises(ValueError, match=message):
        HiSparseConfig(device_buffer_size=sizes)
    with pytest.raises(ValueError, match=message):
        HiSparseConfig.from_json(json.dumps({"device_buffer_size": sizes}))


def test_sizes_of_layers():
    assert sizes_of_layers(7, 3) == (7, 7, 7)
    assert sizes_of_layers([7], 1) == (7,)
    assert sizes_of_layers([7, 9], 2) == (7, 9)
    for sizes, layers in [([7], 3), ([7, 9, 8], 2)]:
        message = f"--device-buffer-size: got {len(sizes)} sizes for {layers} layers; give one, or"
        with pytest.raises(ValueError, match=message):
            sizes_of_layers(sizes, layers)
        config = HiSparseConfig(top_k=1, page_size=1, device_buffer_size=sizes)
        with pytest.raises(ValueError, match=message):
            config.device_buffer_sizes_for(layers, 4)


def test_a_buffer_size_and_a_cache_size():
    with pytest.raises(ValueError, match=r"device_buffer_size=\[512, 600\] and cache_size_mb=8"):
        HiSparseConfig(device_buffer_size=[512, 600], cache_size_mb=8)


@pytest.mark.parametrize("text, sizes", [("512", 512), ("512,768", (512, 768)), ("1, 2", (1, 2))])
def test_parse_device_buffer_size(text, sizes):
    assert parse_device_buffer_size(text) == sizes


@pytest.mark.parametrize("text", ["", "512,", ",512", "512;768", "1.5", "[512]", "512 768"])
def test_parse_device_buffer_size_refuses(text):
    message = re.escape(f"--device-buffer-size {text!r} is neither a number nor a list, like 512,7")
    with pytest.raises(ValueError, match=message):
        parse_device_buffer_size(text)


# -- cache_size_mb ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache_size_mb, num_layers, record_bytes, size",
    [
        (2, 2, 1024, 1023),  # 1,024 records per layer, one of them the newest token's
        (1, 3, 1024, 340),  # 341.3 records
        (1.5, 1, 4096, 383),
        (2 - 2**-20, 2, 1024, 1022),  # a byte short of 1,024
        (1, 1, 2**20 // 17, 16),  # exactly K + 1 records: as few as K = 16 can do with
        (10_000, 2, 64, 32_767),  # more than int16 can name
    ],
)
def test_cache_size_mb_gives_the_largest_buffer_that_fits(
    cache_size_mb, num_layers, record_bytes, size
):
    config = HiSparseConfig(top_k=16, cache_size_mb=cache_size_mb)
    assert config.device_buffer_size is None
    assert config.device_buffer_sizes_for(num_layers, record_bytes) == (size,) * num_layers
    per_slot = num_layers * record_bytes
    assert (size + 1) * per_slot <= cache_size_mb * 2**20
    assert size == 32_767 or (size + 2) * per_slot > cache_size_mb * 2**20


def test_device_buffer_sizes_for_without_cache_size():
    config = HiSparseConfig(top_k=32, device_buffer_size=77)
    assert config.device_buffer_sizes_for(9, 999) == (77,) * 9
    assert HiSparseConfig(top_k=32).device_buffer_sizes_for(9, 999) == (64,) * 9


@pytest.mark.parametrize("num_records", [16, 4, 2, 1, 0.5])
def test_a_cache_size_too_small_for_one_step(num_records):
    """K = 16 needs 17 records. Down to less than one: the flag to raise, and K to lower."""
    config = HiSparseConfig(top_k=16, cache_size_mb=1)
    with pytest.raises(ValueError) as error:
        config.device_buffer_sizes_for(1, int(2**20 / num_records))
    message = str(error.value)
    assert "top_k=16" in message and "lower --top-k" in message
    assert "raise --cache-size-mb (1)" in message


# -- JSON -------------------------------------------------------------------------------------


def test_from_json():
    values = {"top_k": 64, "device_buffer_size": 128, "host_to_device_ratio": 4, "page_size": 8}
    assert HiSparseConfig.from_json(json.dumps(values)) == HiSparseConfig(**values)
    assert HiSparseConfig.from_json("{}") == HiSparseConfig()
    assert HiSparseConfig.from_json('{"device_buffer_size": null}') == HiSparseConfig()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{top_k: 64}", r"--hisparse-config is not JSON: .*; got '\{top_k: 64\}'"),
        ("", "--hisparse-config is not JSON"),
        ("[64]", r"--hisparse-config must be a JSON object; got '\[64\]'"),
        ("null", "must be a JSON object"),
        ('{"topk": 64, "a": 1}', r"unknown keys \['a', 'topk'\]; known are \['top_k', 'device_b"),
        ('{"top_k": "64"}', "top_k: got '64', expected an integer >= 1"),
        ('{"top_k": 64, "device_buffer_size": 32}', "top_k=64 > device_buffer_size=32"),
    ],
)
def test_from_json_errors(text, message):
    with pytest.raises(ValueError, match=message):
        HiSparseConfig.from_json(text)


# -- choose_device ----------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that torch finds `count` GPUs of a compute capability; (None) for no GPU."""

    def pretend(capability: tuple[int, int] | None, count: int = 1) -> None:
        def get_device_capability(device=None):
            assert capability is not None, "asked a GPU that is not there"
            index = torch.device(device or "cuda").index or 0
            if index >= count:  # as torch does
                raise AssertionError("Invalid device id")
            return capability

        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count if capability else 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)

    return pretend


@pytest.mark.parametrize(
    "capability, device, dtype, reasons",
    [
        (None, "cpu", torch.float32, ("no CUDA device was found", "CPU")),
        ((7, 0), "cuda", torch.float16, ("a CUDA device was found", "below 8.0")),
        ((7, 5), "cuda", torch.float16, ("a CUDA device was found", "below 8.0")),
        ((8, 0), "cuda", torch.bfloat16, ("a CUDA device was found", "8.0 or later")),
        ((9, 0), "cuda", torch.bfloat16, ("a CUDA device was found", "8.0 or later")),
        ((12, 0), "cuda", torch.bfloat16, ("a CUDA device was found", "8.0 or later")),
    ],
)
def test_auto(gpu, capability, device, dtype, reasons):
    """What was picked and why, in one line."""
    gpu(capability)
    chosen, picked, line = choose_device()
    assert (chosen, picked) == (torch.device(device), dtype)
    assert line.startswith(f"device {device} (") and f"dtype {str(dtype)[6:]} (" in line
    assert all(reason in line for reason in reasons) and "\n" not in line


def test_cpu_as_asked_beside_a_gpu(gpu):
    gpu((7, 5))
    chosen, picked, line = choose_device("cpu")
    assert (chosen.type, picked) == ("cpu", torch.float32)
    assert "device cpu (as asked)" in line
    assert choose_device("cpu", "bf16")[1] == torch.bfloat16  # every CPU has it


def test_one_of_several_gpus(gpu):
    gpu((8, 6), count=2)
    assert choose_device("cuda:1")[:2] == (torch.device("cuda:1"), torch.bfloat16)
    assert choose_device("cuda")[:2] == (torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_as_asked(gpu, name):
    """Every name, on a CPU and on a GPU that has them all."""
    for capability in (None, (9, 0)):
        gpu(capability)
        _, picked, line = choose_device("auto", name)
        assert picked == DTYPES[name] and line.endswith("(as asked)")


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_bf16_on_a_gpu_that_lacks_it(gpu, device, name):
    gpu((7, 5))
    message = (
        f"^--dtype {name} needs compute capability 8.0, this GPU has 7.5; use --dtype fp16 or fp32$"
    )
    with pytest.raises(ValueError, match=message):
        choose_device(device, name)
    assert choose_device(device, "fp16")[1] == torch.float16
    assert choose_device(device, "fp32")[1] == torch.float32


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_no_gpu(gpu, device):
    gpu(None)
    message = f"^--device {device}: torch finds no CUDA device; use --device cpu$"
    with pytest.raises(ValueError, match=message):
        choose_device(device)


def test_a_gpu_that_is_not_there(gpu):
    """One of two is there, the third is not: an error that names the flag and the number."""
    gpu((9, 0), count=2)
    with pytest.raises(ValueError, match="--device cuda:2"):
        choose_device("cuda:2")


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "mps", "meta"])
def test_unknown_device(gpu, device):
    for capability in (None, (9, 0)):
        gpu(capability)
        with pytest.raises(ValueError, match=rf"^--device '{device}' is not auto, cpu or cuda"):
            choose_device(device)


@pytest.mark.parametrize("dtype", ["int8", "half", "", "torch.float16"])
def test_unknown_dtype(gpu, dtype):
    gpu(None)
    with pytest.raises(ValueError, match=f"^--dtype '{dtype}' is not one of auto, fp32, float32"):
        choose_device("auto", dtype)
