"""What commands read from their flags: prompts, sampling and the model.

Everything here takes the parsed flags and raises ValueError that names the flag. What a command
then does with it: `commands.py` and the files of other commands. It deliberately does not know
caches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from minihisparse.config import choose_device
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.sampling import SamplingParams
from minihisparse.stats import environment_report
from minihisparse.tokenizer import Tokenizer

# ---- prompts ----


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The texts of --prompt and --prompt-file, at least one."""
    prompts = list(args.prompt or [])
    if args.prompt_file:
        prompts.append(read_text(args.prompt_file))
    if not prompts:
        raise ValueError("no prompt; pass --prompt TEXT or --prompt-file FILE")
    return prompts


def read_text(file: str) -> str:
    """A whole file. Raises ValueError if it is not UTF-8, OSError if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None


def encode_prompts(
    args: argparse.Namespace, tokenizer: Tokenizer, texts: Sequence[str]
) -> list[list[int]]:
    """Their tokens, one request each; or one request for each length of --prompt-tokens."""
    prompts = [tokenizer.encode(text) for text in texts]
    return cut_prompts(prompts, args.prompt_tokens) if args.prompt_tokens else prompts


def cut_prompts(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """One prompt's tokens, cut to each of the lengths of --prompt-tokens."""
    if len(prompts) != 1:
        raise ValueError(f"--prompt-tokens cuts one prompt, but {len(prompts)} were given")
    if max(lengths) > len(prompts[0]):
        raise ValueError(
            f"--prompt-tokens {max(lengths)} is more than the prompt has, {len(prompts[0])}; "
            "pass a longer --prompt-file"
        )
    return [prompts[0][:length] for length in lengths]


def runner_max_model_len(args: argparse.Namespace, model: Decoder, longest: int) -> int:
    """Most tokens of a request: --max-model-len, or what a prompt of `longest` tokens needs.

    Raises ValueError if that prompt and its new tokens are more.
    """
    num_tokens = longest + args.max_new_tokens
    limit = model.max_model_len if args.max_model_len is None else args.max_model_len
    if num_tokens > limit >= 1:  # one below 1 is refused by the runner
        raise ValueError(
            f"{longest} prompt tokens and max_new_tokens={args.max_new_tokens} are {num_tokens} "
            f"in all, over the limit max_model_len={limit}; shorten the prompt, lower "
            "--max-new-tokens, or see --max-model-len and --allow-beyond-model-limit"
        )
    return max(num_tokens, 1) if args.max_model_len is None else limit


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """From the sampling flags; not every command has --stop."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=args.max_new_tokens,
        stop=getattr(args, "stop", []),
        ignore_eos=args.ignore_eos,
    )


# ---- the model ----


def load_model(
    args: argparse.Namespace, report: dict, longest: int | None = None
) -> tuple[Decoder, Tokenizer]:
    """The model of --model. longest: tokens of a request, without --max-model-len."""
    device, dtype = start_device(args, report)
    model = Decoder.from_folder(
        args.model,
        device=device,
        dtype=dtype,
        max_model_len=limit_beyond(args, ModelConfig.from_folder(args.model), longest),
        progress=not args.disable_tqdm,
    )
    return model, Tokenizer.from_folder(args.model, args.chat_template)


def random_model(args: argparse.Namespace, report: dict, longest: int) -> Decoder:
    """A model of the shape of --random-weights, and of --num-layers layers.

    longest: as for `load_model`.
    """
    device, dtype = start_device(args, report)
    config = ModelConfig.from_file(args.random_weights)
    if args.num_layers is not None:
        if not 1 <= args.num_layers <= config.num_hidden_layers:
            raise ValueError(
                f"--num-layers {args.num_layers} is not in 1..{config.num_hidden_layers}, which is "
                f"what {args.random_weights} has"
            )
        config = replace(config, num_hidden_layers=args.num_layers)
    return Decoder.random(
        config,
        seed=args.seed,
        device=device,
        dtype=dtype,
        max_model_len=limit_beyond(args, config, longest),
        drawn_on=device,
    )


def start_device(args: argparse.Namespace, report: dict) -> tuple[torch.device, torch.dtype]:
    """From --device and --dtype; says which, and starts the report."""
    device, dtype, reason = choose_device(args.device, args.dtype)
    print(f"minihisparse: {reason}", file=sys.stderr)
    report.update(environment_report(args.command, device, dtype, args.seed))
    return device, dtype


def limit_beyond(args: argparse.Namespace, config: ModelConfig, longest: int | None) -> int | None:
    """The model's new limit, if one beyond its own is allowed and needed; says so.

    longest: tokens of a request, where there is no --max-model-len.
    """
    limit = config.max_position_embeddings
    wanted = longest if args.max_model_len is None else args.max_model_len
    if not args.allow_beyond_model_limit:
        return None
    if wanted is None:
        raise ValueError("--allow-beyond-model-limit: say how far, with --max-model-len")
    if wanted <= limit:
        return None
    print(
        f"minihisparse: positions from {limit} on are beyond what the model was made for; "
        "expect nonsense there",
        file=sys.stderr,
    )
    return wanted
