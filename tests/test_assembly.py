"""From a name and a file to tokens: selectors with trained weights, whole path, on tiny models.

Guards: a selector that is made without its weights, settings or dtype; caches that give other bits
with it; prefetch that changes what comes out, or the tables; a layer with another one's B; a switch
of selectors that loses records; a flag that is read and forgotten; an error that does not name the
flag.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from addon_rig import tiny_addon, tiny_addon_file
from conftest import make_tiny_decoder
from rig import assert_same_bits

from minihisparse import cli
from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.indexer import DSASelector
from minihisparse.model import Decoder
from minihisparse.quest import QuestSelector
from minihisparse.replay import replay
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams
from minihisparse.synthetic import GivenSelections
from minihisparse.trace import Trace
from minihisparse.verify import Lockstep

K, B, LAYERS, NEW = 8, 16, 5, 10
GROUPS = (0, 0, 2, 2, 2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def hisparse(prefetch: bool | None = None, **changes) -> HiSparseConfig:
    sizes = {"top_k": K, "device_buffer_size": B, "page_size": 4} | changes
    return HiSparseConfig(**sizes, enable_layer_prefetch=prefetch)


def decoder(dtype: torch.dtype = torch.float32, **changes) -> Decoder:
    return make_tiny_decoder(dtype, num_hidden_layers=LAYERS, **changes)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """An add-on's file per selector, for `decoder()`."""
    folder = tmp_path_factory.mktemp("addons")
    anchors = {"dsa": None, "dsa-shared": (0, 2)}
    return {name: tiny_addon_file(folder, decoder(), name, a) for name, a in anchors.items()}


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(128, (length,), generator=generator).tolist()


def runner_of(
    model: Decoder,
    cache: str,
    selector: str,
    weights: Path | None,
    prefetch: bool | None = None,
    num_requests: int = 2,
    kernels: bool | None = None,
    **changes,
) -> Runner:
    """Every record and index key that nobody has written is NaN."""
    runner = make_runner(
        model,
        cache=cache,
        selector=selector,
        selector_weights=weights,
        hisparse=hisparse(prefetch, **changes),
        max_model_len=128,
        max_running_requests=num_requests,
        checked=model.device.type == "cpu",
        kernels=kernels,
    )
    for records in runner.cache.records:
        records.fill_(math.nan)
    if runner.cache.host is not None:
        runner.cache.host.records.fill_(math.nan)
    if isinstance(runner.selector, DSASelector):
        runner.selector.keys.view(torch.uint8).fill_(0xFF)
    return runner


def assert_exact(lockstep: Lockstep, prompts: Sequence[list[int]], new: int = NEW) -> None:
    list(lockstep.run(prompts, new))
    assert lockstep.first_difference is None and lockstep.max_abs_diff == 0.0
    for runner in lockstep.runners.values():
        assert not runner.cache.rows and not runner.selector.extents.owners


# -- the same bits ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the dsa.* other weights")  # the models are made in one type
@pytest.mark.parametrize("selector", ["dsa", "dsa-shared"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_with_either_cache(files, selector, dtype):
    """Short, around B and long; two requests at a time, four after one another."""
    model = decoder(DTYPES[dtype])
    runners = [runner_of(model, cache, selector, files[selector]) for cache in ("full", "hisparse")]
    assert (runners[1].prefetcher is not None) == (selector == "dsa-shared")
    lockstep = Lockstep(*runners)
    for lengths in [(100, B - 3), (1, B), (B + 1, 40)]:
        assert_exact(lockstep, [prompt(length) for length in lengths])
    assert runners[1].cache.counters.sum(0).min() > 0  # hits, misses and evictions


@pytest.mark.filterwarnings("ignore:the dsa.* other weights")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_with_keys_in_fp8(files, dtype):
    model = decoder(DTYPES[dtype])
    runners = [
        runner_of(model, cache, "dsa-shared", files["dsa-shared"], index_dtype="fp8")
        for cache in ("full", "hisparse")
    ]
    assert runners[1].selector.keys.dtype == torch.float8_e4m3fn
    assert_exact(Lockstep(*runners), [prompt(100), prompt(B - 3)])


def test_prefetch_changes_nothing(files):
    """Step by step: tokens, tables, counters and every record of every slot, with and without."""
    model, path = decoder(), files["dsa-shared"]
    locksteps = []
    for prefetch in (True, False):
        full = runner_of(model, "full", "dsa-shared", path)
        locksteps.append(Lockstep(full, runner_of(model, "hisparse", "dsa-shared", path, prefetch)))
    with_it, without = (lockstep.runners["hisparse"] for lockstep in locksteps)
    assert with_it.cache.anchor_of == GROUPS and with_it.prefetcher is not None
    assert without.cache.anchor_of == (0, 1, 2, 3, 4) and without.prefetcher is None
    assert len(with_it.cache._tokens) == 2 and len(without.cache._tokens) == LAYERS
    prompts, num_steps = [prompt(100), prompt(B - 3)], 0
    for tokens in zip(*(lockstep.run(prompts, NEW) for lockstep in locksteps), strict=True):
        with_it.prefetcher.join()
        assert tokens[0] == tokens[1]
        for name in ("device_buffer_tokens", "lru_slots", "counters"):
            assert_same_bits(getattr(with_it.cache, name), getattr(without.cache, name), name)
        for layer in range(LAYERS):
            ours, theirs = (cache.records[layer] for cache in (with_it.cache, without.cache))
            assert_same_bits(ours, theirs, f"layer {layer}")
        assert_same_bits(with_it.selector.keys, without.selector.keys, "keys")
        num_steps += 1
    assert num_steps == NEW and all(lockstep.exact for lockstep in locksteps)
    assert with_it.cache.counters[:, 1].min() > 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_exact_with_simulated_kernels(prefetch):
    """Everything in a step by kernels: the caches give the same bits, prefetched or not."""
    model = make_tiny_decoder(num_hidden_layers=2)
    addon = tiny_addon(model, "dsa-shared")
    runners = []
    for cache in ("full", "hisparse"):
        selector = DSASelector(
            addon, model, top_k=K, max_requests=1, max_model_len=48, kernels=True
        )
        runners.append(
            make_runner(
                model,
                cache=cache,
                selector=selector,
                hisparse=hisparse(prefetch),
                max_model_len=48,
                max_running_requests=1,
                kernels=True,
            )
        )
    assert (runners[1].prefetcher is not None) == prefetch
    assert_exact(Lockstep(*runners), [prompt(30)], new=4)
    assert runners[1].cache.counters[:, 1].min() > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the dsa.* other weights")
@pytest.mark.parametrize("selector", ["dsa", "dsa-shared"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_exact_on_a_gpu(files, selector, dtype, enforce_eager):
    model = decoder(DTYPES[dtype], device="cuda")
    runners = [
        runner_of(model, cache, selector, files[selector], num_requests=3)
        for cache in ("full", "hisparse")
    ]
    lockstep = Lockstep(*runners, enforce_eager=enforce_eager)
    assert_exact(lockstep, [prompt(n) for n in (80, 1, B - 3)], new=40)
    assert runners[1].cache.counters.sum(0).min() > 0


# -- a B per layer ----------------------------------------------------------------------------

PER_LAYER = (16, 9, 40, 24, K)
PER_GROUP = (30, 30, 12, 12, 12)


@pytest.mark.filterwarnings("ignore:the dsa.* other weights")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "selector, prefetch, sizes",
    [
        ("quest", None, PER_LAYER),
        ("dsa", None, PER_LAYER),
        ("dsa-shared", None, PER_GROUP),
        ("dsa-shared", False, PER_LAYER),
    ],
    ids=lambda value: str(value).replace(", ", ","),
)
def test_exact_with_a_size_per_layer(files, selector, prefetch, sizes, dtype):
    """40 steps; the short prompt outgrows one layer after the other, the long ones have from the
    start. Two after one another in the same rows.
    """
    full, sparse = (
        runner_of(
            decoder(DTYPES[dtype]),
            cache,
            selector,
            files.get(selector),
            prefetch,
            num_requests=3,
            device_buffer_size=sizes,
        )
        for cache in ("full", "hisparse")
    )
    assert sparse.cache.device_buffer_sizes == sizes
    assert (sparse.prefetcher is not None) == (selector == "dsa-shared" and prefetch is None)
    lockstep = Lockstep(full, sparse)
    assert_exact(lockstep, [prompt(length) for length in (K - 2, 26, 80)], new=41)
    counts = sparse.cache.counters.clone()
    assert counts[:, 1].min() > 0
    assert_exact(lockstep, [prompt(length) for length in (60, K - 1, 13)], new=6)
    sparse.cache.check_integrity()


def test_exact_with_a_size_per_layer_and_simulated_kernels():
    """One request outgrows layer 0, the other one its prefetched group."""
    model = make_tiny_decoder(num_hidden_layers=3)
    addon, runners = tiny_addon(model, "dsa-shared", (0, 1)), []
    for cache in ("full", "hisparse"):
        selector = DSASelector(
            addon, model, top_k=K, max_requests=2, max_model_len=20, kernels=True
        )
        runner = make_runner(
            model,
            cache=cache,
            selector=selector,
            hisparse=hisparse(device_buffer_size=(9, 11, 11)),
            max_model_len=20,
            max_running_requests=2,
            kernels=True,
        )
        for records in runner.cache.records:
            records.fill_(math.nan)
        runners.append(runner)
    assert_exact(Lockstep(*runners), [prompt(8), prompt(10)], new=4)
    assert runners[1].prefetcher and runners[1].cache.counters[:, 1].min() > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the dsa.* other weights")
@pytest.mark.parametrize(
    "selector, sizes", [("quest", PER_LAYER), ("dsa", PER_LAYER), ("dsa-shared", PER_GROUP)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_exact_with_a_size_per_layer_on_a_gpu(files, selector, sizes, dtype, enforce_eager):
    model = decoder(DTYPES[dtype], device="cuda")
    runners = [
        runner_of(
            model, cache, selector, files.get(selector), num_requests=3, device_buffer_size=sizes
        )
        for cache in ("full", "hisparse")
    ]
    lockstep = Lockstep(*runners, enforce_eager=enforce_eager)
    assert_exact(lockstep, [prompt(n) for n in (80, K - 2, 26)], new=41)
    assert runners[1].cache.counters[:, 1].min() > 0


@pytest.mark.parametrize("selector", ["quest", "dsa-shared"])
def test_replay_counts_what_the_engine_counts(files, selector):
    """Number for number, step by step and layer by layer, with a B of each layer's own."""
    sizes = PER_LAYER if selector == "quest" else PER_GROUP
    llm = LLM(
        decoder(),
        selector=selector,
        selector_weights=files.get(selector),
        hisparse=hisparse(device_buffer_size=sizes),
        max_model_len=128,
        max_running_requests=2,
        use_tqdm=False,
    )
    prompts = [prompt(length) for length in (K - 2, 26, 80, 9)]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    counters, counted, selections, seq_lens = llm.cache.counters, [], [], []
    before = counters.clone()
    for event in llm.step(prompts, params):
        if event.layer == 0:
            selections.append(torch.full((LAYERS, len(prompts), K), -1, dtype=torch.int32))
            seq_lens.append(torch.zeros(len(prompts), dtype=torch.int32))
            seq_lens[-1][event.indices] = torch.tensor(event.seq_lens, dtype=torch.int32)
        selections[-1][event.layer, event.indices] = event.positions
        assert event.device_buffer_tokens.shape == (len(event.indices), sizes[event.layer])
        if event.layer == LAYERS - 1:
            counters = llm.cache.counters
            counted.append((counters - before)[:, :2])
            before = counters.clone()
    result = replay(Trace(torch.stack(selections), torch.stack(seq_lens)), "engine", sizes)
    assert torch.equal(torch.stack([result.hits, result.misses], -1), torch.stack(counted))
    assert result.misses.sum(0).min() > 0


@pytest.mark.parametrize("ratio, num_pages", [(1.0, 9), (2.5, 24), (1.01, 9)])
def test_the_host_pool_over_the_mean_of_the_layers(ratio, num_pages):
    """PER_LAYER has 19.4 slots per layer; two requests; pages of 4."""
    runner = runner_of(
        decoder(),
        "hisparse",
        "quest",
        None,
        device_buffer_size=PER_LAYER,
        host_to_device_ratio=ratio,
    )
    assert runner.cache.host.num_pages == num_pages


def test_sizes_that_do_not_fit_the_model(files, monkeypatch):
    """Before a host pool is made: not as many as layers; unequal within a group."""
    monkeypatch.setattr("minihisparse.assembly.HostPool", None)
    for sizes, message in [
        (
            PER_LAYER[:4],
            "--device-buffer-size: got 4 sizes for 5 layers; give one, or one for each",
        ),
        (PER_LAYER, "layer 1 has 9 slots and its anchor, layer 0, 16, .* make them equal"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner_of(
                decoder(),
                "hisparse",
                "dsa-shared",
                files["dsa-shared"],
                device_buffer_size=sizes,
            )


# -- LLM --------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["dsa", "dsa-shared"])
def test_llm_generates_the_same_tokens(files, selector):
    """More requests than rows, so rows are reused; with any cache, with and without prefetch."""
    prompts = [prompt(length) for length in (90, 3, B, 40, B + 1)]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    answers = []
    for cache, prefetch in [("full", None), ("hisparse", None), ("hisparse", False)]:
        llm = LLM(
            decoder(),
            cache=cache,
            selector=selector,
            selector_weights=files[selector],
            hisparse=hisparse(prefetch),
            max_model_len=128,
            max_running_requests=2,
            use_tqdm=False,
        )
        assert isinstance(llm.runner.selector, DSASelector)
        shares = selector == "dsa-shared" and cache == "hisparse" and prefetch is None
        assert (llm.runner.prefetcher is not None) == shares
        answers.append([output["token_ids"] for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1] == answers[2]
    assert len(set(map(tuple, answers[0]))) == len(prompts)


def test_it_is_the_file_that_selects(files, tmp_path):
    """Other weights, other tokens: what was given is used. K of at least S: the same again."""
    other = tiny_addon_file(tmp_path, decoder(), seed=1)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for top_k, same in [(4, False), (128, True)]:
        tokens = [
            LLM(
                decoder(),
                selector="dsa",
                selector_weights=path,
                hisparse=hisparse(top_k=top_k, device_buffer_size=128),
                max_model_len=128,
                max_running_requests=1,
                use_tqdm=False,
            ).generate(prompt(90), params)["token_ids"]
            for path in (files["dsa"], other)
        ]
        assert (tokens[0] == tokens[1]) == same


@pytest.mark.parametrize("cache", ["full", "hisparse"])
def test_the_budget_counts_the_state(files, cache):
    """As many rows as a budget holds, and what is made takes no more than it."""
    budget = 600_000
    runner = make_runner(
        decoder(),
        cache=cache,
        selector="dsa",
        selector_weights=files["dsa"],
        hisparse=hisparse(),
        max_model_len=128,
        hbm_budget_gib=budget / 2**30,
    )
    made, rows = runner.cache, runner.cache.max_requests
    used = made.device_kv_bytes + made.metadata_bytes + runner.selector.state_bytes
    assert 2 <= rows and budget - 2 * used / rows < used <= budget


# -- another selector in its place ------------------------------------------------------------


def given_selections(shared: bool) -> GivenSelections:
    """Random ones of some steps; anchors' alone count if shared."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(4, LAYERS, 2, 80, generator=generator)
    positions = scores.topk(K, dim=-1).indices.sort(dim=-1).values.int()
    positions = positions[:, list(GROUPS)] if shared else positions
    return GivenSelections(positions, 80, torch.device("cpu"), GROUPS if shared else None)


@pytest.mark.parametrize("shared", [False, True])
def test_the_selector_is_switched(files, capsys, shared):
    """In the middle of two requests: if the new one shares otherwise, prefetch ends and says so.
    Either way all bits stay those of the full cache, and so do the tables.
    """
    path = files["dsa-shared"]
    lockstep = Lockstep(
        *(runner_of(decoder(), cache, "dsa-shared", path) for cache in ("full", "hisparse"))
    )
    runner = lockstep.runners["hisparse"]
    old = [one.selector for one in lockstep.runners.values()]
    for num_done, _ in enumerate(lockstep.run([prompt(80), prompt(80)[::-1]], 10)):
        if num_done == 4:
            capsys.readouterr()
            tables = runner.cache.device_buffer_tokens.clone()
            for one in lockstep.runners.values():
                one.use_selector(given_selections(shared))
            said = "prefetch is off: the selector was switched" in capsys.readouterr().err
            assert said == (not shared) and (runner.prefetcher is not None) == shared
            assert runner.cache.anchor_of == (GROUPS if shared else (0, 1, 2, 3, 4))
            assert torch.equal(runner.cache.device_buffer_tokens, tables)
    assert lockstep.first_difference is None and lockstep.num_steps == 9
    counts = runner.cache.counters
    assert counts[:, 1].min() > 0
    assert (counts[0] == counts[1]).all() == shared  # on their own since
    # And back, for requests that begin: it never shares again, and goes on exactly.
    for one, selector in zip(lockstep.runners.values(), old, strict=True):
        for row in list(selector.extents.owners):
            selector.release(row)
        one.use_selector(selector)
    assert_exact(Lockstep(*lockstep.runners.values()), [prompt(90), prompt(B - 2)])


def test_from_quest_to_a_selector_that_shares(files, capsys):
    """There is no prefetch to end."""
    runners = [runner_of(decoder(), cache, "quest", None) for cache in ("full", "hisparse")]
    addon = tiny_addon(decoder(), "dsa-shared", (0, 2))
    for runner in runners:
        assert isinstance(runner.selector, QuestSelector)
        runner.use_selector(
            DSASelector(addon, decoder(), top_k=K, max_requests=2, max_model_len=128)
        )
    assert runners[1].prefetcher is None and "prefetch" not in capsys.readouterr().err
    assert_exact(Lockstep(*runners), [prompt(90), prompt(B - 2)])


# -- what is refused --------------------------------------------------------------------------


def test_errors(files, tmp_path, tiny_decoder, monkeypatch):
    """Each says which flag helps; the file's own errors are in test_addon.py."""

    def make(error, message, selector="dsa", weights=files["dsa"], model=None, **changes):
        with pytest.raises(error, match=message):
            runner_of(model or decoder(), "full", selector, weights, **changes)

    make(ValueError, "--selector 'best' is not one of: quest, dsa, dsa-shared", selector="best")
    make(ValueError, "--selector-weights .* quest has none; pass --selector", selector="quest")
    make(ValueError, "is an add-on for --selector dsa, not for dsa-shared", selector="dsa-shared")
    make(FileNotFoundError, "no such file; --selector-weights", weights=tmp_path / "none")
    make(ValueError, "num_hidden_layers is 5; this model's is 3; .*weights", model=tiny_decoder())
    few = tiny_addon_file(tmp_path, decoder(), num_recent=9)
    make(ValueError, "top_k=8 is less than the 1 first and 9 newest .*--top-k", weights=few)
    make(ValueError, "top_k=8 is less than .*--top-k", weights=few, kernels=True)
    monkeypatch.setattr("minihisparse.assembly.SHIPPED", tmp_path)
    make(FileNotFoundError, "--selector nsa: no add-on for it is shipped", "nsa", None)


# -- the command line -------------------------------------------------------------------------


@pytest.fixture
def run(capsys, tiny_folder):
    """run("verify", ...) -> exit code, last line's JSON, the rest of stdout, stderr."""

    def run(*argv: str):
        sizes = ["--top-k", str(K), "--device-buffer-size", str(B), "--page-size", "4"]
        capsys.readouterr()
        more = ["--model", str(tiny_folder), "--device", "cpu", "--disable-tqdm", *sizes]
        code = cli.main([*argv, *more])
        out, err = capsys.readouterr()
        text, _, line = out.rstrip("\n").rpartition("\n")
        return code, json.loads(line), text, err

    return run


VERIFY = ["verify", "--prompt", "Once upon a time there was a slot. " * 6, "--max-new-tokens", "8"]


@pytest.mark.parametrize("selector", ["dsa", "dsa-shared"])
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--dtype", "bf16"],
        ["--index-dtype", "fp8"],
        ["--no-enable-layer-prefetch"],
        ["--enable-layer-prefetch"],
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore:the dsa.* other weights")
def test_verify(run, tmp_path, tiny_folder, selector, more):
    path = tiny_addon_file(tmp_path, Decoder.from_folder(tiny_folder, progress=False), selector)
    code, report, text, err = run(
        *VERIFY, "--selector", selector, "--selector-weights", str(path), *more
    )
    assert code == 0 and report["exact"] is True and report["max_abs_diff"] == 0.0
    assert text.endswith("exact: 1 requests, 7 decode steps, all bits equal")
    off = "prefetch is off: every layer of this selector selects for itself" in err
    assert off == (selector == "dsa" and "--enable-layer-prefetch" in more)


@pytest.mark.parametrize("selector", ["dsa", "dsa-shared"])
def test_verify_with_a_context_that_is_made_up(run, tmp_path, tiny_folder, selector):
    path = tiny_addon_file(tmp_path, Decoder.from_folder(tiny_folder, progress=False), selector)
    flags = ["--selector", selector, "--selector-weights", str(path)]
    code, report, *_ = run("verify", "--synthetic-context", "60", "--max-new-tokens", "8", *flags)
    assert code == 0 and report["exact"] is True


def test_quest_says_that_there_is_nothing_to_prefetch(run):
    code, report, _, err = run(*VERIFY, "--enable-layer-prefetch")
    assert code == 0 and report["exact"]
    assert err.count("minihisparse: prefetch is off: every layer of this selector selects") == 1
    for flag in ([], ["--no-enable-layer-prefetch"]):
        code, _, _, err = run(*VERIFY, *flag)
        assert code == 0 and "prefetch" not in err


def test_generate_with_either_cache(run, tmp_path, tiny_folder):
    model = Decoder.from_folder(tiny_folder, progress=False)
    path = tiny_addon_file(tmp_path, model, "dsa-shared")
    flags = ["--selector", "dsa-shared", "--selector-weights", str(path), "--ignore-eos"]
    texts = []
    for cache in ("full", "hisparse"):
        code, _, text, err = run("generate", *VERIFY[1:], "--cache", cache, *flags)
        assert code == 0 and "prefetch" not in err and "other weights" not in err
        texts.append(text)
    assert texts[0] == texts[1] and texts[0]


def test_refused_on_the_command_line(run, tmp_path, tiny_folder):
    """Exit code 1, and an error line that says what; an unknown name is bad usage."""
    model = Decoder.from_folder(tiny_folder, progress=False)
    path = tiny_addon_file(tmp_path, model)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"garbage")
    for flags, message in [
        (["--selector-weights", path], f"--selector-weights {path}: quest has none"),
        (["--selector", "dsa-shared", "--selector-weights", path], "an add-on for --selector dsa"),
        (["--selector", "dsa", "--selector-weights", tmp_path / "none"], "there is no such file"),
        (["--selector", "dsa", "--selector-weights", garbage], "garbage is no selector add-on"),
    ]:
        code, report, _, err = run(*VERIFY, *map(str, flags))
        assert code == 1 and message in report["error"] and report["exact"] is None
        assert "Traceback" not in err
    with pytest.raises(SystemExit, match="2"):
        run(*VERIFY, "--selector", "best")
