"""SGLang's flags for a B: the pools by hand, and a line that a shell gives back whole.

Guards: a host pool that is too small for its requests, or sized from a device pool that nobody
limits; a device pool that no prompt fits into; a buffer of half a page; flags that a shell takes
apart; a line that SGLang refuses.
"""

import json
import shlex

import pytest

from minihisparse.sglang import SGLangFlags

FLAGS = SGLangFlags(top_k=2048, device_buffer_size=4096, max_model_len=100_000, num_requests=64)


def test_pools_by_hand():
    """64 buffers of 4,096 tokens and a page; 64 requests of 1,563 pages, 100,032 tokens."""
    assert FLAGS.max_total_tokens == 64 * (4096 + 64)
    assert FLAGS.host_to_device_ratio == 25 == -(-64 * 100_032 // (64 * 4160))
    assert FLAGS.host_bytes(78, 1152) == (64 * 4160 * 25 + 64) * 78 * 1152
    assert FLAGS.hisparse_config == {
        "top_k": 2048,
        "device_buffer_size": 4096,
        "host_to_device_ratio": 25,
    }


def test_few_requests_have_a_device_pool_for_one_prompt():
    """Two buffers are 8,320 tokens; a prompt is prefilled in the device pool."""
    two = SGLangFlags(2048, 4096, 100_000, 2)
    assert two.max_total_tokens == 100_032 and two.host_to_device_ratio == 2
    one = SGLangFlags(2048, 4096, 3000, 1)
    assert one.max_total_tokens == 4160 and one.host_to_device_ratio == 1


@pytest.mark.parametrize("length", [1, 64, 4095, 4096, 4097, 8192, 200_001])
@pytest.mark.parametrize("requests", [1, 3, 100])
@pytest.mark.parametrize("size", [2048, 2049, 6144])
def test_the_pools_hold_all_requests(length, requests, size):
    flags = SGLangFlags(2048, size, length, requests)
    buffer = flags.hisparse_config["device_buffer_size"]
    assert buffer % 64 == 0 and size <= buffer < size + 64
    assert flags.max_total_tokens % 64 == 0
    assert flags.max_total_tokens >= max(requests * (buffer + 64), length)
    pages = -(-length // 64)
    ratio = flags.host_to_device_ratio
    assert ratio >= 1 and flags.max_total_tokens * ratio >= requests * pages * 64
    assert flags.max_total_tokens * (ratio - 1) < requests * pages * 64  # no larger than needed


def test_the_largest_buffer_is_whole_pages_too():
    assert SGLangFlags(2048, 32_767, 10, 1).hisparse_config["device_buffer_size"] == 32_704


def test_a_shell_gives_the_json_back():
    line = FLAGS.launch_line("some folder/GLM")
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    values = {a: b for a, b in zip(words, words[1:], strict=False) if a.startswith("--")}
    assert values["--model-path"] == "some folder/GLM"
    assert json.loads(values["--hisparse-config"]) == FLAGS.hisparse_config
    assert values["--max-running-requests"] == "64"
    assert values["--context-length"] == "100000"
    assert values["--max-total-tokens"] == str(64 * 4160)
    assert {"--enable-hisparse", "--disable-radix-cache"} <= set(words)
    assert FLAGS.config_flag() in line


def test_the_report_has_the_flags():
    assert json.loads(json.dumps(FLAGS.report())) == {
        "hisparse_config": FLAGS.hisparse_config,
        "max_running_requests": 64,
        "context_length": 100_000,
        "max_total_tokens": 64 * 4160,
    }
