"""`trace record`: generates, as `generate` does, and writes down what every step selected.

What people read goes to stderr. It deliberately does not know flags (`trace_flags.py`), nor how a
trace is written (`trace_recorder.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from minihisparse.assembly import make_runner
from minihisparse.command_inputs import (
    encode_prompts,
    load_model,
    read_prompts,
    runner_max_model_len,
    sampling_params,
)
from minihisparse.decode_step import DecodeStep
from minihisparse.request import Request
from minihisparse.sampling import make_generator
from minihisparse.scheduler import Scheduler
from minihisparse.stats import report_run
from minihisparse.trace import read_trace
from minihisparse.trace_recorder import TraceRecorder
from minihisparse.trace_report import report_trace, say


def record(args: argparse.Namespace, report: dict) -> int:
    """Decodes prompts together and writes what every step and layer selected to --out.

    report: that of the run; trace; counters: hits and misses by layer; recording_share: the host's
    time for recording, over the steps' time.
    """
    if args.max_new_tokens < 2:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens}: the first token comes from the prompt, so "
            "nothing is selected below 2"
        )
    texts, params = read_prompts(args), sampling_params(args)
    model, tokenizer = load_model(args, report)
    prompts = encode_prompts(args, tokenizer, texts)
    if not all(prompts):
        raise ValueError("a prompt is empty; it needs at least one token")
    requests = [
        Request(i, None, ids, params, make_generator(params, args.seed, i))
        for i, ids in enumerate(prompts)
    ]
    runner = make_runner(
        model,
        cache="hisparse",
        selector=args.selector,
        selector_weights=args.selector_weights,
        hisparse=args.hisparse,
        max_model_len=runner_max_model_len(args, model, max(map(len, prompts))),
        max_running_requests=len(prompts),  # a row each: no request follows on another
    )
    recorder = TraceRecorder(
        runner,
        args.out,
        metadata={"model": Path(args.model).name, "selector": args.selector},
        settings={
            "page_size": args.hisparse.page_size,
            "index_dtype": args.hisparse.index_dtype,
            "prompt_file": args.prompt_file and Path(args.prompt_file).name,
            "temperature": args.temperature,
            "seed": args.seed,
        },
        max_steps=args.max_new_tokens - 1,
    )
    try:
        with recorder:
            _decode(args, report, recorder, requests)
    finally:  # on Ctrl-C too: what was recorded stays
        if recorder.num_steps:
            _report_recording(args, report, recorder)
    if not recorder.num_steps:
        raise ValueError(
            "nothing was selected: every request ended with its first token; pass --ignore-eos"
        )
    return 0


def _decode(
    args: argparse.Namespace, report: dict, recorder: TraceRecorder, requests: list[Request]
) -> None:
    """Runs the requests to their ends, recorded. What was measured before Ctrl-C is reported."""
    runner, show = recorder.runner, not args.disable_tqdm
    step = DecodeStep(runner, enforce_eager=args.enforce_eager, progress=show)
    # All prompts first, so that all requests decode together.
    num_tokens = sum(len(request.prompt_ids) for request in requests)
    scheduler = Scheduler(runner, recorder.around(step), num_tokens)
    for request in requests:
        scheduler.add(request)
    try:
        with tqdm(total=args.max_new_tokens - 1, unit="step", disable=not show) as bar:
            while scheduler.has_unfinished:
                scheduler.step()
                bar.update(recorder.num_steps - bar.n)
    finally:
        lengths = [len(r.prompt_ids) + len(r.output_ids) for r in requests]
        timings = scheduler.timings
        report_run(report, runner, timings, scheduler.workspace, lengths, step)
        seconds = sum(timings.step_ms) / 1e3
        report["recording_share"] = round(recorder.seconds / seconds, 4) if seconds else None
        for request in requests:
            scheduler.abort(request)
    errors = [request.error for request in requests if request.error]
    if errors:
        raise ValueError(errors[0])


def _report_recording(args: argparse.Namespace, report: dict, recorder: TraceRecorder) -> None:
    report_trace(report, args.out, read_trace(args.out))  # which also checks what was written
    report["counters"] = recorder.counters
    hits, misses = (sum(counts) for counts in recorder.counters.values())
    say(f"recorded with {misses / max(1, hits + misses):.2%} misses")
