"""What the commands of distil.py do: prepare, train, evaluate, card.

Each takes the parsed arguments, says on stderr what it is doing and how long it took, and returns
what is printed as JSON at the end.
This file knows files and their headers; training is in distil_train.py with distil_dsa.py or
distil_nsa.py, measuring in distil_evaluate.py, text in distil_text.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from minihisparse.addon import SIZES, Addon, fingerprint, read_addon, write_addon
from minihisparse.config import choose_device
from minihisparse.model import Decoder
from minihisparse.tokenizer import Tokenizer
from minihisparse.trace import Trace, write_trace
from minihisparse.weights_scripts import distil_evaluate as evaluation
from minihisparse.weights_scripts import distil_report as report
from minihisparse.weights_scripts.distil_dsa import DsaStudent
from minihisparse.weights_scripts.distil_sequences import make_sequences
from minihisparse.weights_scripts.distil_text import prepare, read_text
from minihisparse.weights_scripts.distil_train import TrainSettings, train

SELECTORS = ("dsa", "dsa-shared", "nsa")
LICENCE = "Apache-2.0"


def make_student(
    selector: str, model: Decoder, max_tokens: int, seed: int, **changes: float
) -> nn.Module:
    """An untrained selector for a model. changes: of its settings."""
    num_layers = model.config.num_hidden_layers
    if selector in ("dsa", "dsa-shared"):
        anchors = tuple(range(0, num_layers, 1 if selector == "dsa" else 2))
        return DsaStudent(model.config, anchors, max_tokens, seed, model.device, **changes)
    if selector == "nsa":
        from minihisparse.weights_scripts.distil_nsa import NsaStudent

        return NsaStudent(model.config, max_tokens, seed, model.device, **changes)
    raise ValueError(f"--selector {selector!r} is not one of: {', '.join(SELECTORS)}")


def make_addon(
    selector: str, student: nn.Module, model: Decoder, name: str, training: dict[str, object]
) -> Addon:
    """The trained student as an add-on without scores. name: the model's; training: how it was."""
    config = model.config
    metadata = {key: json.dumps(getattr(config, key)) for key in SIZES}
    metadata |= {
        "model": name,
        "weights_fingerprint": fingerprint(model),
        "scores": json.dumps({}),
        "training": json.dumps(training),
        "licence": LICENCE,
        "created": date.today().isoformat(),
    }
    tensors = student.export()
    return Addon(selector, dict(student.settings), tuple(student.anchors), tensors, metadata)


def replace_addon(path: Path, addon: Addon) -> None:
    """Writes an add-on's file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        write_addon(part, addon)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# ---- commands ----


def run_prepare(args: argparse.Namespace) -> dict[str, object]:
    header = prepare(
        args.out,
        args.model,
        cache=args.cache,
        npm_registry=args.npm_registry,
        debian_mirror=args.debian_mirror,
    )
    tokens = {
        use: sum(source["tokens"] for source in header["sources"] if source["use"] == use)
        for use in ("train", "heldout")
    }
    return {"command": "prepare", "text": str(args.out), "tokens": tokens}


def run_train(args: argparse.Namespace) -> dict[str, object]:
    say = _stopwatch()
    names = ("seconds", "max_steps", "seq_len", "rows", "learning_rate", "seed")
    settings = TrainSettings(**{name: getattr(args, name) for name in names})
    if args.resume and args.checkpoint is None:
        raise ValueError("--resume needs --checkpoint FILE")
    if not args.out.parent.is_dir():  # said before the work is done in vain
        raise FileNotFoundError(f"--out {args.out}: there is no folder {args.out.parent}")
    text = read_text(args.text, args.model)
    say(f"{len(text.train):,} tokens of text")
    model = _load_model(args, settings.seq_len, say)
    student = make_student(args.selector, model, settings.seq_len, settings.seed)
    text_sha256 = hashlib.sha256(text.train.tobytes()).hexdigest()
    identity = {
        "selector": args.selector,
        "settings": student.settings,
        "text": text_sha256,
        "model": fingerprint(model),
        "dtype": str(model.dtype),
    }
    result = train(
        model,
        student,
        text.train,
        settings,
        checkpoint=args.checkpoint,
        resume=args.resume,
        identity=identity,
    )
    say(f"{result.steps} steps in {result.seconds:.0f} s, loss {result.losses[-1:]}")
    every = max(1, len(result.losses) // 20)
    summary = {
        "command": "train",
        "selector": args.selector,
        "device": device_name(model.device),
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "finished": result.finished,
        "losses": [(step, round(loss, 5)) for step, loss in result.losses[every - 1 :: every]],
    }
    if model.device.type == "cuda":
        summary["device_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if not result.finished:
        say("the time of this call is up: go on with --resume")
        return summary
    training = {key: summary[key] for key in ("steps", "seconds", "device", "losses")}
    training |= {key: getattr(settings, key) for key in ("seq_len", "rows", "seed")}
    training |= {"text_sha256": text_sha256, "text_tokens": len(text.train)}
    kept = ("name", "package", "version", "licence", "tokens")
    training["sources"] = [
        {key: source[key] for key in kept}
        for source in text.header["sources"]
        if source["use"] == "train"
    ]
    replace_addon(args.out, make_addon(args.selector, student, model, args.model_name, training))
    summary |= {"addon": str(args.out), "bytes": args.out.stat().st_size}
    say(f"wrote {args.out}, {summary['bytes']:,} bytes")
    return summary


def run_evaluate(args: argparse.Namespace) -> dict[str, object]:
    say = _stopwatch()
    addon = read_addon(args.addon)
    settings = evaluation.EvaluateSettings(args.decode_tokens, args.free_tokens, args.warm_up)
    texts = make_sequences(
        read_text(args.text, args.model).heldout,
        Tokenizer.from_folder(args.model),
        length=args.seq_len,
        num_decode=settings.num_decode,
        num_natural=args.natural,
        num_copy=args.copies,
        num_needles=args.needles,
        num_free=settings.num_free,
        num_free_prompts=args.free_prompts,
    )
    say(f"{', '.join(f'{len(part)} {kind}' for kind, part in texts._asdict().items())}")
    model = _load_model(args, args.seq_len, say)
    addon.check_model(model)
    stage_of_bar = None
    with tqdm(total=evaluation.num_passes(texts, settings), desc="evaluate") as bar:

        def progress(stage: str) -> None:
            nonlocal stage_of_bar
            bar.update()
            if stage != stage_of_bar:
                say(f"first of stage {stage}")
                bar.set_description(f"evaluate: {stage}")
                stage_of_bar = stage

        columns, trace = evaluation.evaluate(model, addon, texts, settings, progress)
    say("measured")
    gates = report.gates(addon.selector, columns)
    scores = {
        "num_positions": args.seq_len,
        "num_decode": settings.num_decode,
        "num_natural": len(texts.natural),
        "num_copy": len(texts.copy),
        "num_needles": len(texts.needles),
        "num_free": settings.num_free,
        "num_free_prompts": len(texts.free),
        "warm_up": settings.warm_up,
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "date": date.today().isoformat(),
        "columns": {
            name: {key: round(value, 5) for key, value in measures.items()}
            for name, measures in columns.items()
        },
        "gates": [gate._asdict() for gate in gates],
    }
    print(report.table(columns))
    print(report.gate_lines(gates))
    metadata = dict(addon.metadata) | {"scores": json.dumps(scores)}
    replace_addon(args.addon, replace(addon, metadata=metadata))
    args.addon.with_suffix(".json").write_text(json.dumps(scores, indent=1) + "\n")
    if args.trace:
        about = {"model": addon.metadata["model"], "selector": addon.selector}
        about["settings"] = json.dumps(addon.settings)
        first = Trace(trace.positions[:, :, :1], trace.seq_lens[:, :1], about)
        write_trace(args.trace, first)
    passed = all(gate.passed for gate in gates)
    say(f"wrote the scores into {args.addon}")
    return {"command": "evaluate", "addon": str(args.addon), "passed": passed} | scores


def run_card(args: argparse.Namespace) -> dict[str, object]:
    path = args.folder / "README.md"
    path.write_text(report.card(args.folder), encoding="utf-8")
    return {"command": "card", "card": str(path)}


# ---- what they share ----


def _load_model(args: argparse.Namespace, max_tokens: int, say: Callable[[str], None]) -> Decoder:
    device, dtype, reason = choose_device(args.device, args.dtype)
    say(reason)
    model = Decoder.from_folder(
        args.model, device=device, dtype=dtype, max_model_len=max_tokens, progress=False
    )
    say(f"loaded {args.model}")
    return model


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _stopwatch() -> Callable[[str], None]:
    """A function that prints a line on stderr with the seconds since now."""
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", file=sys.stderr, flush=True)

    return say
