"""Lockstep: exact where the caches are right, and a finger on the place where one is wrong.

Guards: a comparison that passes because it does not look (each fault planted here must be found, at
its step and layer, and no later difference may take its place); prompts around B, where slots turn
from a copy of the prompt into a cache; requests of a batch that mix; rows and host pages that stay
taken when a run ends early.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from dense_reference import dense_logits
from rig import assert_same_bits

from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.model import Decoder
from minihisparse.tokenizer import Tokenizer
from minihisparse.verify import Difference, Lockstep

K, B = 8, 16
SMALL = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=4)
LENGTHS = [1, B - 1, B, B + 1, 150]
NEW = 12


def make_lockstep(
    model: Decoder,
    num_requests: int = 1,
    hisparse: HiSparseConfig = SMALL,
    check_integrity: bool = True,
    enforce_eager: bool = False,
    **settings,
) -> Lockstep:
    """Fresh runners; every record that nobody has written yet is NaN, on both sides."""
    settings = {"max_model_len": 192, "max_running_requests": num_requests} | settings
    runners = [
        make_runner(model, cache=cache, selector="quest", hisparse=hisparse, **settings)
        for cache in ("full", "hisparse")
    ]
    for runner in runners:
        for records in runner.cache.records:
            records.fill_(math.nan)
        runner.cache.checked = model.device.type == "cpu"  # a graph cannot stop to check
    runners[1].cache.host.records.fill_(math.nan)
    return Lockstep(*runners, check_integrity=check_integrity, enforce_eager=enforce_eager)


def make_prompt(length: int, vocab_size: int = 128) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def assert_idle(lockstep: Lockstep) -> None:
    """No request holds anything in either runner: rows, host pages, slots, the selector's pages."""
    for runner in lockstep.runners.values():
        cache, pages = runner.cache, runner.selector.extents
        assert cache.rows == set() and pages.num_free == pages.num_units
        if isinstance(cache, HiSparseCache):
            host = cache.host
            assert host.num_free_tokens == host.num_pages * host.page_size
            assert (cache.device_buffer_tokens == -1).all() and (host.req_to_host_pool == -1).all()
        cache.check_integrity()


def assert_exact(lockstep: Lockstep, prompts: Sequence[Sequence[int]], new: int = NEW) -> None:
    yielded = list(lockstep.run(prompts, new))
    assert lockstep.first_difference is None and lockstep.exact
    assert lockstep.max_abs_diff == 0.0
    assert lockstep.num_steps == new - 1 and len(yielded) == new
    assert [list(tokens) for tokens in zip(*yielded, strict=True)] == lockstep.tokens
    assert_idle(lockstep)


# ---- exact ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", LENGTHS)
def test_exact(tiny_decoder, dtype, length):
    lockstep = make_lockstep(tiny_decoder(dtype))
    assert_exact(lockstep, [make_prompt(length)])
    hits, misses, _ = lockstep.runners["hisparse"].cache.counters.sum(0).tolist()
    assert hits > 0 and (misses > 0) == (length + NEW - 1 > B)  # the cache was put to use


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_exact_in_a_batch(tiny_decoder, dtype):
    lockstep = make_lockstep(tiny_decoder(dtype), num_requests=3)
    assert_exact(lockstep, [make_prompt(n) for n in (B - 3, 1, 150)])
    assert len(set(map(tuple, lockstep.tokens))) == 3


def test_exact_with_rows_of_earlier_requests(tiny_decoder):
    """The rows and pages hold what the last requests left; one row more than is used."""
    lockstep = make_lockstep(tiny_decoder(), num_requests=4)
    for lengths in ((150, 40, B), (5, 160, B + 1), (1, 1, 1)):
        list(lockstep.run([make_prompt(n) for n in lengths], NEW))
        assert lockstep.exact and lockstep.max_abs_diff == 0.0
        assert_idle(lockstep)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 16, "device_buffer_size": 16, "page_size": 16},  # every miss evicts
        {"top_k": 8, "device_buffer_size": 9, "page_size": 1},
        {"top_k": 8, "device_buffer_size": 64, "page_size": 8},
    ],
    ids=str,
)
def test_exact_with_other_sizes(tiny_decoder, changes):
    assert_exact(
        make_lockstep(tiny_decoder(), 2, HiSparseConfig(**changes)),
        [make_prompt(n) for n in (changes["device_buffer_size"] - 2, 130)],
    )


def test_tokens_are_dense_greedy_when_all_is_selected(tiny_decoder):
    """An oracle outside of caches and selectors: the argmax of dense attention."""
    model = tiny_decoder()
    prompt = make_prompt(40)
    lockstep = make_lockstep(model, hisparse=HiSparseConfig(top_k=64, page_size=4))
    assert_exact(lockstep, [prompt])
    expected = list(prompt)
    for _ in range(NEW):
        best = dense_logits(model, torch.tensor(expected))[-1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3  # no tie
        expected.append(int(best.indices[0]))
    assert lockstep.tokens == [expected[40:]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_exact_on_a_gpu(tiny_decoder, enforce_eager, dtype):
    """Graphs of both caches, or layer by layer."""
    model = tiny_decoder(dtype, device="cuda")
    lockstep = make_lockstep(model, 4, enforce_eager=enforce_eager)
    assert lockstep.use_graphs != enforce_eager
    assert_exact(lockstep, [make_prompt(n) for n in (B - 3, 1, 150)], new=40)
    assert lockstep.runners["hisparse"].cache.counters.sum(0).min() > 0


@pytest.mark.gpu
def test_graphs_and_layers_give_the_same_tokens(tiny_decoder):
    model = tiny_decoder(device="cuda")
    tokens = []
    for enforce_eager in (False, True):
        lockstep = make_lockstep(model, 2, enforce_eager=enforce_eager)
        assert_exact(lockstep, [make_prompt(40), make_prompt(B)], new=20)
        tokens.append(lockstep.tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_a_fault_is_found_behind_a_graph(tiny_decoder):
    """A record of layer 1 that differs: the first newest record made from it is one layer later."""
    lockstep = make_lockstep(tiny_decoder(device="cuda"))
    tokens = lockstep.run([PROMPT], STEPS)
    next(tokens)
    full = lockstep.runners["full"].cache
    start, _ = full.slots.extent_of(0)
    full.records[1][start : start + len(PROMPT)] += 1
    next(tokens)
    found = lockstep.first_difference
    assert (found.step, found.layer, found.what) == (1, 2, "a record in the host pool")
    tokens.close()
    assert_idle(lockstep)


def test_timings_and_progress(tiny_decoder):
    lockstep = make_lockstep(tiny_decoder(), num_requests=2)
    calls = []
    prompts = [make_prompt(20), make_prompt(30)]
    list(lockstep.run(prompts, 5, progress=lambda: calls.append(1)))
    num_layers = lockstep.runners["full"].num_layers
    assert len(calls) == 4 * num_layers  # two prompts, two caches
    for timings in lockstep.timings.values():
        assert len(timings.ttft_ms) == 2 and len(timings.step_ms) == 4
        assert timings.num_decode_tokens == 8
        assert min(timings.ttft_ms + timings.step_ms) > 0
    assert all(workspace.peak_bytes > 0 for workspace in lockstep.workspaces.values())


# ---- planted faults, all in the HiSparse runner ----

PROMPT = make_prompt(40)  # more than B: the first step fetches everything
STEPS = 6
Fault = Callable[[Lockstep], None]


def wrap(owner: object, method: str, layer: int, call: int, replacement: Callable) -> None:
    """The method's `call`-th call (from 0) with this layer becomes replacement(right, *args)."""
    right, calls = getattr(owner, method), []

    def wrapped(this_layer, *args):
        if this_layer == layer:
            calls.append(1)
            if len(calls) == call + 1:
                return replacement(right, this_layer, *args)
        return right(this_layer, *args)

    setattr(owner, method, wrapped)


def one_ulp(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    """A copy with one element moved to the next number."""
    tensor = tensor.clone()
    tensor[index] = torch.nextafter(tensor[index], torch.tensor(math.inf))
    return tensor


def wrong_slot(lockstep: Lockstep) -> None:
    def replacement(right, *args):
        slots = right(*args).clone()
        slots[0, 0] = slots[0, 1]
        return slots

    wrap(lockstep.runners["hisparse"].cache, "resolve", 1, 2, replacement)  # the third step


def no_write_through_to_the_host(lockstep: Lockstep) -> None:
    host = lockstep.runners["hisparse"].cache.host
    wrap(host, "write", 1, 4, lambda right, *args: None)  # call 0 was the prompt


def wrong_record_of_the_prompt(lockstep: Lockstep) -> None:
    def replacement(right, layer, rows, records):
        right(layer, rows, one_ulp(records, 11, 5))

    wrap(lockstep.runners["hisparse"].cache.host, "write", 2, 0, replacement)


def prompt_in_shifted_rows(lockstep: Lockstep) -> None:
    def replacement(right, layer, rows, records):
        right(layer, rows, records.roll(1, dims=0))

    wrap(lockstep.runners["hisparse"].cache.host, "write", 0, 0, replacement)


def fetch_from_another_layer(lockstep: Lockstep) -> None:
    cache = lockstep.runners["hisparse"].cache

    def replacement(right, layer, *args):
        host_rows, _ = args[-1]
        assert len(host_rows)  # there is something to fetch
        read = cache.host.read
        cache.host.read = lambda _, rows: read(0, rows)
        right(layer, *args)
        cache.host.read = read

    wrap(cache, "_fetch", 1, 0, replacement)


def no_fetch(lockstep: Lockstep) -> None:
    wrap(lockstep.runners["hisparse"].cache, "_fetch", 2, 0, lambda right, *args: None)


def another_position_selected(lockstep: Lockstep) -> None:
    def replacement(right, *args):
        positions = right(*args).clone()
        first = int(positions[0, 0])
        positions[0, 0] = first - 1 if first else -1
        return positions.sort(dim=1).values if first else positions.roll(-1, dims=1)

    wrap(lockstep.runners["hisparse"].selector, "select", 0, 1, replacement)


def logits_one_ulp(lockstep: Lockstep) -> None:
    runner, calls = lockstep.runners["hisparse"], []
    right = runner.logits

    def logits(hidden):
        calls.append(1)
        return one_ulp(right(hidden), 0, 7) if len(calls) == 2 else right(hidden)

    runner.logits = logits


def prompt_logits_one_ulp(lockstep: Lockstep) -> None:
    runner = lockstep.runners["hisparse"]
    right = runner.prefill
    runner.prefill = lambda *args: one_ulp(right(*args), 7)


FAULTS = [  # fault, step, layer, what, whether check_integrity sees it too
    (wrong_slot, 3, 1, "attention", False),
    (no_write_through_to_the_host, 4, 1, "a record in the host pool", True),
    (wrong_record_of_the_prompt, 0, 2, "a record in the host pool", False),
    (prompt_in_shifted_rows, 0, 0, "a record in the host pool", False),
    (fetch_from_another_layer, 1, 1, "attention", True),
    (no_fetch, 1, 2, "attention", True),
    (another_position_selected, 2, 0, "positions", False),
    (logits_one_ulp, 2, -1, "logits", False),
    (prompt_logits_one_ulp, 0, -1, "next-token logits of the prompt", False),
]


@pytest.mark.parametrize("fault, step, layer, what, breaks", FAULTS, ids=lambda f: None)
def test_a_fault_is_found_where_it_is(tiny_decoder, fault: Fault, step, layer, what, breaks):
    """Without integrity checks the run goes on to its end, and the first difference stays."""
    lockstep = make_lockstep(tiny_decoder(), check_integrity=False)
    fault(lockstep)
    list(lockstep.run([PROMPT], STEPS))
    found = lockstep.first_difference
    assert not lockstep.exact
    assert (found.step, found.layer, found.what) == (step, layer, what)
    assert lockstep.num_steps == STEPS - 1
    assert str(found).startswith(f"step {step}, {'logits' if layer < 0 else f'layer {layer}'}: ")
    for runner in lockstep.runners.values():
        assert runner.cache.rows == set()


@pytest.mark.parametrize("fault, step, layer, what, breaks", FAULTS, ids=lambda f: None)
def test_a_fault_with_integrity_checks(tiny_decoder, fault: Fault, step, layer, what, breaks):
    """A slot that is not its host row ends the run at that step; the difference is known then."""
    lockstep = make_lockstep(tiny_decoder())
    fault(lockstep)
    if breaks:
        with pytest.raises(AssertionError, match=f"layer {layer}, request row 0: a slot differs"):
            list(lockstep.run([PROMPT], STEPS))
        assert lockstep.num_steps == step
    else:
        list(lockstep.run([PROMPT], STEPS))
    found = lockstep.first_difference
    assert (found.step, found.layer, found.what) == (step, layer, what)
    assert_idle(lockstep)


def test_a_fault_in_one_request_of_a_batch(tiny_decoder):
    """The last of three; the newest record of that request only."""
    lockstep = make_lockstep(tiny_decoder(), num_requests=3, check_integrity=False)

    def replacement(right, layer, rows, records):
        right(layer, rows, one_ulp(records, 2, 9))

    # Three prompts' writes, then one per step.
    wrap(lockstep.runners["hisparse"].cache.host, "write", 1, 3 + 1, replacement)
    list(lockstep.run([make_prompt(n) for n in (40, 5, B)], STEPS))
    found = lockstep.first_difference
    assert (found.step, found.layer, found.what) == (2, 1, "a record in the host pool")
    assert 0 < found.max_abs_diff < 1e-6


def test_max_abs_diff_is_over_logits(tiny_decoder):
    lockstep = make_lockstep(tiny_decoder())
    logits_one_ulp(lockstep)
    list(lockstep.run([PROMPT], STEPS))
    assert 0 < lockstep.max_abs_diff < 1e-6
    assert lockstep.first_difference.max_abs_diff == lockstep.max_abs_diff
    assert f"{lockstep.max_abs_diff:.3e}" in str(lockstep.first_difference)

    lockstep = make_lockstep(tiny_decoder())
    wrong_record_of_the_prompt(lockstep)  # a record differs; the logits need not
    list(lockstep.run([PROMPT], 1))
    assert lockstep.max_abs_diff == 0.0 < lockstep.first_difference.max_abs_diff


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_infinitely_far(tiny_decoder, bad):
    """What a read of unwritten memory brings; max(0.0, nan) is 0.0, which would look exact."""
    lockstep = make_lockstep(tiny_decoder())
    runner, right = lockstep.runners["hisparse"], lockstep.runners["hisparse"].logits

    def logits(hidden):
        out = right(hidden).clone()
        out[0, 3] = bad
        return out

    runner.logits = logits
    list(lockstep.run([PROMPT], 3))
    assert not lockstep.exact and lockstep.max_abs_diff == math.inf
    assert "differs by up to inf" in str(lockstep.first_difference)


def test_minus_zero_is_a_difference(tiny_decoder):
    lockstep = make_lockstep(tiny_decoder())
    lockstep._compare(1, 0, "attention", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert lockstep.first_difference == Difference(1, 0, "attention", 0.0)
    lockstep = make_lockstep(tiny_decoder())
    nan = torch.tensor([math.nan])
    lockstep._compare(1, -1, "logits", nan, nan.clone())
    assert lockstep.exact and lockstep.max_abs_diff == 0.0


# ---- where a run ends ----


def test_stop_ids(tiny_decoder):
    prompts = [make_prompt(n) for n in (40, 5, B)]
    lockstep = make_lockstep(tiny_decoder(), num_requests=3)
    list(lockstep.run(prompts, NEW))
    free = lockstep.tokens

    def run(stop_ids):
        other = make_lockstep(tiny_decoder(), num_requests=3)
        assert len(list(other.run(prompts, NEW, stop_ids))) == len(other.tokens[0])
        assert other.exact
        assert_idle(other)
        return other.tokens

    def end(stop_ids):
        """Until each request has met one; the others run on meanwhile."""
        first = [next((i for i, t in enumerate(ids) if t in stop_ids), NEW) for ids in free]
        return min(NEW, max(first) + 1)

    at_once = {ids[0] for ids in free}
    late = {free[0][0], free[1][4], free[2][7]}
    unused = set(range(128)) - {token for ids in free for token in ids}
    assert end(at_once) == 1 and 1 < end(late) < NEW and end(unused) == NEW
    for stop_ids in (at_once, late, unused, {free[0][0]}):
        assert run(stop_ids) == [ids[: end(stop_ids)] for ids in free]


def test_one_new_token_takes_no_step(tiny_decoder):
    lockstep = make_lockstep(tiny_decoder())
    assert_exact(lockstep, [PROMPT], new=1)
    assert lockstep.timings["hisparse"].report()["tpot_ms_p50"] is None


def test_closing_early_gives_everything_back(tiny_decoder):
    for taken in range(3):  # 0: not even started
        lockstep = make_lockstep(tiny_decoder(), num_requests=2)
        tokens = lockstep.run([PROMPT, PROMPT[:3]], NEW)
        for _ in range(taken):
            next(tokens)
        if taken:
            assert lockstep.runners["hisparse"].cache.rows == {0, 1}
        tokens.close()
        assert_idle(lockstep)
        assert_exact(lockstep_again(lockstep), [PROMPT])


def lockstep_again(lockstep: Lockstep) -> Lockstep:
    """A new run on the same runners."""
    return Lockstep(*lockstep.runners.values())


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["full", "hisparse"])
@pytest.mark.parametrize("method, call", [("prefill", 2), ("decode_layer", 5), ("logits", 1)])
def test_an_exception_gives_everything_back(tiny_decoder, name, method, call, error):
    lockstep = make_lockstep(tiny_decoder(), num_requests=2)
    runner = lockstep.runners[name]
    right, calls = getattr(runner, method), []

    def fails(*args):
        calls.append(1)
        if len(calls) == call:
            raise error
        return right(*args)

    setattr(runner, method, fails)
    with pytest.raises(type(error)):
        list(lockstep.run([PROMPT, PROMPT[:7]], NEW))
    assert len(calls) == call
    assert_idle(lockstep)
    assert_exact(lockstep_again(lockstep), [PROMPT, PROMPT[:7]])


@pytest.mark.parametrize(
    "settings, hisparse, message",
    [
        ({"max_running_requests": 1}, SMALL, "all 1 request rows are taken"),
        ({"max_model_len": 50}, SMALL, "more than a request may have, 50"),
        # FullCache has room, the host pool has not.
        (
            {},
            HiSparseConfig(top_k=K, device_buffer_size=B, page_size=4, host_to_device_ratio=2.0),
            "the host pool has",
        ),
    ],
)
def test_a_refused_request_gives_back_those_before_it(tiny_decoder, settings, hisparse, message):
    lockstep = make_lockstep(tiny_decoder(), 2, hisparse, **settings)
    with pytest.raises(ValueError, match=message):
        list(lockstep.run([PROMPT[:20], [1] * 60], NEW))
    assert_idle(lockstep)
    assert_exact(lockstep_again(lockstep), [PROMPT[:20]])


@pytest.mark.parametrize(
    "prompts, new, message",
    [
        ([[1, 2], []], NEW, "prompt 1: it is empty"),
        ([[1, 2]], 0, "max_new_tokens: got 0"),
        ([[1, 2]], -3, "max_new_tokens: got -3"),
        ([], NEW, "no prompts"),
    ],
)
def test_nothing_to_do_is_refused(tiny_decoder, prompts, new, message):
    lockstep = make_lockstep(tiny_decoder(), num_requests=2)
    with pytest.raises(ValueError, match=message):
        list(lockstep.run(prompts, new))
    assert_idle(lockstep)


# ---- the real model ----


@pytest.fixture(scope="module")
def real_ids(smollm2_dir) -> list[int]:
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    return Tokenizer.from_folder(smollm2_dir).encode(text)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def real_model(smollm2_dir, request) -> Decoder:
    return Decoder.from_folder(smollm2_dir, dtype=request.param, progress=False)


@pytest.mark.model
@pytest.mark.parametrize("lengths", [(100,), (511,), (512,), (513,), (600,), (100, 511, 600)])
def test_real_model_is_exact(real_model, real_ids, lengths):
    """K = 256, B = 512, the defaults; 511 and 512 cross B on the way."""
    lockstep = make_lockstep(real_model, len(lengths), HiSparseConfig(), max_model_len=640)
    # Each request reads another part of the text.
    prompts = [real_ids[100 * i : 100 * i + length] for i, length in enumerate(lengths)]
    assert_exact(lockstep, prompts, new=4)
    cache = lockstep.runners["hisparse"].cache
    hits, misses, _ = cache.counters.sum(0).tolist()
    assert hits > 0 and (misses > 0) == (max(lengths) + 3 > 512)


@pytest.mark.model
@pytest.mark.slow
def test_real_model_is_exact_after_6000_tokens(smollm2_dir):
    """Far beyond B, on the source of a module of the standard library."""
    ids = Tokenizer.from_folder(smollm2_dir).encode(Path(argparse.__file__).read_text("utf-8"))
    model = Decoder.from_folder(smollm2_dir, dtype=torch.bfloat16, progress=False)
    lockstep = make_lockstep(model, 1, HiSparseConfig(), max_model_len=6016)
    assert_exact(lockstep, [ids[:6000]], new=8)
    assert lockstep.runners["hisparse"].cache.counters.sum(0)[2] > 0  # evictions


@pytest.mark.model
def test_real_model_fault_is_found(real_model, real_ids):
    """One element of one record of layer 17, fetched in the first step."""
    lockstep = make_lockstep(real_model, 1, HiSparseConfig(), max_model_len=640)
    cache = lockstep.runners["hisparse"].cache

    def replacement(right, layer, plan):
        right(layer, plan)
        _, slots = plan
        cache.records[layer].flatten(0, 1)[slots[100], -1] = 1000.0

    wrap(cache, "_fetch", 17, 0, replacement)
    with pytest.raises(AssertionError, match="layer 17, request row 0: a slot differs"):
        list(lockstep.run([real_ids[:600]], 3))
    found = lockstep.first_difference
    assert (found.step, found.layer, found.what) == (1, 17, "attention")


def test_one_ulp_is_one_ulp():
    """The planted faults are as small as they say."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y = one_ulp(x, 1, 0)
    assert (x != y).sum() == 1 and y[1, 0] - x[1, 0] == 2**-22
    assert_same_bits(x[0], y[0])
