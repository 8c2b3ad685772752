"""Guards: a request that is overtaken, or starves; one that is half-admitted, or keeps something
when it has ended; an abort at a bad moment; one bad request that takes others with it; a token that
depends on who else runs; layers that somebody looks at while others go on.

After every step `check` compares who owns what with who runs.
"""

import random
from collections.abc import Callable
from functools import cache as cached

import pytest
import torch
from conftest import make_tiny_decoder

from minihisparse import scheduler as scheduler_module
from minihisparse.decode_step import DecodeStep
from minihisparse.full_cache import FullCache
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.host_store import HostPool
from minihisparse.model import Decoder
from minihisparse.quest import QuestSelector
from minihisparse.request import Request
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams, make_generator
from minihisparse.scheduler import Scheduler

CPU = torch.device("cpu")
CACHES = ("hisparse", "full")
K, B, PAGE, MAX_MODEL_LEN = 8, 16, 4, 96
both_caches = pytest.mark.parametrize("cache", CACHES)


def tiny_decoder() -> Decoder:
    return make_tiny_decoder(num_hidden_layers=2, hidden_size=32, num_attention_heads=4)


def make_scheduler(
    cache: str, *, rows: int = 3, tokens: int | None = None, selector_tokens: int | None = None
) -> Scheduler:
    """tokens: what all requests together may have, in the host pool or in FullCache's slots;
    selector_tokens: likewise in the selector's pages. None: as much as all rows may need.
    """
    decoder, all_tokens = tiny_decoder(), rows * MAX_MODEL_LEN
    tokens = all_tokens if tokens is None else tokens
    config = decoder.config
    sizes = {
        "num_layers": config.num_hidden_layers,
        "max_requests": rows,
        "dtype": decoder.dtype,
        "device": CPU,
    }
    if cache == "full":
        kv_cache = FullCache(
            **sizes,
            record_width=config.record_width,
            max_model_len=MAX_MODEL_LEN,
            num_slots=tokens,
            checked=True,
        )
    else:
        host = HostPool(
            **sizes,
            record_width=config.record_width,
            num_pages=tokens // PAGE,
            page_size=PAGE,
            max_pages_per_request=MAX_MODEL_LEN // PAGE,
        )
        kv_cache = HiSparseCache(
            host=host,
            max_requests=rows,
            top_k=K,
            device_buffer_size=B,
            device=CPU,
            checked=True,
        )
    selector = QuestSelector(
        **sizes,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        top_k=K,
        page_size=PAGE,
        max_model_len=MAX_MODEL_LEN,
        num_pages=(all_tokens if selector_tokens is None else selector_tokens) // PAGE,
    )
    runner = Runner(decoder, kv_cache, selector)
    return Scheduler(runner, DecodeStep(runner, progress=False))


def make_request(index: int, prompt_len: int, new: int, **params) -> Request:
    """Its prompt and its random numbers depend on the index alone."""
    prompt = random.Random(index).choices(range(128), k=prompt_len)
    # Sampled: what a random model finds likeliest is nearly always the same token.
    params = SamplingParams(
        **{"temperature": 1.0, "seed": index, "max_new_tokens": new, "ignore_eos": True} | params
    )
    generator = make_generator(params, engine_seed=0, index=index)
    return Request(index, None, prompt, params, generator=generator)


@cached
def tokens_alone(cache: str, index: int, prompt_len: int, new: int) -> list[int]:
    """What a request generates if there is nobody else."""
    scheduler, request = make_scheduler(cache), make_request(index, prompt_len, new)
    scheduler.add(request)
    while scheduler.has_unfinished:
        scheduler.step()
    assert request.finish_reason == "length"
    return request.output_ids


def assert_as_if_alone(cache: str, *requests: Request) -> None:
    for request in requests:
        sizes = len(request.prompt_ids), request.params.max_new_tokens
        expected = tokens_alone(cache, request.index, *sizes)
        assert request.output_ids == expected, f"request {request.index}"
        assert request.finish_reason == "length" and request.error is None


def free_of(scheduler: Scheduler) -> list[int]:
    """What is free of each budget: rows, KV, the selector's pages."""
    cache, pages = scheduler.runner.cache, scheduler.runner.selector.extents
    kv = cache.slots.num_free if isinstance(cache, FullCache) else cache.host.num_free_tokens
    return [cache.max_requests - len(cache.rows), kv, pages.num_free]


def check(scheduler: Scheduler, half_done: bool = False) -> None:
    """Invariants between two steps. half_done: some layers are a step further than others."""
    cache, pages = scheduler.runner.cache, scheduler.runner.selector.extents
    running = {request.row for request in scheduler.running}
    assert cache.rows == pages.owners == running and len(running) == len(scheduler.running)
    assert all(request.row == -1 for request in scheduler.waiting)
    unfinished = [*scheduler.running, *scheduler.waiting]
    assert not any(request.finished for request in unfinished)
    pages.check_integrity()
    if isinstance(cache, FullCache):
        cache.check_integrity()
    else:
        lens = [0] * cache.max_requests
        for request in scheduler.running:
            if len(request.output_ids) > 1:  # else it has had no decode step
                lens[request.row] = len(request.prompt_ids) + len(request.output_ids) - 1
        cache.check_integrity(None if half_done else lens)


def assert_idle(scheduler: Scheduler) -> None:
    check(scheduler)
    assert not scheduler.has_unfinished
    cache, pages = scheduler.runner.cache, scheduler.runner.selector.extents
    kv = cache.slots.num_units if isinstance(cache, FullCache) else cache.host.num_pages * PAGE
    assert free_of(scheduler) == [cache.max_requests, kv, pages.num_units]


def run(scheduler: Scheduler, num_steps: int | None = None) -> None:
    """Steps until nobody is left, or so many times."""
    left = 1000 if num_steps is None else num_steps
    while left and (num_steps or scheduler.has_unfinished):
        left -= 1
        scheduler.step()
        check(scheduler)
    assert left or num_steps, "the scheduler does not come to an end"


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def calls_of(owner: object, method: str, before: Callable) -> None:
    """`before(*args)` runs before each call of the method."""
    right = getattr(owner, method)

    def wrapped(*args):
        before(*args)
        return right(*args)

    setattr(owner, method, wrapped)


# ---- who comes when ----


@both_caches
def test_join_and_leave_between_steps(cache):
    """Requests of all lengths come while others run, and leave at different steps."""
    scheduler = make_scheduler(cache)
    sizes = [(5, 12), (40, 3), (17, 9), (1, 1), (60, 14), (16, 2), (30, 6)]
    requests = [make_request(i, *size) for i, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
        run(scheduler, 2)
    run(scheduler)
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)
    assert len(scheduler.timings.ttft_ms) == len(requests)
    assert scheduler.timings.num_decode_tokens == sum(new - 1 for _, new in sizes)


@both_caches
def test_the_queue_is_not_overtaken(cache):
    """The third request needs all memory: it waits for both who run, and the short ones behind it
    wait for it, though they would fit.
    """
    scheduler = make_scheduler(cache, rows=4, tokens=96)
    sizes = [(20, 12), (20, 4), (80, 16), (2, 2), (2, 2), (2, 2)]
    requests = [make_request(i, *size) for i, size in enumerate(sizes)]
    add(scheduler, *requests)
    admitted: list[int] = []
    calls_of(scheduler.runner, "prefill", lambda row, ids, *_: admitted.append(len(ids)))
    long = requests[2]
    while not long.finished:
        scheduler.step()
        check(scheduler)
        if long.row >= 0:
            assert scheduler.running == [long] and requests[0].finished and requests[1].finished
        elif not long.finished:
            assert scheduler.waiting[0] is long and len(scheduler.waiting) == 4
    run(scheduler)
    assert admitted == [20, 20, 80, 2, 2, 2]
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@both_caches
def test_order_of_the_first_tokens(cache):
    """First come, first served, with a row free now and then."""
    scheduler = make_scheduler(cache, rows=2)
    rng = random.Random(0)
    requests = [make_request(i, rng.randint(1, 40), rng.randint(1, 7)) for i in range(15)]
    add(scheduler, *requests)
    run(scheduler)
    firsts = [request.token_times[0] for request in requests]
    assert firsts == sorted(firsts)
    assert_as_if_alone(cache, *requests)


def test_prefill_and_decode_take_turns(monkeypatch):
    """At most about MAX_PREFILL_TOKENS of prompts, then a token for everybody who runs."""
    monkeypatch.setattr(scheduler_module, "MAX_PREFILL_TOKENS", 10)
    scheduler = make_scheduler("hisparse", rows=6)
    requests = [make_request(i, 8, 20) for i in range(6)]
    add(scheduler, *requests)
    counts = []
    for _ in range(7):
        scheduler.step()
        check(scheduler)
        counts.append([len(request.output_ids) for request in requests])
    assert counts == [
        [1, 1, 0, 0, 0, 0],  # 16 tokens: the second one began below the limit
        [2, 2, 0, 0, 0, 0],
        [2, 2, 1, 1, 0, 0],
        [3, 3, 2, 2, 0, 0],
        [3, 3, 2, 2, 1, 1],
        [4, 4, 3, 3, 2, 2],
        [5, 5, 4, 4, 3, 3],
    ]
    assert len(scheduler.timings.step_ms) == 4


def test_a_step_with_nobody():
    scheduler = make_scheduler("hisparse")
    scheduler.step()
    assert list(scheduler.step_layers()) == [] and not scheduler.timings.step_ms
    assert_idle(scheduler)


# ---- budgets ----

KV, SELECTOR, ROW = {"tokens": 60}, {"selector_tokens": 60}, {"rows": 1}
SHORT = {  # which budget is short -> (cache, sizes, how the refusal begins, the flag that helps)
    "host pages": ("hisparse", KV, "the host pool has", "--host-to-device-ratio"),
    "device slots": ("full", KV, "the device has", "--hbm-budget-gib"),
    "selector, hisparse": ("hisparse", SELECTOR, "the selector's state has", "--hbm-budget-gib"),
    "selector, full": ("full", SELECTOR, "the selector's state has", "--hbm-budget-gib"),
    "rows": ("hisparse", ROW, "all 1 request rows are taken", "--max-running-requests"),
    "rows, full": ("full", ROW, "all 1 request rows are taken", "--max-running-requests"),
}
NOT_ROWS = [name for name in SHORT if not name.startswith("rows")]


@pytest.mark.parametrize("short", SHORT)
def test_a_short_budget_makes_a_request_wait(short):
    """Nothing of the other budgets is kept meanwhile, and it runs as soon as there is room."""
    cache, sizes, *_ = SHORT[short]
    scheduler = make_scheduler(cache, **sizes)
    first, second = make_request(0, 25, 11), make_request(1, 25, 5)
    scheduler.add(first)
    scheduler.step()
    before = free_of(scheduler)
    scheduler.add(second)
    while not first.finished:
        assert free_of(scheduler) == before and list(scheduler.waiting) == [second]
        scheduler.step()
        check(scheduler)
    run(scheduler)
    assert second.token_times[0] > first.token_times[-1]
    assert_as_if_alone(cache, first, second)
    assert_idle(scheduler)


@pytest.mark.parametrize("short", NOT_ROWS)
def test_what_does_not_even_fit_alone_is_refused(short):
    """With budget and flag named; nothing is reserved, and those before and behind it go on."""
    cache, sizes, what, flag = SHORT[short]
    scheduler = make_scheduler(cache, **sizes)
    sizes = [(10, 6), (50, 12), (10, 6), (50, 11), (10, 3)]
    requests = [make_request(i, *size) for i, size in enumerate(sizes)]
    add(scheduler, *requests)
    run(scheduler)
    for request in (requests[1], requests[3]):
        assert request.finish_reason == "error" and request.output_ids == [] and request.row == -1
        assert request.error.startswith(f"prompt {request.index}: {what} ")
        assert flag in request.error and "needed" in request.error
    assert_as_if_alone(cache, requests[0], requests[2], requests[4])
    assert_idle(scheduler)


@pytest.mark.parametrize("short", SHORT)
def test_admit_takes_everything_or_nothing(short):
    cache, sizes, what, flag = SHORT[short]
    scheduler = make_scheduler(cache, **sizes)
    runner = scheduler.runner
    row, before = runner.admit(30), free_of(scheduler)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{what}.*{flag}"):
            runner.admit(32)
        assert free_of(scheduler) == before and runner.cache.rows == {row}
        runner.cache.check_integrity()
        runner.selector.extents.check_integrity()
    runner.release(row)
    assert runner.admit(32) == row
    runner.release(row)
    assert_idle(scheduler)


@pytest.mark.parametrize("short", NOT_ROWS)
def test_the_longest_request_is_told(short):
    cache, sizes, _, flag = SHORT[short]
    runner = make_scheduler(cache, **sizes).runner
    limit, where, helps = runner.longest_request
    assert (limit, helps) == (60, flag) and where in SHORT[short][2]
    runner.release(runner.admit(limit))
    with pytest.raises(ValueError, match=flag):
        runner.admit(limit + 1)
    longest = make_scheduler(cache, rows=2).runner.longest_request
    assert longest[0] >= MAX_MODEL_LEN


# ---- abort ----


@both_caches
def test_abort_while_waiting(cache):
    scheduler = make_scheduler(cache, rows=1)
    first, second, third = (make_request(i, 20, 6) for i in range(3))
    add(scheduler, first, second, third)
    scheduler.step()
    scheduler.abort(second)
    check(scheduler)
    assert second.finish_reason == "abort" and second.output_ids == []
    run(scheduler)
    assert_as_if_alone(cache, first, third)
    assert_idle(scheduler)


@both_caches
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_abort_while_running(cache, num_steps):
    """After its prompt, after its first step, later: what it held is free at once."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 8) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)
    run(scheduler, num_steps)
    gone, before = requests.pop(1), free_of(scheduler)
    tokens = list(gone.output_ids)
    scheduler.abort(gone)
    check(scheduler)
    assert gone.row == -1 and all(
        now > then for now, then in zip(free_of(scheduler), before, strict=True)
    )
    scheduler.abort(gone)  # nothing more happens
    run(scheduler)
    assert gone.output_ids == tokens and gone.finish_reason == "abort"
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@both_caches
@pytest.mark.parametrize("layer", [0, 1])
def test_abort_during_its_prefill(cache, layer):
    """After any layer; the prompt is not run to its end, and others do not notice."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 8) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)
    gone, layers = requests.pop(1), []

    def abort(at_layer: int, row: int, records: torch.Tensor) -> None:
        if len(records) == 33:
            layers.append(at_layer)
            if at_layer == layer:
                scheduler.abort(gone)

    calls_of(scheduler.runner.cache, "write_prompt", abort)
    run(scheduler)
    assert layers == list(range(layer + 1))
    assert gone.finish_reason == "abort" and gone.output_ids == [] and not gone.unread
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@both_caches
@pytest.mark.parametrize("who", ["running", "waiting"])
def test_abort_of_another_one_during_a_prefill(cache, who):
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 8) for i, n in enumerate([20, 33, 7])]
    gone = requests.pop(0 if who == "running" else 2)

    def abort(layer: int, row: int, records: torch.Tensor) -> None:
        if len(records) == 33 and layer == 0:
            assert (gone in scheduler.running) == (who == "running")
            scheduler.abort(gone)

    calls_of(scheduler.runner.cache, "write_prompt", abort)
    add(scheduler, *sorted([*requests, gone], key=lambda request: request.index))
    run(scheduler)
    assert gone.finish_reason == "abort"
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@both_caches
def test_abort_while_a_step_runs(cache):
    """By another thread, say: its token is dropped, the others get theirs."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 8) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)
    run(scheduler, 3)
    gone, right = requests.pop(1), scheduler.decode

    def decode(*args):
        logits = right(*args)
        scheduler.abort(gone)
        return logits

    scheduler.decode = decode
    run(scheduler)
    assert len(gone.output_ids) == 3
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


def test_abort_of_one_that_has_ended():
    scheduler, request = make_scheduler("hisparse"), make_request(0, 5, 2)
    scheduler.add(request)
    run(scheduler)
    scheduler.abort(request)
    assert request.finish_reason == "length"
    assert_idle(scheduler)


# ---- bad requests ----


@both_caches
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at_step", [0, 3])
def test_logits_that_are_no_numbers(cache, bad, at_step):
    """One of three requests, in the prompt or in a step: it ends with an error, and the others get
    the tokens that they get without it.
    """
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 8) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)
    broken, decode, prefill = requests.pop(1), scheduler.decode, scheduler.runner.prefill

    def poisoned_decode(token_ids, rows, seq_lens):
        logits = decode(token_ids, rows, seq_lens).clone()
        if seq_lens[1] == 33 + at_step:
            logits[1, 5] = bad
        return logits

    def poisoned_prefill(row, ids, progress):
        logits = prefill(row, ids, progress)
        return logits * bad if len(ids) == 33 and at_step == 0 else logits

    scheduler.decode, scheduler.runner.prefill = poisoned_decode, poisoned_prefill
    run(scheduler)
    assert broken.finish_reason == "error"
    message = f"prompt 1: after {at_step} new tokens its largest logit is no finite number"
    assert broken.error.startswith(message) and "--dtype fp32" in broken.error
    assert len(broken.output_ids) == at_step
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@both_caches
@pytest.mark.parametrize("layer", [0, 1])
def test_a_prompt_without_device_memory(cache, layer):
    """The others run; what the request had of rows and pages is free again."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 5) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)
    large = requests.pop(1)

    def fail(at_layer: int, row: int, records: torch.Tensor) -> None:
        if len(records) == 33 and at_layer == layer:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.9 GiB.\nMore.")

    calls_of(scheduler.runner.cache, "write_prompt", fail)
    run(scheduler)
    assert large.finish_reason == "error" and large.output_ids == []
    assert large.error == (
        "prompt 1: no device memory for a prompt of 33 tokens (CUDA out of memory. Tried to "
        "allocate 9.9 GiB.); lower --hbm-budget-gib or --max-running-requests"
    )
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyboardInterrupt()], ids=repr)
def test_a_fault_in_a_prefill(error):
    """It is not hidden; that request has ended, the others can go on."""
    scheduler = make_scheduler("hisparse")
    requests = [make_request(i, n, 5) for i, n in enumerate([20, 33, 7])]
    add(scheduler, *requests)

    def fail(layer: int, row: int, records: torch.Tensor) -> None:
        if len(records) == 33:
            raise error

    calls_of(scheduler.runner.cache, "write_prompt", fail)
    with pytest.raises(type(error)):
        scheduler.step()
    check(scheduler)
    assert requests.pop(1).finish_reason == "abort"
    run(scheduler)
    assert_as_if_alone("hisparse", *requests)
    assert_idle(scheduler)


# ---- layers that somebody looks at ----


@both_caches
def test_layers_are_the_step(cache):
    """The same tokens, steps and times as `step`; an event per layer."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 6) for i, n in enumerate([20, 33])]
    add(scheduler, *requests)
    events = []
    while scheduler.has_unfinished:
        events += scheduler.step_layers()
        check(scheduler)
    assert [(event.step, event.layer) for event in events] == [
        (step, layer) for step in range(1, 6) for layer in range(2)
    ]
    assert len(scheduler.timings.step_ms) == 5
    assert scheduler.timings.num_decode_tokens == 10
    assert_as_if_alone(cache, *requests)


@both_caches
@pytest.mark.parametrize("taken", [1, 2])
def test_others_go_on_in_the_middle_of_a_step(cache, taken):
    """Somebody looks at a layer, and meanwhile others step: no token comes twice or is lost."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 9) for i, n in enumerate([20, 33])]
    add(scheduler, *requests)
    scheduler.step()
    layers = scheduler.step_layers()
    for _ in range(taken):
        next(layers)
    late = make_request(2, 12, 4)
    scheduler.add(late)
    run(scheduler, 3)
    assert list(layers) == []  # the rest of that step is over
    run(scheduler)
    assert_as_if_alone(cache, *requests, late)
    assert_idle(scheduler)


@both_caches
def test_abort_in_the_middle_of_a_step(cache):
    """The request whose layers are looked at, and one that runs beside it; then a new request takes
    the row.
    """
    for gone_index in (0, 1):
        scheduler = make_scheduler(cache, rows=2)
        requests = [make_request(i, n, 9) for i, n in enumerate([20, 33])]
        add(scheduler, *requests)
        scheduler.step()
        layers = scheduler.step_layers()
        next(layers)
        gone = requests.pop(gone_index)
        scheduler.abort(gone)
        check(scheduler)
        assert gone.finish_reason == "abort" and gone.row == -1
        requests.append(make_request(2, 12, 4))
        scheduler.add(requests[-1])
        assert list(layers) == []
        run(scheduler)
        assert_as_if_alone(cache, *requests)
        assert_idle(scheduler)


@both_caches
def test_a_step_that_nobody_looks_at_any_more(cache):
    """Closed after its first layer: the step is taken again, with the same tokens."""
    scheduler = make_scheduler(cache)
    requests = [make_request(i, n, 9) for i, n in enumerate([20, 33])]
    add(scheduler, *requests)
    scheduler.step()
    for _ in range(2):
        layers = scheduler.step_layers()
        next(layers)
        layers.close()
        check(scheduler, half_done=True)
    run(scheduler)
    assert_as_if_alone(cache, *requests)
    assert_idle(scheduler)


# ---- everything at once ----

NUM_EVENTS = 2000  # requests that come, are aborted, or end


@both_caches
def test_a_storm(cache):
    """Requests come and go at random, more than there is room for; each one that ends has the
    tokens that it has alone, nobody waits for ever, and everything is free afterwards.
    """
    rng = random.Random(0)
    scheduler = make_scheduler(cache, rows=4, tokens=160, selector_tokens=200)
    kinds = [(rng.randint(1, 60), rng.randint(1, 10)) for _ in range(40)]
    counts = dict.fromkeys(("come", "abort", "length", "error"), 0)
    unfinished: list[tuple[Request, int]] = []
    layers, half_done = None, False  # half_done: some layers are a step further than others
    while sum(counts.values()) < NUM_EVENTS:
        num_steps, stopped_in_between = len(scheduler.timings.step_ms), False
        if rng.random() < 0.4 and len(unfinished) < 12:
            index = rng.randrange(len(kinds))
            unfinished.append((make_request(index, *kinds[index]), index))
            scheduler.add(unfinished[-1][0])
            counts["come"] += 1
        if rng.random() < 0.1 and unfinished:
            scheduler.abort(rng.choice(unfinished)[0])
        if rng.random() < 0.9:
            scheduler.step()
        else:  # somebody looks at a layer or two, and may stop looking
            layers = scheduler.step_layers()
            for _ in range(rng.randint(1, 2)):
                stopped_in_between = next(layers, None) is not None
            if rng.random() < 0.5:
                layers.close()
        half_done = stopped_in_between or (
            half_done and len(scheduler.timings.step_ms) == num_steps
        )
        check(scheduler, half_done)
        for request, index in list(unfinished):
            if request.finished:
                unfinished.remove((request, index))
                counts[request.finish_reason] += 1
                alone = tokens_alone(cache, index, *kinds[index])
                assert request.output_ids == alone[: len(request.output_ids)]
                if request.finish_reason == "length":
                    assert_as_if_alone(cache, request)
    run(scheduler)
    assert_idle(scheduler)
    assert counts.pop("error") == 0 and min(counts.values()) > NUM_EVENTS // 20, counts
