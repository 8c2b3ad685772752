"""The command line, in process but for two runs: what is printed where, and what is refused how.

Guards: a last line that is not one JSON object (text before it on the same line, NaN in it, a
traceback in its place); exit code 0 of a run that was refused or not exact; progress on stdout; an
error that does not say what to change; flags that are accepted and ignored; `--top-k` taken for
the sampler's; text that is lost on Ctrl-C.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import minihisparse
from minihisparse import cli, demo_command, host_store
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams
from minihisparse.stats import AllocationAccount

K, B, PAGE = 8, 16, 4
SMALL = ["--top-k", str(K), "--device-buffer-size", str(B), "--page-size", str(PAGE)]
TEXT = "Once upon a time there was a slot. It held a record, and the record was in the host too. "
LONG = TEXT * 5  # 270 tokens or so of the tiny tokenizer
RECORD_BYTES = 2 * 32 * 4  # two layers, W = 32, fp32

CACHE_KEYS = {"hits", "misses", "hit_rate", "evictions", "bytes_h2d"}
MEMORY_KEYS = {
    "device_kv_bytes",
    "selector_bytes",
    "metadata_bytes",
    "workspace_bytes",
    "host_pool_bytes",
    "full_kv_bytes",
}
PREFIX_KEYS = {
    "requests",
    "requests_sharing",
    "tokens_computed",
    "tokens_shared",
    "pages_shared",
    "host_bytes_peak",
    "host_bytes_saved",
}
STEP_KEYS = {"step_bytes", "graph_bytes"}  # of commands that have a decode step of their own
START_KEYS = {"command", "version", "torch", "device", "device_name", "dtype", "seed"}
START_KEYS |= {"exact", "max_abs_diff"}  # null where nothing was compared
TIME_KEYS = {"steps", "tokens_per_second", "ttft_ms", "tpot_ms_p50", "tpot_ms_p99"}


@dataclass
class Result:
    """text: stdout without its last line, the report."""

    code: int
    text: str
    line: str
    report: dict
    err: str


def parse(code: int, out: str, err: str) -> Result:
    """Checks what holds for every run: stdout ends with one line of strict JSON; what an error
    looks like.
    """
    assert out.endswith("\n")
    text, _, line = out[:-1].rpartition("\n")
    text += "\n" if text else ""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON line")

    report = json.loads(line, parse_constant=refuse)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert errors == ([f"error: {report['error']}"] if "error" in report else [])
    assert "Traceback" not in err
    assert report["version"] == minihisparse.__version__
    return Result(code, text, line, report, err)


@pytest.fixture
def run(capsys, monkeypatch, tiny_folder) -> Callable[..., Result]:
    """run("generate", "--prompt", "x", stdin="", model=tiny_folder): small sizes, no bars."""

    def run(
        *argv: str,
        stdin: str = "",
        model: Path | None = tiny_folder,
        sizes: list[str] = SMALL,
        bars: bool = False,
    ) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        more = ["--model", str(model)] if model is not None else []
        more += [] if bars else ["--disable-tqdm"]
        capsys.readouterr()
        code = cli.main([*argv, *more, *sizes, "--device", "cpu", "--dtype", "fp32"])
        return parse(code, *capsys.readouterr())

    return run


@pytest.fixture
def text_file(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(LONG, encoding="utf-8")
    return file


@pytest.fixture
def copy_folder(tmp_path, tiny_folder) -> Callable[..., Path]:
    """copy_folder(**changes): a copy of the tiny folder with other values in its config.json."""

    def copy(**changes) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny_folder, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        if "eos_token_id" in changes:
            (folder / "generation_config.json").unlink()
        return folder

    return copy


@pytest.fixture(scope="module")
def reference(tiny_folder) -> LLM:
    """The same engine without the command line."""
    config = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE)
    settings = {"device": "cpu", "dtype": "fp32", "use_tqdm": False}
    return LLM(tiny_folder, hisparse=config, **settings)


def greedy(llm: LLM, prompt, new: int, **params) -> tuple[str, list[int]]:
    out = llm.generate(prompt, SamplingParams(max_new_tokens=new, **params))
    return out["text"], out["token_ids"]


def assert_report(result: Result, *more: str) -> None:
    report = result.report
    assert set(report) == START_KEYS | TIME_KEYS | {"cache", "memory", "prefix", *more}
    own_step = report["command"] in ("generate", "chat", "step")
    assert set(report["cache"]) == CACHE_KEYS and set(report["prefix"]) == PREFIX_KEYS
    assert set(report["memory"]) == MEMORY_KEYS | (STEP_KEYS if own_step else set())
    assert (report["device"], report["dtype"], report["seed"]) == ("cpu", "float32", 0)
    assert all(isinstance(value, int) for value in report["memory"].values())
    assert report["ttft_ms"] > 0
    if report["steps"]:
        assert report["tokens_per_second"] > 0
        assert 0 < report["tpot_ms_p50"] <= report["tpot_ms_p99"]


# ---- generate ----


def test_generate_streams_one_prompt(run, reference):
    expected, ids = greedy(reference, LONG, 20)
    result = run("generate", "--prompt", LONG, "--max-new-tokens", "20")
    assert result.code == 0
    assert result.text == expected + "\n"
    assert_report(result)
    assert result.report["exact"] is None and result.report["max_abs_diff"] is None
    assert result.report["command"] == "generate"
    assert result.report["steps"] == len(ids) - 1
    cache = result.report["cache"]
    assert cache["misses"] > 0 and cache["bytes_h2d"] == cache["misses"] * 32 * 4
    assert cache["hit_rate"] == round(cache["hits"] / (cache["hits"] + cache["misses"]), 6)
    assert result.err.startswith("minihisparse: device cpu (as asked), dtype float32")
    assert len(result.err.splitlines()) == 1  # nothing else on stderr


def test_generate_several(run, reference, text_file):
    """In their order, the file last; one report for all of them."""
    prompts = ["a", TEXT, "ü"]
    argv = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    result = run("generate", *argv, "--prompt-file", str(text_file), "--max-new-tokens", "9")
    outputs = reference.generate([*prompts, LONG], SamplingParams(max_new_tokens=9))
    assert result.code == 0
    blocks = [f"--- prompt {i}\n{out['text']}\n" for i, out in enumerate(outputs)]
    assert result.text == "".join(blocks)
    assert_report(result, "errors")
    assert result.report["errors"] == []
    lengths = [len(out.prompt_token_ids) + len(out["token_ids"]) for out in outputs]
    assert result.report["memory"]["full_kv_bytes"] == sum(lengths) * RECORD_BYTES
    assert result.report["memory"]["device_kv_bytes"] == 4 * (B + 1) * RECORD_BYTES  # four rows


def test_max_running_requests(run, reference):
    argv = ["--prompt", "a", "--prompt", TEXT, "--prompt", "b", "--max-new-tokens", "5"]
    many = run("generate", *argv)
    one = run("generate", *argv, "--max-running-requests", "1")
    assert one.code == 0
    assert one.report["memory"]["device_kv_bytes"] == (B + 1) * RECORD_BYTES
    assert many.report["memory"]["device_kv_bytes"] == 3 * (B + 1) * RECORD_BYTES
    refused = run("generate", *argv, "--max-running-requests", "0")
    assert (
        refused.code == 1 and "--max-running-requests 0 is less than 1" in refused.report["error"]
    )


def test_stop(run, reference):
    text, _ = greedy(reference, TEXT, 30)
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii())
    argv = ["generate", "--prompt", TEXT, "--max-new-tokens", "30"]
    result = run(*argv, "--stop", "never in there", "--stop", stop)
    assert result.text == text[: text.index(stop)] + "\n"
    assert result.report["steps"] < 29


def test_max_tokens_is_an_alias(run):
    results = [
        run("generate", "--prompt", TEXT, flag, "7")
        for flag in ("--max-new-tokens", "--max-tokens")
    ]
    assert results[0].text == results[1].text
    assert [result.report["steps"] for result in results] == [6, 6]


def test_sampling_flags(run, reference, monkeypatch):
    argv = ["generate", "--prompt", TEXT, "--max-new-tokens", "12"]
    sampled = ["--temperature", "1.5", "--top-p", "0.9", "--sampling-top-k", "40"]
    first, again, other = (run(*argv, *sampled, "--seed", seed) for seed in "334")
    assert first.text == again.text != other.text
    assert first.report["seed"] == 3
    params = {"temperature": 1.5, "top_p": 0.9, "top_k": 40}
    monkeypatch.setattr(reference, "seed", 3)
    assert first.text == greedy(reference, TEXT, 12, **params)[0] + "\n"
    # One candidate is greedy, whatever the temperature.
    text = greedy(reference, TEXT, 12)[0] + "\n"
    assert run(*argv, "--temperature", "1.5", "--sampling-top-k", "1").text == text
    assert run(*argv, "--temperature", "1.5", "--top-p", "1e-9").text == text
    assert run(*argv, "--temperature", "1.5", "--seed", "3").text != text


def test_ignore_eos(run, reference, copy_folder):
    _, ids = greedy(reference, TEXT, 12, ignore_eos=True)
    folder = copy_folder(eos_token_id=ids[5])
    argv = ["generate", "--prompt", TEXT, "--max-new-tokens", "12"]
    assert run(*argv, model=folder).report["steps"] == ids.index(ids[5])
    assert run(*argv, "--ignore-eos", model=folder).report["steps"] == 11


def test_top_k_is_the_selectors(run):
    """It changes what the cache does; the sampler's flag does not."""
    argv = ["generate", "--prompt", LONG, "--max-new-tokens", "4"]
    sizes = ["--device-buffer-size", "64", "--page-size", "4"]
    small = run(*argv, sizes=[*sizes, "--top-k", "8"])
    large = run(*argv, sizes=[*sizes, "--top-k", "32"])
    sampler = run(*argv, "--sampling-top-k", "3", sizes=[*sizes, "--top-k", "8"])

    def reads(result: Result) -> int:
        return result.report["cache"]["hits"] + result.report["cache"]["misses"]

    def full_pages(top_k: int) -> range:  # the newest page may have one token only
        return range(3 * 2 * (top_k - PAGE), 3 * 2 * top_k + 1)

    assert reads(small) in full_pages(8) and reads(large) in full_pages(32)
    assert reads(sampler) == reads(small)


def test_full_cache(run):
    argv = ["generate", "--prompt", LONG, "--max-new-tokens", "10"]
    hisparse, full = run(*argv), run(*argv, "--cache", "full")
    assert full.text == hisparse.text
    assert set(full.report["cache"]) == CACHE_KEYS  # nothing is looked up, so nothing is counted
    assert set(full.report["cache"].values()) == {None}
    memory = full.report["memory"]
    assert memory["host_pool_bytes"] == 0
    assert memory["metadata_bytes"] == 8  # where the one request's slots begin
    assert memory["device_kv_bytes"] == 1024 * RECORD_BYTES


def test_budget_of_device_memory(run):
    """As many requests at once as it holds; the same texts; too small is refused by name."""
    argv = ["generate", "--prompt", TEXT, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "9"]
    argv += ["--cache", "full"]
    expected = run(*argv)
    result = run(*argv, "--hbm-budget-gib", "0.0006", "--enforce-eager")  # 630 KiB, 330 for one
    assert result.code == 0 and result.text == expected.text
    assert result.report["memory"]["device_kv_bytes"] == 1024 * RECORD_BYTES
    shared = run(*argv, "--hbm-budget-gib", "0.0006", "--max-running-requests", "3")
    assert shared.text == expected.text
    assert 1024 < shared.report["memory"]["device_kv_bytes"] / RECORD_BYTES < 3 * 1024
    refused = run(*argv, "--hbm-budget-gib", "0.0001")
    assert refused.code == 1
    assert refused.report["error"].startswith("--hbm-budget-gib 0.0001 is less than one request")


def test_device_memory_does_not_depend_on_the_prompt(run, text_file):
    short = run("generate", "--prompt", "a", "--max-new-tokens", "8", "--ignore-eos")
    long = run("generate", "--prompt-file", str(text_file), "--max-new-tokens", "8", "--ignore-eos")
    for key in ("device_kv_bytes", "selector_bytes", "metadata_bytes", "host_pool_bytes"):
        assert short.report["memory"][key] == long.report["memory"][key] > 0
    assert short.report["memory"]["device_kv_bytes"] == (B + 1) * RECORD_BYTES
    assert short.report["memory"]["full_kv_bytes"] == (1 + 8) * RECORD_BYTES
    assert long.report["memory"]["full_kv_bytes"] > 200 * RECORD_BYTES


def test_hisparse_config(run):
    argv = ["generate", "--prompt", LONG, "--max-new-tokens", "5"]
    values = {"top_k": K, "device_buffer_size": B, "page_size": PAGE}
    flags = run(*argv)
    config = run(*argv, "--hisparse-config", json.dumps(values), sizes=[])
    assert config.code == 0 and config.text == flags.text
    for key in ("cache", "memory"):
        assert config.report[key] == flags.report[key]
    both = run(*argv, "--hisparse-config", json.dumps(values), sizes=["--page-size", "4"])
    assert both.code == 1
    assert both.report["error"] == (
        "--hisparse-config and --page-size set the same things; use one of them"
    )
    for text, message in [
        ("{", "--hisparse-config is not JSON"),
        ("[1]", "--hisparse-config must be a JSON object"),
        ('{"topk": 8}', "--hisparse-config: unknown keys ['topk']"),
        ('{"swap_in_block_size": 48}', "swap_in_block_size: got 48, expected a multiple of 32 in"),
        ('{"top_k": "8"}', "top_k: got '8', expected an integer >= 1"),
        ('{"cache_size_mb": NaN}', "cache_size_mb: got nan, expected a number > 0"),
    ]:
        result = run(*argv, "--hisparse-config", text, sizes=[])
        assert result.code == 1 and result.report["error"].startswith(message)


def test_cache_size_mb(run):
    """0.01 MiB of two layers' 128-byte records are 40 per layer, one of them the newest."""
    sizes = ["--top-k", "8", "--page-size", "4", "--cache-size-mb", "0.01"]
    result = run("generate", "--prompt", LONG, "--max-new-tokens", "5", sizes=sizes)
    assert result.report["memory"]["device_kv_bytes"] == 40 * RECORD_BYTES


# ---- prompts that begin alike ----


def test_one_document_for_many(run, reference):
    """About one document of host memory, and one prefill; switched off, sixteen of each."""
    prompts = [f"{LONG}{letter}?" for letter in "ABCDEFGHIJKLMNOP"]
    argv = ["generate", *(flag for prompt in prompts for flag in ("--prompt", prompt))]
    argv += ["--max-running-requests", "16", "--max-new-tokens", "3", "--ignore-eos"]
    sharing, alone = run(*argv), run(*argv, "--disable-prefix-sharing")
    assert sharing.code == alone.code == 0 and sharing.text == alone.text
    (length,) = {len(reference.tokenizer.encode(prompt)) for prompt in prompts}
    document = len(reference.tokenizer.encode(LONG)) // PAGE * PAGE  # Quest's pages, too
    assert length - document < 2 * PAGE
    pages, page_bytes = -(-(length + 3) // PAGE), PAGE * RECORD_BYTES
    nothing_shared = {
        "requests": 16,
        "requests_sharing": 0,
        "tokens_computed": 16 * length,
        "tokens_shared": 0,
        "pages_shared": 0,
        "host_bytes_peak": 16 * pages * page_bytes,
        "host_bytes_saved": 0,
    }
    saved = 15 * document // PAGE
    assert alone.report["prefix"] == nothing_shared
    assert sharing.report["prefix"] == {
        "requests": 16,
        "requests_sharing": 15,
        "tokens_computed": document + 16 * (length - document),
        "tokens_shared": 15 * document,
        "pages_shared": saved,
        "host_bytes_peak": (16 * pages - saved) * page_bytes,
        "host_bytes_saved": saved * page_bytes,
    }
    with_full_kv = run(*argv, "--cache", "full")
    assert with_full_kv.report["prefix"]["tokens_shared"] == 15 * document
    assert with_full_kv.report["prefix"]["host_bytes_saved"] is None


def test_verify_with_a_common_beginning(run, text_file):
    """Exact with sharing and without; each prompt is the beginning of another."""
    argv = ["verify", "--prompt-file", str(text_file), "--prompt-tokens", "100,200,150"]
    argv += ["--max-new-tokens", "4"]
    sharing, alone = run(*argv), run(*argv, "--disable-prefix-sharing")
    for result in (sharing, alone):
        assert result.text == "exact: 3 requests, 3 decode steps, all bits equal\n"
    assert sharing.report["prefix"]["tokens_shared"] == 100 + 148  # one token is left to compute
    assert alone.report["prefix"]["tokens_shared"] == 0


def test_only_where_requests_run_together(capsys):
    """A flag that would have no effect is not accepted."""
    for command in ("generate", "verify"):
        assert cli.build_parser().parse_args([command, "--model", "x", "--disable-prefix-sharing"])
    for command in ("demo", "chat", "step", "bench decode", "bench serve"):
        with pytest.raises(SystemExit):
            argv = [*command.split(), "--model", "x", "--disable-prefix-sharing"]
            cli.build_parser().parse_args(argv)
        assert "unrecognized arguments: --disable-prefix-sharing" in capsys.readouterr().err


# ---- progress, and the report in a file ----


def test_bars_are_on_stderr(run, monkeypatch):
    monkeypatch.setattr(demo_command, "DEMO_TOKENS", 100)
    for argv in (
        ["generate", "--prompt", TEXT, "--max-new-tokens", "3"],
        ["generate", "--prompt", TEXT, "--prompt", "a", "--max-new-tokens", "3"],
        ["verify", "--prompt", TEXT, "--max-new-tokens", "3"],
        ["demo", "--max-new-tokens", "3"],
        ["bench", "decode", "--input-len", "9", "--output-len", "2", "--num-iters", "1"],
    ):
        with_bars, without = run(*argv, bars=True), run(*argv)
        assert with_bars.code == without.code == 0
        assert "it/s" in with_bars.err or "tensor/s" in with_bars.err
        assert "%|" not in with_bars.text and "%|" not in without.err
        assert without.err.count("\n") == 1  # the device


def test_output_json(run, tmp_path):
    file = tmp_path / "report.json"
    result = run("generate", "--prompt", "a", "--max-tokens", "2", "--output-json", str(file))
    assert result.code == 0 and file.read_text() == result.line + "\n"
    result = run("generate", "--prompt", "", "--output-json", str(file))  # an error is a report too
    assert result.code == 1 and file.read_text() == result.line + "\n"


def test_output_json_that_cannot_be_written(capsys, tmp_path, tiny_folder):
    """Only after the line on stdout, so that nothing is lost; and without a traceback."""
    file = tmp_path / "nowhere" / "report.json"
    argv = ["generate", "--prompt", "a", "--max-tokens", "2", "--disable-tqdm", *SMALL]
    code = cli.main([*argv, "--model", str(tiny_folder), "--output-json", str(file)])
    out, err = capsys.readouterr()
    assert code == 1 and json.loads(out.splitlines()[-1])["steps"] == 1
    assert err.splitlines()[-1].startswith("error: --output-json: ") and str(file) in err


# ---- chat ----


def test_chat(run, reference):
    """Each turn sees the turns before it; the answers are those of LLM.chat."""
    params = SamplingParams(max_new_tokens=10)
    lines = ["The whole KV history", "of a request?", "Then came a miss."]
    for system in (None, "You are a slot."):
        messages = [{"role": "system", "content": system}] if system else []
        answers = []
        for line in lines:
            messages.append({"role": "user", "content": line})
            answers.append(reference.chat(messages, params)["text"])
            messages.append({"role": "assistant", "content": answers[-1]})
        stdin = "".join(line + "\n" for line in lines)
        more = ["--system", system] if system else []
        result = run("chat", *more, "--max-new-tokens", "10", stdin=stdin)
        assert result.code == 0
        assert result.text == "".join(answer + "\n" for answer in answers)
        assert_report(result)
        last = len(reference.chat_prompt(messages[:-1])) + result.report["steps"] // 3 + 1
        assert result.report["memory"]["full_kv_bytes"] == last * RECORD_BYTES
        assert "you>" not in result.err  # nobody sits at a pipe


def test_chat_without_a_last_newline_and_without_messages(run):
    one = run("chat", "--max-new-tokens", "3", stdin="hello")
    assert one.code == 0 and one.text == run("chat", "--max-new-tokens", "3", stdin="hello\n").text
    none = run("chat", stdin="")
    assert none.code == 0 and none.text == ""
    assert_report_keys_of_nothing(none)


def assert_report_keys_of_nothing(result: Result) -> None:
    """No tokens: times and rates are null, not NaN and not missing."""
    assert set(result.report) == START_KEYS | TIME_KEYS | {"cache", "memory", "prefix"}
    assert result.report["prefix"] == dict.fromkeys(PREFIX_KEYS, 0)
    assert result.report["steps"] == 0 and result.report["ttft_ms"] is None
    assert result.report["cache"]["hit_rate"] is None


def test_chat_without_a_template(run, copy_folder):
    folder = copy_folder()
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    result = run("chat", stdin="hello\n", model=folder)
    assert result.code == 1 and result.text == ""
    assert "has no chat template; pass --chat-template" in result.report["error"]
    assert str(folder) in result.report["error"]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for argument in (template, str(folder / "template.jinja")):
        (folder / "template.jinja").write_text(template)
        argv = ["chat", "--max-new-tokens", "3", "--chat-template", argument]
        assert run(*argv, stdin="hello\n", model=folder).code == 0
    argv[-1] = "template.jinja"
    assert "neither a file nor" in run(*argv, stdin="hello\n", model=folder).report["error"]


def test_chat_that_gets_too_long_keeps_what_was_said(run):
    stdin = "hello\n" + "x" * 1200 + "\n"
    result = run("chat", "--max-new-tokens", "5", stdin=stdin)
    assert result.code == 1
    assert "over the limit max_model_len=1024" in result.report["error"]
    assert result.text == run("chat", "--max-new-tokens", "5", stdin="hello\n").text
    assert result.report["steps"] == 4


# ---- verify ----


def test_verify(run, text_file):
    argv = ["verify", "--prompt-file", str(text_file), "--prompt-tokens", "1,15,16,17,200"]
    for more in ([], ["--no-check-integrity"]):
        result = run(*argv, "--max-new-tokens", "10", *more)
        assert result.code == 0
        assert result.text == "exact: 5 requests, 9 decode steps, all bits equal\n"
        assert_report(result, "exact", "max_abs_diff")
        assert result.report["exact"] is True
        assert type(result.report["max_abs_diff"]) is float and result.report["max_abs_diff"] == 0
        assert result.report["steps"] == 9
        full = (1 + 15 + 16 + 17 + 200 + 5 * 10) * RECORD_BYTES
        assert result.report["memory"]["full_kv_bytes"] == full


def test_verify_several_prompts(run):
    result = run("verify", "--prompt", TEXT, "--prompt", "a", "--max-new-tokens", "4")
    assert result.code == 0 and result.text.startswith("exact: 2 requests, 3 decode steps")


def test_verify_finds_a_fault(run, monkeypatch):
    right, calls = HiSparseCache.resolve, []

    def resolve(self, layer, positions, batch):
        slots = right(self, layer, positions, batch)
        calls.append(layer)
        if len(calls) == 2 * 3 + 2:  # the fourth step, the second layer
            slots[0, 0] = slots[0, 1]
        return slots

    monkeypatch.setattr(HiSparseCache, "resolve", resolve)
    result = run("verify", "--prompt", LONG, "--max-new-tokens", "8")
    assert result.code == 1
    assert result.text.startswith(
        "NOT exact; the first difference is in step 4, layer 1: attention differs by up to "
    )
    assert_report(result, "exact", "max_abs_diff")
    assert result.report["exact"] is False
    assert result.report["max_abs_diff"] > 0  # the logits of that step, at least


def test_verify_finds_a_fault_that_breaks_the_cache(run, monkeypatch):
    """check_integrity ends the run; what Lockstep saw before is printed all the same."""
    monkeypatch.setattr(HiSparseCache, "_fetch", lambda *args: None)
    result = run("verify", "--prompt", LONG, "--max-new-tokens", "8")
    assert result.code == 1
    assert result.text.startswith(
        "NOT exact; the first difference is in step 1, layer 0: attention"
    )
    assert "a slot differs from its host row" in result.report["error"]
    assert result.report["exact"] is False
    result = run("verify", "--prompt", LONG, "--max-new-tokens", "8", "--no-check-integrity")
    assert result.code == 1 and result.report["exact"] is False and result.report["steps"] == 7
    assert result.text.startswith(
        "NOT exact; the first difference is in step 1, layer 0: attention"
    )


def test_verify_is_not_exact_if_only_the_integrity_is_broken(run, monkeypatch):
    def check_integrity(self, seq_lens=None):
        raise AssertionError("lru_slots is not a permutation")

    monkeypatch.setattr(HiSparseCache, "check_integrity", check_integrity)
    result = run("verify", "--prompt", LONG, "--max-new-tokens", "8")
    assert result.code == 1 and result.report["exact"] is False
    assert result.report["error"] == "lru_slots is not a permutation"
    assert "exact: " not in result.text.replace("NOT exact", "")


def test_verify_writes_no_nan(run, monkeypatch):
    right = Runner.logits

    def logits(self, hidden):
        out = right(self, hidden).clone()
        if isinstance(self.cache, HiSparseCache):
            out[0, 1] = float("nan")
        return out

    monkeypatch.setattr(Runner, "logits", logits)
    monkeypatch.setattr(demo_command, "DEMO_TOKENS", 100)
    for argv in (["verify", "--prompt", TEXT], ["demo", "--prompt-file", __file__]):
        result = run(*argv, "--max-new-tokens", "3")
        assert result.code == 1 and result.report["exact"] is False
        assert result.report["max_abs_diff"] is None
        assert "step 1, logits: logits differs by up to inf" in result.text


# ---- demo ----


def test_demo(run, text_file, reference):
    message = {"role": "user", "content": f"{LONG}\n\nWhat is a slot?"}
    expected, ids = greedy(reference, reference.chat_prompt([message]), 12)
    argv = ["demo", "--prompt-file", str(text_file), "--question", "What is a slot?"]
    result = run(*argv, "--max-new-tokens", "12")
    assert result.code == 0
    num_prompt = len(reference.chat_prompt([message]))
    head, _, rest = result.text.partition("\nanswer: ")
    assert head == f"document: text.txt, {num_prompt} tokens\nquestion: What is a slot?"
    assert rest.startswith(expected + "\n")
    table = rest.removeprefix(expected + "\n").splitlines()
    assert table[0].split() == ["full", "hisparse"]
    assert table[-1] == f"tokens, attention of every layer, logits of {len(ids) - 1} steps: equal"
    assert_report(result, "exact", "max_abs_diff")
    assert result.report["exact"] is True and result.report["max_abs_diff"] == 0.0
    assert result.report["memory"]["full_kv_bytes"] == (num_prompt + len(ids)) * RECORD_BYTES


def test_demo_with_defaults(run, monkeypatch, tiny_folder):
    """Gets the model, and cuts a module of the standard library to a length that fits."""
    from minihisparse.weights_scripts import get_smollm2

    asked = []
    monkeypatch.setattr(
        get_smollm2, "get_smollm2", lambda progress: asked.append(progress) or tiny_folder
    )
    monkeypatch.setattr(demo_command, "DEMO_TOKENS", 500)
    result = run("demo", "--max-new-tokens", "3", model=None)
    assert result.code == 0 and asked == [False]
    assert result.text.startswith(f"document: {demo_command.DEMO_MODULE}.py, ")
    assert f"question: {demo_command.QUESTION}" in result.text
    assert 500 < int(result.text.split()[2]) < 700


def test_demo_finds_a_fault(run, monkeypatch, text_file):
    monkeypatch.setattr(HiSparseCache, "_fetch", lambda *args: None)
    result = run("demo", "--prompt-file", str(text_file), "--max-new-tokens", "4")
    assert result.code == 1 and result.report["exact"] is False
    assert "logits of 3 steps: step 1, layer 0: attention differs by up to " in result.text


def test_demo_that_is_refused_says_so_on_a_line_of_its_own(run, tmp_path):
    """`parse` reads the last line: nothing may stand before the JSON on it."""
    file = tmp_path / "long.txt"
    file.write_text("x" * 1100)
    result = run("demo", "--prompt-file", str(file))
    assert result.code == 1
    assert "over the limit" in result.report["error"] and "1024" in result.report["error"]


# ---- step ----


def shown(result: Result) -> list[tuple[int, int]]:
    """(step, layer) of each table in the text."""
    heads = [line.split() for line in result.text.splitlines() if line.startswith("step ")]
    return [(int(words[1].strip(",")), int(words[3].strip(","))) for words in heads]


@pytest.mark.parametrize(
    "stdin, expected",
    [
        ("", [(1, 0)]),  # the end of the pipe
        ("\n", [(1, 0), (1, 1)]),
        ("\n\n\nq\n\n\n", [(1, 0), (1, 1), (2, 0), (2, 1)]),
        ("n\nq\n", [(1, 0), (1, 1)]),
        ("s\ns\n\n", [(1, 0), (2, 0), (3, 0), (3, 1)]),
        ("\ns\nq\n", [(1, 0), (1, 1), (2, 0)]),
        ("g 4\n\nq\n", [(1, 0), (4, 0), (4, 1)]),
        ("g 9\n", [(1, 0)]),  # beyond the last step
        ("what\ng x\ng\n s \nq\n", [(1, 0), (2, 0)]),
        ("\n" * 99, [(step, layer) for step in range(1, 5) for layer in (0, 1)]),
    ],
)
def test_step(run, stdin, expected):
    result = run("step", "--prompt", TEXT, "--max-new-tokens", "5", stdin=stdin)
    assert result.code == 0
    assert shown(result) == expected
    assert_report(result)
    assert result.text.count("is not one of: Enter: next layer") == (3 if "what" in stdin else 0)


def test_step_shows_what_happened(run, reference):
    """The first step after a prompt longer than B: all but the newest position is fetched."""
    result = run("step", "--prompt", LONG, "--max-new-tokens", "3", stdin="q\n")
    num_prompt = len(reference.tokenizer.encode(LONG))
    misses = result.report["cache"]["misses"]
    assert 0 < misses < K
    assert result.text.startswith(
        f"step 1, layer 0, seq_len {num_prompt + 1}: {misses + 1} selected, 1 hits, "
        f"{misses} misses, 0 evicted, {misses * 32 * 4} bytes fetched\n"
    )
    assert result.text.count("*") - 1 == misses  # one in the heading
    assert result.report["memory"]["full_kv_bytes"] == (num_prompt + 1) * RECORD_BYTES


def test_step_with_the_full_cache(run):
    result = run("step", "--prompt", TEXT, "--cache", "full", stdin="q\n")
    assert result.code == 0 and "(full cache: the slot of position p is p)" in result.text


def test_step_takes_one_prompt(run):
    result = run("step", "--prompt", "a", "--prompt", "b")
    assert result.code == 1
    assert result.report["error"] == "step shows one prompt, but 2 were given"


# ---- bench ----


def test_bench_decode(run):
    argv = ["--input-len", "40", "--output-len", "3", "--num-iters", "2", "--concurrency", "2"]
    result = run("bench", "decode", *argv)
    assert result.code == 0
    head, *lines = result.text.splitlines()
    assert head.split()[:2] == ["mode", "tokens"]
    modes = ["full", "hisparse"] * 2  # they take turns
    assert [line.split()[0] for line in lines] == modes
    assert START_KEYS <= set(result.report)
    rows = result.report["rows"]
    assert [(row["mode"], row["requests"], row["input_len"]) for row in rows] == [
        (mode, 2, 40) for mode in modes
    ]


def test_bench_decode_takes_one_model(run, tiny_folder):
    message = "bench decode needs --model or --random-weights, one of them"
    for argv, model in (([], None), (["--random-weights", "config.json"], tiny_folder)):
        result = run("bench", "decode", *argv, model=model)
        assert result.code == 1 and result.report["error"] == message


# ---- usage ----


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["complete"],
        ["gen"],
        ["generate", "--prompt", "a"],  # no --model
        ["generate", "--model", "m", "--prompt", "a", "--max-new", "3"],
        ["generate", "--model", "m", "--prompt", "a", "--temp", "1"],
        ["generate", "--model", "m", "--prompt", "a", "--top", "1"],
        ["generate", "--model", "m", "--prompt", "a", "--hisparse", "{}"],
        ["generate", "--mod", "m", "--prompt", "a"],
        ["verify", "--model", "m", "--prompt", "a", "--temperature", "1"],  # verify is greedy
        ["verify", "--model", "m", "--prompt", "a", "--prompt-tokens", "3,0"],
        ["verify", "--model", "m", "--prompt", "a", "--prompt-tokens", "3,"],
        ["verify", "--model", "m", "--prompt", "a", "--prompt-tokens", "many"],
        ["generate", "--model", "m", "--prompt", "a", "--top-k", "many"],
        ["generate", "--model", "m", "--prompt", "a", "--cache", "half"],
        ["bench", "--model", "m"],
        ["bench", "prefill", "--model", "m"],
        ["bench", "decode", "--model", "m", "--hbm-budget-gib", "0"],
        ["bench", "decode", "--model", "m", "--hbm-budget-gib", "1,lots"],
        ["bench", "decode", "--model", "m", "--concurrency", "0"],
        ["bench", "decode", "--model", "m", "--input-len", "0"],
        ["bench", "serve"],  # no --model
        ["bench", "serve", "--model", "m", "--request-rate", "0"],
        ["bench", "resolve", "--model", "m"],  # none is needed
        ["bench", "resolve", "--batch-sizes", "0,1"],
        ["bench", "resolve", "--misses", "-1"],
        ["bench", "resolve", "--misses", "1,"],
        ["bench", "resolve", "--points", "1:0,4"],
        ["bench", "resolve", "--points", "0:1"],
        ["bench", "resolve", "--points", "1:-1"],
        ["bench", "resolve", "--points", "1:2:3"],
        ["generate", "--model", "m", "--prompt", "a", "--device-buffer-size", "many"],
        ["generate", "--model", "m", "--prompt", "a", "--device-buffer-size", "9,"],
        ["trace"],
        ["trace", "erase", "FILE"],
        ["trace", "record", "--model", "m", "--prompt", "a"],  # no --out
        ["trace", "record", "--out", "FILE", "--prompt", "a"],  # no --model
        ["trace", "record", "--model", "m", "--out", "FILE", "--prompt", "a", "--stop", "b"],
        ["trace", "replay"],
        ["trace", "replay", "FILE", "--device-buffer-size", "0"],
        ["trace", "replay", "FILE", "--device", "cpu"],  # it runs nowhere else
        ["trace", "size"],
    ],
    ids=" ".join,
)
def test_bad_usage(capsys, argv):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage: minihisparse" in err


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as exit:
            cli.main([flag])
        assert exit.value.code == 0
    assert capsys.readouterr().out.startswith(minihisparse.__version__ + "\nusage:")
    more = ("bench decode", "bench serve", "trace record")
    for command in ("demo", "generate", "chat", "verify", "step", *more):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command.split(), "--help"])
        assert exit.value.code == 0
        assert "--hisparse-config" in capsys.readouterr().out
    for command, words in (
        ("bench", "no model"),
        ("bench resolve", "--blocks-per-request"),
        ("trace", "Figure 6"),
        ("trace replay", "last_step, random, fifo"),
        ("trace size", "--host-gib"),
    ):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command.split(), "--help"])
        assert exit.value.code == 0
        assert words in capsys.readouterr().out


def test_a_size_per_layer(run):
    """Of two layers; as flags and as JSON."""
    argv = ["generate", "--prompt", LONG, "--max-new-tokens", "5"]
    sizes = ["--top-k", "8", "--page-size", "4", "--device-buffer-size", "9,30"]
    flags = run(*argv, sizes=sizes)
    values = json.dumps({"top_k": 8, "page_size": 4, "device_buffer_size": [9, 30]})
    config = run(*argv, "--hisparse-config", values, sizes=[])
    assert flags.code == config.code == 0 and flags.text == config.text
    assert flags.report["cache"] == config.report["cache"]
    assert flags.report["memory"]["device_kv_bytes"] == (10 + 31) * RECORD_BYTES // 2
    refused = run(*argv, sizes=[*sizes[:-1], "9,30,40"])
    assert refused.code == 1 and "got 3 sizes for 2 layers" in refused.report["error"]


# ---- bad input ----


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def in_shards(folder: Path, lost: bool) -> None:
    """Two shards and an index; the second shard may be lost."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    without_weights(folder)
    if lost:
        (folder / "model-2.safetensors").unlink()


def missing_shard(folder: Path) -> None:
    in_shards(folder, lost=True)


def change_weights(folder: Path, change: Callable[[dict], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"


def missing_tensor(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(UP))


def superfluous_tensor(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.extra.weight": torch.ones(2)}))


def wrong_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({UP: torch.ones(64, 47)}))


def damaged_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def unknown_model(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"mamba"'))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_weights, ["has neither model.safetensors nor model.safetensors.index.json"]),
        (missing_shard, ["names files that are not there: model-2.safetensors"]),
        (missing_tensor, [f"missing tensors: {UP}"]),
        (superfluous_tensor, ["does not have: model.extra.weight"]),
        (wrong_shape, [f"wrong shapes: {UP} is [64, 47], expected [64, 48]"]),
        (damaged_weights, ["not a complete safetensors file"]),
        (unknown_model, ["model_type 'mamba' is not supported; supported: llama, qwen2, qwen3"]),
        (without_tokenizer, ["has no tokenizer.json"]),
    ],
)
def test_bad_folders(run, copy_folder, spoil, message):
    folder = copy_folder()
    spoil(folder)
    for command in ("generate", "verify"):
        result = run(command, "--prompt", "a", model=folder)
        assert result.code == 1 and result.text == ""
        for part in [*message, str(folder)]:
            assert part in result.report["error"]
        assert result.report["device"] == "cpu"  # what was known is reported


def test_shards_that_are_all_there(run, copy_folder):
    """The folder that `missing_shard` spoils is fine before."""
    folder = copy_folder()
    in_shards(folder, lost=False)
    argv = ["generate", "--prompt", TEXT, "--max-new-tokens", "5"]
    assert run(*argv, model=folder).text == run(*argv).text


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "verify", "step"])
def test_no_such_folder(run, tmp_path, command):
    prompt = ["--prompt", "a"] if command in ("generate", "verify", "step") else []
    result = run(command, *prompt, model=tmp_path / "nowhere")
    assert result.code == 1
    assert result.report["error"] == f"there is no folder {tmp_path / 'nowhere'}"


def test_a_hub_id_is_not_a_folder(run):
    result = run("generate", "--prompt", "a", model=Path("some-org/some-model"))
    assert "hf download some-org/some-model --local-dir DIR" in result.report["error"]


@pytest.mark.parametrize("command", ["generate", "verify", "step"])
@pytest.mark.parametrize(
    "argv, message",
    [
        (["--top-k", "32", "--device-buffer-size", "16"], "top_k=32 > device_buffer_size=16"),
        (["--device-buffer-size", "32768"], "device_buffer_size=32768 must be an integer in 1"),
        (["--top-k", "16640"], "change --device-buffer-size, or lower --top-k"),  # 2K
        (["--top-k", "30"], "top_k=30 is not a multiple of page_size=16"),
        (["--page-size", "0"], "page_size: got 0, expected an integer >= 1"),
        (["--cache-size-mb", "0.01"], "raise --cache-size-mb (0.01) or lower --top-k"),
        (["--cache-size-mb", "1", "--device-buffer-size", "512"], "which both set B; pass one"),
        (["--host-to-device-ratio", "-1"], "host_to_device_ratio: got -1.0, expected a number > 0"),
        (["--max-model-len", "2000"], "--max-model-len 2000 is not in 1..1024"),
        (["--max-model-len", "0"], "--max-model-len 0 is not in 1..1024"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_sizes(run, command, argv, message):
    result = run(command, "--prompt", "a", *argv, sizes=[])
    assert result.code == 1 and result.text == ""
    assert message in result.report["error"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dtype", "fp8"], "--dtype 'fp8' is not one of auto, fp32"),
        (["--device", "tpu"], "--device 'tpu' is not auto, cpu or cuda[:N]"),
    ],
)
def test_bad_device_or_dtype(capsys, tiny_folder, argv, message):
    code = cli.main(["generate", "--prompt", "a", "--model", str(tiny_folder), *argv])
    result = parse(code, *capsys.readouterr())
    assert result.code == 1 and message in result.report["error"]


@pytest.mark.parametrize("command", ["generate", "verify", "step"])
def test_bad_prompts(run, command, tmp_path):
    result = run(command)
    assert result.code == 1
    assert result.report["error"] == "no prompt; pass --prompt TEXT or --prompt-file FILE"

    result = run(command, "--prompt", "")
    assert result.code == 1
    assert result.report["error"] == "prompt 0: it is empty; a prompt needs at least one token"
    assert result.report.get("exact") is None  # nothing was compared

    (tmp_path / "empty.txt").write_text("")
    result = run(command, "--prompt-file", str(tmp_path / "empty.txt"))
    assert result.code == 1 and "it is empty" in result.report["error"]

    result = run(command, "--prompt-file", str(tmp_path / "nowhere.txt"))
    assert result.code == 1 and "nowhere.txt" in result.report["error"]

    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    result = run(command, "--prompt-file", str(tmp_path / "latin1.txt"))
    assert result.code == 1 and "latin1.txt" in result.report["error"]


def test_demo_without_its_document(run, tmp_path):
    result = run("demo", "--prompt-file", str(tmp_path / "nowhere.txt"))
    assert result.code == 1 and "nowhere.txt" in result.report["error"]


@pytest.mark.parametrize("command", ["generate", "verify", "step"])
def test_too_many_tokens(run, command):
    """Both numbers, the limit, and the flags that help."""
    prompt = "x" * 1000
    result = run(command, "--prompt", prompt, "--max-new-tokens", "25")
    assert result.code == 1 and result.text == ""
    for part in ("1000 prompt tokens", "max_new_tokens=25", "1025", "1024", "--max-new-tokens"):
        assert part in result.report["error"]
    if command != "step":
        assert run(command, "--prompt", prompt[:-2], "--max-new-tokens", "3").code == 0
    result = run(command, "--prompt", "x" * 30, "--max-new-tokens", "20", "--max-model-len", "40")
    assert result.code == 1 and "50" in result.report["error"] and "40" in result.report["error"]


@pytest.mark.parametrize("command", ["generate", "verify", "step", "demo", "chat"])
def test_no_new_tokens(run, command, text_file):
    more = {"demo": ["--prompt-file", str(text_file)], "chat": []}
    argv = more.get(command, ["--prompt", "a"])
    for number in ("0", "-5"):
        result = run(command, *argv, "--max-new-tokens", number, stdin="hello\n")
        assert result.code == 1
        assert f"max_new_tokens: got {number}, expected an integer >= 1" in result.report["error"]


def test_one_refused_of_several(run, reference):
    """The others are answered; the exit code says that not all were."""
    argv = ["--prompt", TEXT, "--prompt", "x" * 1020, "--prompt", "", "--prompt", "b"]
    result = run("generate", *argv, "--max-new-tokens", "9")
    assert result.code == 1
    blocks = result.text.split("--- prompt ")[1:]
    assert blocks[0] == f"0\n{greedy(reference, TEXT, 9)[0]}\n"
    assert blocks[3] == f"3\n{greedy(reference, 'b', 9)[0]}\n"
    first, second = result.report["errors"]
    assert first.startswith("prompt 1: 1020 prompt tokens and max_new_tokens=9 are 1029 in all")
    assert second == "prompt 2: it is empty; a prompt needs at least one token"
    assert blocks[1:3] == [f"1\nrefused: {first}\n", f"2\nrefused: {second}\n"]
    assert_report(result, "errors")
    all_refused = run("generate", "--prompt", "", "--prompt", "x" * 1024)
    assert all_refused.code == 1 and len(all_refused.report["errors"]) == 2


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_host_pool_larger_than_free_memory(run, monkeypatch, command):
    monkeypatch.setattr(host_store, "free_host_bytes", lambda: 10 * 2**20)
    needed = 400 * 1024 * RECORD_BYTES
    argv = ["--max-running-requests", "400", "--prompt", "a"]
    if command == "verify":  # a row per prompt
        argv = ["--max-model-len", "1024"] + ["--prompt", "a"] * 400
    sizes = ["--top-k", "16", "--device-buffer-size", "32"]
    with AllocationAccount() as account:
        result = run(command, *argv, sizes=sizes)
    assert result.code == 1 and result.text == ""
    assert f"needs {needed / 2**30:.2f} GiB" in result.report["error"]
    assert "only 0.01 GiB of host memory are free" in result.report["error"]
    if command == "generate":
        assert account.peak_bytes < needed / 8  # selector state and weights, no records


def test_prompt_tokens(run, text_file):
    result = run("verify", "--prompt-file", str(text_file), "--prompt-tokens", "5,100000")
    assert result.code == 1
    assert result.report["error"].startswith("--prompt-tokens 100000 is more than the prompt has, ")
    assert "pass a longer --prompt-file" in result.report["error"]
    result = run("verify", "--prompt", "a", "--prompt", "b", "--prompt-tokens", "1")
    assert result.code == 1
    assert result.report["error"] == "--prompt-tokens cuts one prompt, but 2 were given"


def test_unexpected_errors_are_reported_too(run, monkeypatch):
    def broken(*args):
        raise RuntimeError("CUDA error: something\nCompile with something else")

    monkeypatch.setattr(Runner, "prefill", broken)
    result = run("generate", "--prompt", "a")
    assert result.code == 1
    assert "CUDA error: something Compile with" in result.report["error"]


def test_a_missing_module_is_reported(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("bench", "decode", "--compare", "transformers", "--input-len", "9")
    assert result.code == 1 and "transformers" in result.report["error"]


# ---- Ctrl-C ----


def interrupt_at(monkeypatch, call: int) -> None:
    """KeyboardInterrupt in the `call`-th decode_layer from now on, counted over all runners."""
    right, calls = Runner.decode_layer, []

    def decode_layer(self, *args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(Runner, "decode_layer", decode_layer)


def assert_interrupted(result: Result) -> None:
    assert result.code == 130
    assert result.report["interrupted"] is True
    assert result.err.splitlines()[-1] == "interrupted"


def test_interrupted_generate(run, reference, monkeypatch):
    whole, _ = greedy(reference, TEXT, 20)
    shorter, _ = greedy(reference, TEXT, 9)
    interrupt_at(monkeypatch, 2 * 8 + 2)  # in the ninth step: nine tokens were given
    result = run("generate", "--prompt", TEXT, "--max-new-tokens", "20")
    assert_interrupted(result)
    assert_report(result, "interrupted")
    streamed = result.text.removesuffix("\n")
    assert whole.startswith(streamed) and shorter.startswith(streamed)
    assert len(streamed) >= len(shorter) - 3  # an incomplete character is held back
    assert result.report["steps"] == 8


def test_interrupted_in_the_prompt(run, monkeypatch):
    def prefill(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "prefill", prefill)
    result = run("generate", "--prompt", TEXT)
    assert_interrupted(result)
    assert result.text == ""


def test_interrupted_generate_of_several(run, monkeypatch):
    interrupt_at(monkeypatch, 2 * 5 + 1)
    result = run("generate", "--prompt", TEXT, "--prompt", "a", "--max-new-tokens", "20")
    assert_interrupted(result)
    assert result.report["steps"] == 5  # what was measured is still reported
    assert_report(result, "interrupted")


def test_interrupted_demo(run, reference, monkeypatch, text_file):
    message = {"role": "user", "content": f"{LONG}\n\n{demo_command.QUESTION}"}
    expected, _ = greedy(reference, reference.chat_prompt([message]), 7)
    interrupt_at(monkeypatch, 4 * 6 + 3)  # two runners of two layers: in the seventh step
    result = run("demo", "--prompt-file", str(text_file), "--max-new-tokens", "20")
    assert_interrupted(result)
    assert result.text.partition("\nanswer: ")[2] == expected + "\n"
    assert result.report["exact"] is True and result.report["steps"] == 6
    assert_report(result, "interrupted", "exact", "max_abs_diff")


def test_interrupted_verify_and_step(run, monkeypatch):
    interrupt_at(monkeypatch, 4 * 3 + 2)
    result = run("verify", "--prompt", TEXT, "--max-new-tokens", "9")
    assert_interrupted(result)
    assert result.report["steps"] == 3 and "exact: " not in result.text
    interrupt_at(monkeypatch, 2 * 3 + 2)
    result = run("step", "--prompt", TEXT, "--max-new-tokens", "9", stdin="\n" * 99)
    assert_interrupted(result)
    assert shown(result)[-1] == (4, 0) and result.report["steps"] == 3


def test_interrupted_chat(run, monkeypatch):
    """In the second answer: the first one and the start of the second stay."""
    alone = run("chat", "--max-new-tokens", "6", stdin="hello\n").text
    interrupt_at(monkeypatch, 2 * 5 + 2 * 2 + 1)
    result = run("chat", "--max-new-tokens", "6", stdin="hello\nhow are you\nbye\n")
    assert_interrupted(result)
    assert result.text.startswith(alone)
    assert result.report["steps"] == 5 + 2


# ---- in a process of its own ----


def start(folder: Path, *argv: str, **environment: str) -> subprocess.Popen:
    def handle_sigint() -> None:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "minihisparse", *argv, "--model", str(folder), *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        preexec_fn=handle_sigint if os.name == "posix" else None,
    )


def test_verify_in_a_process(tiny_folder, text_file, tmp_path):
    """The exit code reaches the shell. Text files are read as UTF-8, whatever the locale is."""
    text_file.write_text("zwölf 你好 " + LONG, encoding="utf-8")
    argv = ["verify", "--prompt-file", str(text_file), "--max-new-tokens", "5", "--dtype", "bf16"]
    argv += ["--output-json", str(tmp_path / "report.json"), "--device", "cpu", "--disable-tqdm"]
    process = start(tiny_folder, *argv, PYTHONWARNDEFAULTENCODING="1")
    out, err = (stream.decode() for stream in process.communicate(timeout=120))
    result = parse(process.returncode, out, err)
    assert result.code == 0
    assert result.report["exact"] is True and result.report["dtype"] == "bfloat16"
    warned = [line for line in err.splitlines() if "EncodingWarning" in line]
    ours = ("verify_command.py", "command_inputs.py", "cli.py")
    assert not [line for line in warned if any(name in line for name in ours)]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_sigint_while_generating(copy_folder):
    """A run of minutes, interrupted at its first output."""
    folder = copy_folder(max_position_embeddings=100_000)
    argv = ["generate", "--prompt", TEXT, "--max-new-tokens", "90000", "--ignore-eos"]
    process = start(folder, *argv, "--disable-tqdm", "--device", "cpu")
    try:
        first = os.read(process.stdout.fileno(), 1)  # streamed: long before the end
        assert first and process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    result = parse(process.returncode, (first + out).decode(), err.decode())
    assert_interrupted(result)
    assert 0 <= result.report["steps"] < 89_999
    assert result.text.strip()
