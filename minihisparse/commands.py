"""What `generate`, `chat` and `step` do, from parsed flags to printed text and the fields of the
report; and the models of the benches. The other commands have files of their own, `..._command.py`.

Every command is `command(args, report) -> exit code`. It fills `report` as it goes, so that what
was measured before an error or Ctrl-C is still printed.

It deliberately does not know how flags are parsed, nor how the engine works: it has an LLM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from minihisparse.command_inputs import load_model, random_model, read_prompts, sampling_params
from minihisparse.engine import LLM
from minihisparse.sampling import SamplingParams
from minihisparse.stats import report_run
from minihisparse.step_view import StepView


def generate(args: argparse.Namespace, report: dict) -> int:
    """Completes prompts; a lone one is streamed, several are printed in their order."""
    prompts = read_prompts(args)
    rows = args.max_running_requests
    if rows is None and args.hbm_budget_gib is None:
        rows = min(8, len(prompts))
    llm = _llm(args, report, rows)
    params = sampling_params(args)
    if len(prompts) == 1:
        _stream(llm, llm.tokenizer.encode(prompts[0]), params, report)
        return 0
    try:
        outputs = llm.generate(prompts, params)
    except KeyboardInterrupt:
        _report_llm(report, llm, [])
        raise
    for index, output in enumerate(outputs):
        print(f"--- prompt {index}")
        print(output["text"] if output.error is None else f"refused: {output.error}")
    done = [output for output in outputs if output.error is None]
    report["errors"] = [output.error for output in outputs if output.error is not None]
    lengths = [len(output.prompt_token_ids) + len(output["token_ids"]) for output in done]
    _report_llm(report, llm, lengths)
    return 1 if report["errors"] else 0


def chat(args: argparse.Namespace, report: dict) -> int:
    """A conversation on the terminal: each line of stdin is a message, end of file ends it."""
    llm = _llm(args, report, max_running_requests=1)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    _report_llm(report, llm, [])
    for line in _lines("you> "):
        messages.append({"role": "user", "content": line})
        prompt = llm.chat_prompt(messages)
        answer = _stream(llm, prompt, sampling_params(args), report)
        messages.append({"role": "assistant", "content": answer})
    return 0


def step(args: argparse.Namespace, report: dict) -> int:
    """Decodes one prompt and stops after each layer to show the cache."""
    prompts = read_prompts(args)
    if len(prompts) != 1:
        raise ValueError(f"step shows one prompt, but {len(prompts)} were given")
    llm = _llm(args, report, max_running_requests=1)
    view = StepView(_lines(StepView.QUESTION))
    num_tokens = 0
    try:
        for event in llm.step(prompts, SamplingParams(max_new_tokens=args.max_new_tokens)):
            (num_tokens,) = event.seq_lens
            if view.wants(event):
                print(view.render(event))
                if not view.go_on(event):
                    break
    finally:
        _report_llm(report, llm, [num_tokens])
    return 0


def bench_decode(args: argparse.Namespace, report: dict) -> int:
    """Throughput and latency of many requests; see bench_decode.py."""
    from minihisparse import bench_decode

    bench_decode.check_flags(args)
    longest = max(args.input_len) + args.output_len
    if args.random_weights is None:
        model, tokenizer = load_model(args, report, longest)
    else:
        model, tokenizer = random_model(args, report, longest), None
        args.synthetic_context = True
    bench_decode.bench_decode(args, model, tokenizer, report)
    return 0


def bench_serve(args: argparse.Namespace, report: dict) -> int:
    """Latency under requests that come at random times; see bench_serve.py."""
    from minihisparse import bench_serve

    bench_serve.check_flags(args)
    longest = max(point.num_tokens for point, _, _ in bench_serve.jobs_of(args))
    model, tokenizer = load_model(args, report, longest)
    bench_serve.bench_serve(args, model, tokenizer, report)
    return 0


def bench_resolve(args: argparse.Namespace, report: dict) -> int:
    """Times Resolve alone, without a model; see bench_resolve.py."""
    from minihisparse import bench_resolve  # needs Numba, which the other commands may do without

    bench_resolve.bench_resolve(args, report)
    return 0


def _llm(args: argparse.Namespace, report: dict, max_running_requests: int | None) -> LLM:
    model, tokenizer = load_model(args, report)
    return LLM(
        model,
        tokenizer=tokenizer,
        cache=args.cache,
        selector=args.selector,
        selector_weights=args.selector_weights,
        hisparse=args.hisparse,
        max_model_len=args.max_model_len,
        max_running_requests=max_running_requests,
        hbm_budget_gib=getattr(args, "hbm_budget_gib", None),
        enforce_eager=getattr(args, "enforce_eager", False),
        enable_prefix_sharing=not getattr(args, "disable_prefix_sharing", False),
        max_prefill_tokens=getattr(args, "max_prefill_tokens", None),
        seed=args.seed,
        use_tqdm=not args.disable_tqdm,
    )


def _stream(llm: LLM, prompt: Sequence[int], params: SamplingParams, report: dict) -> str:
    """Prints the text as it comes; returns it. On Ctrl-C what was printed stays."""
    text, num_tokens = "", 0
    try:
        for delta in llm.stream([prompt], params):
            text += delta.text
            num_tokens += 1  # before the text is out: Ctrl-C may come in between
            print(delta.text, end="", flush=True)
    finally:
        if num_tokens:
            print(flush=True)
            _report_llm(report, llm, [len(prompt) + num_tokens])
    return text


def _lines(question: str) -> Iterator[str]:
    """Lines of stdin without their newline; a person at a terminal is asked."""
    while True:
        if sys.stdin.isatty():
            print(question, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def _report_llm(report: dict, llm: LLM, num_tokens: Sequence[int]) -> None:
    """num_tokens: positions of each request, for what full KV would have taken."""
    report_run(report, llm.runner, llm.timings, llm.workspace, num_tokens, llm.scheduler.decode)
