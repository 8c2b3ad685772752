"""`demo`: a small real model answers a question about a long document, from both caches.

The answer is streamed; then a table has memory, traffic and times of both side by side, and says
whether all bits were equal. It deliberately does not know how caches are compared (`verify.py`),
nor how a Lockstep is made (`verify_command.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from tqdm import tqdm

from minihisparse.command_inputs import load_model, read_text
from minihisparse.tokenizer import Detokenizer, Tokenizer
from minihisparse.verify import Lockstep
from minihisparse.verify_command import make_lockstep, report_lockstep

DEMO_MODULE, DEMO_TOKENS = "calendar", 6_000
QUESTION = "Explain in a few sentences what this Python module is for."


def demo(args: argparse.Namespace, report: dict) -> int:
    """Gets a small real model, asks it about a long document, both ways, and compares."""
    if args.model is None:
        from minihisparse.weights_scripts.get_smollm2 import get_smollm2

        args.model = str(get_smollm2(progress=not args.disable_tqdm))
    model, tokenizer = load_model(args, report)
    document, name = _document(args, tokenizer)
    message = {"role": "user", "content": f"{document}\n\n{args.question}"}
    text = tokenizer.apply_chat_template([message])
    prompt = tokenizer.encode(text, add_special_tokens=False)
    lockstep = make_lockstep(args, model, [prompt], check_integrity=False)
    print(f"document: {name}, {len(prompt)} tokens\nquestion: {args.question}\nanswer: ", end="")
    answer = Detokenizer(tokenizer)
    eos = model.config.eos_token_ids
    total = 2 * model.config.num_hidden_layers
    off = args.disable_tqdm
    with tqdm(
        total=total, desc="prefill, both ways", unit="layer", disable=off, leave=False
    ) as bar:
        tokens = lockstep.run([prompt], args.max_new_tokens, eos, progress=bar.update)
        try:
            for (token,) in tokens:
                bar.close()
                print(answer.add(token), end="", flush=True)
        finally:  # on Ctrl-C too: what was streamed stays
            tokens.close()
            print(answer.finish(), flush=True)
            report_lockstep(report, lockstep, [prompt])
    print(_side_by_side(report, lockstep))
    return 0 if lockstep.exact else 1


def _document(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text that the demo is about, cut to DEMO_TOKENS tokens, and its name."""
    path = args.prompt_file
    if path is None:
        path = importlib.util.find_spec(DEMO_MODULE).origin
    ids = tokenizer.encode(read_text(path))
    return tokenizer.decode(ids[:DEMO_TOKENS]), Path(path).name


def _side_by_side(report: dict, lockstep: Lockstep) -> str:
    """The demo's closing table."""
    full, memory, cache = lockstep.runners["full"].cache, report["memory"], report["cache"]
    hit_rate = cache["hit_rate"]
    times = {name: timings.report() for name, timings in lockstep.timings.items()}

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:.1f} MiB"

    def row(name: str, of_full: object, of_hisparse: object) -> str:
        return f"{name:<28}{of_full!s:>16}{of_hisparse!s:>16}"

    equal = "equal" if lockstep.exact else str(lockstep.first_difference)
    return "\n".join(
        [
            row("", "full", "hisparse"),
            row("KV on the device", mib(full.device_kv_bytes), mib(memory["device_kv_bytes"])),
            row("KV in host memory", mib(0), mib(memory["host_pool_bytes"])),
            row("slot and page tables", mib(0), mib(memory["metadata_bytes"])),
            row("hit rate", "", "" if hit_rate is None else f"{hit_rate:.2%}"),
            row("fetched per decode step", "", mib(cache["bytes_h2d"] / max(1, report["steps"]))),
            row("time to first token, ms", *(t["ttft_ms"] for t in times.values())),
            row("time per token, ms", *(t["tpot_ms_p50"] for t in times.values())),
            f"tokens, attention of every layer, logits of {report['steps']} steps: {equal}",
        ]
    )
