"""The weights of a Hugging Face folder: complete, or an error before any of them is read.

`*.safetensors` in one file, or shards with an index. All headers are read first and compared with
what the model expects; a model with a random layer in it is never returned.

Upstream names: those of the safetensors index (`weight_map`).
Invariants: every tensor that is returned was expected, has its shape, and owns its memory.
Cost: one copy of the weights on `device`, beside the tensor being read.
Does not know: what the tensors are for (model.py), except that a head may be tied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from minihisparse.model_config import find_folder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")  # others need scales, which we would not apply


def load_weights(
    folder: str | Path,
    expected: dict[str, tuple[int, ...]],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = True,
) -> dict[str, Tensor]:
    """Read the tensors named in `expected` (name -> shape), as `dtype`, onto `device`.

    A head that is not expected (tied) may be in the files if it equals the embedding.

    Raises FileNotFoundError: no folder, no weights in it, or shards that are missing. ValueError:
    tensors missing, superfluous, of another shape or type; a file that is damaged; a tied head that
    differs. The message lists names. No weight has been read then, but for that last check.
    """
    folder = find_folder(folder)
    files = _locate(folder)
    shapes = _read_headers(files)
    check_weights(expected, shapes, source=str(folder))

    weights = {}
    names = [name for name in files if name in expected or name == HEAD]
    for name in tqdm(names, desc="weights", unit="tensor", disable=not progress):
        with safe_open(files[name], framework="pt") as file:
            # Without copy=True the tensor may stay a view of the mapped file.
            weights[name] = file.get_tensor(name).to(device, dtype, copy=True)
    if HEAD not in expected:
        drop_tied_head(weights, source=str(folder))
    return weights


def check_weights(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], *, source: str
) -> None:
    """Compare names and shapes. Raises ValueError that starts with `source` and lists the tensors.

    Not counted as superfluous: a tied head, and `rotary_emb.inv_freq`, which old files carry and
    config.json determines.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        hint = ""
        if HEAD in missing:
            hint = (
                f" ({HEAD} may only be absent if config.json has tie_word_embeddings true, "
                f"and it does not)"
            )
        raise ValueError(f"{source}: missing tensors: {_listed(missing)}{hint}")
    superfluous = [
        name
        for name in found
        if name not in expected and name != HEAD and not name.endswith(".rotary_emb.inv_freq")
    ]
    if superfluous:
        raise ValueError(
            f"{source}: tensors that a model of this config.json does not have: "
            f"{_listed(superfluous)}"
        )
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{source}: wrong shapes: {_listed(wrong)}")


def drop_tied_head(weights: dict[str, Tensor], *, source: str) -> None:
    """Remove the head of a tied model from `weights`. Raises ValueError if it differs."""
    head = weights.pop(HEAD, None)
    if head is not None and not torch.equal(head, weights[EMBEDDING]):
        raise ValueError(
            f"{source}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; "
            f"if the model has a head of its own, set tie_word_embeddings to false in config.json"
        )


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. An index wins over a model.safetensors beside it."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: folder / shard for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index: {error!r}") from None
        absent = sorted({file.name for file in files.values() if not file.exists()})
        if absent:
            raise FileNotFoundError(
                f"{index} names files that are not there: {_listed(absent)}; download them again"
            )
        return files
    single = folder / SINGLE_FILE
    if single.exists():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise FileNotFoundError(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    message = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if any(folder.glob("*.gguf")):
        return f"{message}, only GGUF; use the model's safetensors folder"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{message}, only pickled weights; convert them: transformers' "
            f"from_pretrained(DIR) and then save_pretrained(NEW_DIR) writes safetensors"
        )
    if any(folder.glob("*.safetensors")):
        return f"{message}; shards cannot be read without their index: download it too"
    return f"{message}; was the download complete?"


def _read_headers(files: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, from the headers alone."""
    shapes = {}
    for path in dict.fromkeys(files.values()):
        with _open(path) as file:
            present = set(file.keys())
            for name in (name for name, where in files.items() if where == path):
                if name not in present:
                    raise ValueError(f"{path}: {name} is not in it, though {INDEX_FILE} says so")
                header = file.get_slice(name)
                if header.get_dtype() not in _READABLE_DTYPES:
                    raise ValueError(
                        f"{path}: {name} is {header.get_dtype()}, supported: "
                        f"{', '.join(_READABLE_DTYPES)}; use the unquantised model"
                    )
                shapes[name] = tuple(header.get_shape())
    return shapes


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file ({error}); download it again"
        ) from None


def _listed(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
