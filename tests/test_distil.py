"""distil: the command line, from a file of tokens to an add-on with scores and a card.

Guards: an hour's training lost because the output folder is missing; an add-on that the engine
cannot load; scores that end up in another file, or half a file; errors without a flag's name.
"""

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from minihisparse.addon import read_addon
from minihisparse.weights_scripts import distil_commands
from minihisparse.weights_scripts.distil import main
from minihisparse.weights_scripts.distil_text import FORMAT

TRAIN = ["--device", "cpu", "--seq-len", "96", "--rows", "16", "--model-name", "tiny"]


@pytest.fixture(scope="module")
def text(tiny_folder, tmp_path_factory):
    """A file of tokens, made up, as `prepare` writes them for the tiny folder's tokenizer."""
    rng = np.random.default_rng(0)
    ids = {"train": rng.integers(3, 270, 5000).astype(np.uint16)}
    sources = [{"name": "noise", "use": "train", "package": "pypi:noise", "version": "1"}]
    for name in ("a", "b", "c", "d", "e"):
        ids[f"heldout.{name}"] = rng.integers(3, 270, 3000).astype(np.uint16)
        sources.append({"name": name, "use": "heldout", "package": "npm:x", "version": "2"})
    for source in sources:
        source |= {"licence": "public domain", "tokens": 5000, "sha256": "0" * 64}
    header = {
        "format": FORMAT,
        "sources": json.dumps(sources),
        "tokenizer": hashlib.sha256((tiny_folder / "tokenizer.json").read_bytes()).hexdigest(),
        "versions": "{}",
    }
    path = tmp_path_factory.mktemp("text") / "text.safetensors"
    save_file(ids, path, header)
    return path


@pytest.fixture
def run(tiny_folder, text, capsys):
    """run(command, *arguments) -> exit code, the JSON of the last line of stdout, stderr."""

    def run(command: str, *arguments: object):
        files = [] if command == "card" else ["--model", tiny_folder, "--text", text]
        code = main([command, *map(str, files), *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else None, err

    return run


@pytest.fixture
def small(monkeypatch):
    """Indexers that fit the tiny model."""
    from minihisparse.weights_scripts import distil_dsa

    changes = {"index_head_dim": 16, "rope_dim": 8, "num_recent": 8, "top_k": 32}
    monkeypatch.setattr(distil_dsa, "SETTINGS", distil_dsa.SETTINGS | changes)


@pytest.mark.parametrize(("selector", "anchors"), [("dsa", (0, 1)), ("dsa-shared", (0,))])
def test_train_writes_an_addon(run, small, tmp_path, selector, anchors):
    out = tmp_path / "addon.safetensors"
    code, report, err = run(
        "train", "--selector", selector, "--out", out, "--max-steps", 25, *TRAIN
    )
    assert code == 0 and report["steps"] == 25 and report["finished"]
    assert report["addon"] == str(out) and report["bytes"] == out.stat().st_size
    addon = read_addon(out)
    assert addon.selector == selector and addon.anchors == anchors
    assert addon.settings["top_k"] == 32 and len(addon.tensors) == 5 * len(anchors)
    training = json.loads(addon.metadata["training"])
    assert training["steps"] == 25 and training["seed"] == 0
    assert [source["name"] for source in training["sources"]] == ["noise"]
    assert addon.metadata["model"] == "tiny" and addon.metadata["licence"] == "Apache-2.0"
    assert "wrote" in err and [p.name for p in tmp_path.iterdir()] == ["addon.safetensors"]


def test_train_in_two_calls(run, small, tmp_path):
    out, checkpoint = tmp_path / "addon", tmp_path / "checkpoint"
    arguments = ["--selector", "dsa", "--out", out, "--checkpoint", checkpoint, "--max-steps", 12]
    code, report, err = run("train", *arguments, "--seconds", 0, *TRAIN)
    assert code == 0 and not report["finished"] and not out.exists()
    assert "--resume" in err
    code, report, _ = run("train", *arguments, "--resume", *TRAIN)
    assert code == 0 and report["finished"] and report["steps"] == 12 and out.exists()
    code, _, err = run("train", *arguments, "--resume", *TRAIN, "--seed", 3)
    assert code == 1 and "seed=0, now it is 3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/nowhere/addon"], "--out /nowhere/addon: there is no folder"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--seq-len", "6000"], "--seq-len"),
        (["--rows", "96"], "--rows 96"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_train_refuses(run, small, tmp_path, arguments, message):
    arguments = ["--selector", "dsa", "--out", tmp_path / "a", "--max-steps", 1, *TRAIN, *arguments]
    code, _, err = run("train", *arguments)
    assert code == 1 and message in err.splitlines()[-1]


def test_a_file_that_is_no_text_is_refused(run, tmp_path):
    save_file({"train": np.zeros(9, np.uint16)}, tmp_path / "text", {"format": "pt"})
    arguments = ["--selector", "dsa", "--out", tmp_path / "a", "--text", tmp_path / "text"]
    code, _, err = run("train", *arguments)
    assert code == 1 and "distil prepare" in err


def test_evaluate_and_card(run, small, tmp_path):
    out, trace = tmp_path / "addon.safetensors", tmp_path / "trace"
    run("train", "--selector", "dsa", "--out", out, "--max-steps", 2, *TRAIN)
    weights = read_addon(out).tensors
    arguments = ["--device", "cpu", "--seq-len", 400, "--decode-tokens", 64]
    arguments += ["--free-tokens", 4, "--warm-up", 4, "--trace", trace]
    code, report, err = run("evaluate", out, *arguments)
    assert code == 0 and report["passed"] is False  # it has learnt nothing
    assert report["columns"]["addon"]["ppl"] > 1
    addon = read_addon(out)
    assert {name: t.sum() for name, t in addon.tensors.items()} == {
        name: t.sum() for name, t in weights.items()
    }
    scores = json.loads(addon.metadata["scores"])
    assert scores == json.loads((tmp_path / "addon.json").read_text())
    assert scores["columns"] == report["columns"] and scores["num_natural"] == 10
    assert json.loads(addon.metadata["training"])["steps"] == 2
    with safe_open(trace, "np") as file:
        assert file.get_slice("positions").get_shape() == [64, 2, 1, 32]
    assert "natural" in err and "replay" in err

    code, report, _ = run("card", tmp_path)
    assert code == 0 and "addon.safetensors" in (tmp_path / "README.md").read_text()


def test_evaluate_keeps_the_addon_if_writing_fails(run, small, tmp_path, monkeypatch):
    out = tmp_path / "addon.safetensors"
    run("train", "--selector", "dsa", "--out", out, "--max-steps", 1, *TRAIN)
    before = out.read_bytes()

    def fail(path, addon):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(distil_commands, "write_addon", fail)
    with pytest.raises(OSError, match="disk full"):
        distil_commands.replace_addon(out, read_addon(out))
    assert out.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [out.name]
