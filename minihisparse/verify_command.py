"""`verify`: both caches over the same prompts, and whether all that they compute is equal.

`demo` shows the same comparison to people, so what it needs as well is public here: from flags to a
Lockstep, and from a Lockstep to a report. It deliberately does not know how caches are compared:
that is `verify.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial

from tqdm import tqdm

from minihisparse.assembly import make_runner
from minihisparse.command_inputs import (
    encode_prompts,
    load_model,
    read_prompts,
    runner_max_model_len,
)
from minihisparse.model import Decoder
from minihisparse.stats import report_run
from minihisparse.synthetic import fill
from minihisparse.verify import Lockstep


def verify(args: argparse.Namespace, report: dict) -> int:
    """Runs both caches in lockstep and compares everything that they compute."""
    texts, longest = [], None
    if args.synthetic_context is None:
        texts = read_prompts(args)
    elif args.prompt or args.prompt_file or args.prompt_tokens or args.synthetic_context < 1:
        raise ValueError("--synthetic-context takes a number above 0, and no prompt beside it")
    else:
        longest = args.synthetic_context + args.max_new_tokens
    model, tokenizer = load_model(args, report, longest)
    prompts = encode_prompts(args, tokenizer, texts) or [[0] * args.synthetic_context]
    lockstep = make_lockstep(args, model, prompts, check_integrity=args.check_integrity)
    if args.synthetic_context is not None:
        for runner in lockstep.runners.values():
            runner.prefill = partial(fill, runner)
    broken = None
    try:
        with tqdm(total=args.max_new_tokens, unit="step", disable=args.disable_tqdm) as bar:
            for _ in lockstep.run(prompts, args.max_new_tokens):
                bar.update()
    except AssertionError as error:  # what was compared before counts all the same
        broken = str(error)
        print(f"error: {broken}", file=sys.stderr)
    finally:
        report_lockstep(report, lockstep, prompts)
    if broken:
        report["exact"], report["error"] = False, broken
    if report["exact"]:
        print(f"exact: {len(prompts)} requests, {lockstep.num_steps} decode steps, all bits equal")
        return 0
    if lockstep.exact:
        print(f"NOT exact; all bits were equal, but the cache is broken: {broken}")
    else:
        print(f"NOT exact; the first difference is in {lockstep.first_difference}")
    return 1


def make_lockstep(
    args: argparse.Namespace, model: Decoder, prompts: list[list[int]], check_integrity: bool
) -> Lockstep:
    """A runner per cache, of one model, with rows and tokens for these prompts and their answers.

    Raises ValueError that names the flag if they are too long.
    """
    max_model_len = runner_max_model_len(args, model, max(map(len, prompts)))
    runners = [
        make_runner(
            model,
            cache=cache,
            selector=args.selector,
            selector_weights=args.selector_weights,
            hisparse=args.hisparse,
            max_model_len=max_model_len,
            max_running_requests=len(prompts),
        )
        for cache in ("full", "hisparse")
    ]
    return Lockstep(
        *runners,
        check_integrity=check_integrity,
        enforce_eager=args.enforce_eager,
        enable_prefix_sharing=not getattr(args, "disable_prefix_sharing", False),
        use_tqdm=not args.disable_tqdm,
    )


def report_lockstep(report: dict, lockstep: Lockstep, prompts: Sequence[Sequence[int]]) -> None:
    """exact, max_abs_diff, and the costs of hisparse, for these prompts. After Ctrl-C: so far."""
    compared = bool(lockstep.tokens) or not lockstep.exact
    diff = lockstep.max_abs_diff
    report["exact"] = lockstep.exact if compared else None  # nothing compared: not exact either
    report["max_abs_diff"] = diff if compared and math.isfinite(diff) else None  # JSON has no inf
    lengths = [len(p) + len(t) for p, t in zip(prompts, lockstep.tokens, strict=False)]
    name = "hisparse"
    timings, workspace = lockstep.timings[name], lockstep.workspaces[name]
    report_run(report, lockstep.runners[name], timings, workspace, lengths)
