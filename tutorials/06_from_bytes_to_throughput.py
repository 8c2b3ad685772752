# %% [markdown]
# # 6. From bytes to throughput
#
# - **Question**: how much does HiSparse gain, what decides it, and where does it lose?
# - **Minutes**: 30
# - **Needs**: a CPU; with a GPU, one section more runs
# - **Previous**: 05_one_graph_no_python
#
# Chapter 1 counted bytes and took a GPU from a data sheet. Here the bytes are those that the engine
# allocates, and the machine is described by five numbers that can be measured. They predict the
# throughput for any budget of device memory. Then we measure, on this machine and a tiny model.

# %%
import time

import torch
from torch import Tensor

from minihisparse.assembly import make_runner
from minihisparse.bench_engine import measure_link
from minihisparse.capacity import GIB, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.cost_model import CostModel
from minihisparse.decode_step import DecodeStep
from minihisparse.kernels.resolve_torch import resolve_torch
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.runner import Runner
from minihisparse.scheduler import Scheduler
from minihisparse.trace import Trace
from minihisparse.workload import prompts_of, run_closed_loop

# %% [markdown]
# ## Bytes of a request
#
# SmolLM2-135M in bf16, requests of 8K tokens. `plan_capacity` is what the engine sizes its caches
# by. It counts what grows with requests, for both caches by one rule: records, Quest's bounds,
# tables. The bounds weigh as much as one record per page, and both caches need them: HiSparse makes
# records few, and bounds stay.

# %%
smollm2 = ModelConfig(
    49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True
)
setup = HiSparseConfig(top_k=256, device_buffer_size=512, page_size=16)
K, B, PAGE = setup.top_k, setup.device_buffer_size, setup.page_size
L, S, BF16 = smollm2.num_hidden_layers, 8 * 1024, 2
RECORD = smollm2.record_width * BF16  # bytes


def plan(cache: str, **sizes):
    return plan_capacity(smollm2, setup, cache=cache, itemsize=BF16, max_model_len=S, **sizes)


records = {"full": L * S * RECORD, "hisparse": L * (B + 1) * RECORD}
bounds = L * (S // PAGE) * RECORD
one = {cache: plan(cache, max_running_requests=1).total_bytes for cache in records}
print(f"{'MB per request':16}{'records':>9}{'bounds':>9}{'tables':>9}{'all':>9}")
for cache in records:
    tables = one[cache] - records[cache] - bounds
    numbers = (records[cache], bounds, tables, one[cache])
    print(f"{cache:16}" + "".join(f"{number / 1e6:9.2f}" for number in numbers))

# %% [markdown]
# ## Requests in a budget
#
# So many requests of 8K tokens run at once. Weights, the workspace of a forward pass and CUDA
# graphs come on top of the budget, for both caches alike.

# %%
BUDGETS = [0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]  # GiB


def fits(cache: str, budget_gib: float) -> int:
    try:
        return plan(cache, hbm_budget_gib=budget_gib).max_running_requests
    except ValueError:  # not even one
        return 0


print(f"{'GiB':>6}{'full':>7}{'hisparse':>10}")
for budget in BUDGETS:
    print(f"{budget:6g}{fits('full', budget):7}{fits('hisparse', budget):10}")

# %% [markdown]
# ## Five numbers that describe a machine
#
# A decode step of R requests takes, in microseconds:
#
#     fixed + per_request * R                          full KV
#     + L * bookkeeping                                Resolve, if it had nothing to fetch
#     + R * L * K * miss_rate * record_bytes / link    the missed records, over the bus
#
# The first line is what full KV takes, and HiSparse too; it comes from steps at two or more batch
# sizes. The numbers below are inputs: **put in your own.** These come from an H200 with PCIe 5, and
# `BENCHMARKS.md` has the measurement. The miss rate is a property of model, text and B (chapter 3).

# %%
machine = {"fixed_us": 1300, "per_request_us": 18, "bookkeeping_us": 4, "link_gb_per_s": 50}
MISS_RATE = 0.07

cost = CostModel(**machine, num_layers=L, top_k=K, record_bytes=RECORD)
print("  R     fixed  compute  bookkeeping      bus   step, us    tok/s")
for r in (1, 8, 64, 512):
    compute, bus = cost.per_request_us * r, cost.io_us(r, MISS_RATE)
    line = f"{r:3}{cost.fixed_us:10}{compute:9}{L * cost.bookkeeping_us:13}{bus:9.0f}"
    step_us, rate = cost.hisparse_step_us(r, MISS_RATE), cost.tokens_per_second(r, MISS_RATE)
    print(line + f"{step_us:11.0f}{rate:9.0f}")

# %% [markdown]
# ## Two limits
#
# What is paid once per step is shared by R tokens, what is paid per request is not. So there are
# two limits, in tokens per second, that no number of requests exceeds:
#
#     compute    1 / per_request
#     bus        link / (L * K * miss_rate * record_bytes)
#
# In this model the times add up, and nothing overlaps: attention waits for its records.

# %%
compute_limit = 1e6 / cost.per_request_us
bus_limit = cost.link_gb_per_s * 1e9 / (L * K * MISS_RATE * RECORD)
both_limit = 1 / (1 / compute_limit + 1 / bus_limit)
print(f"limits: compute {compute_limit:,.0f}, bus {bus_limit:,.0f}, both {both_limit:,.0f} tok/s")
for r in (10, 100, 1000, 10_000):
    rate = cost.tokens_per_second(r, MISS_RATE)
    print(f"R = {r:6}: {rate:8,.0f} tok/s, {rate / both_limit:.0%} of the limit")

# %% [markdown]
# ## Throughput over the budget
#
# The same budget for both caches; each runs as many requests as it holds.


# %%
def rates(budget_gib: float, miss_rate: float = MISS_RATE) -> tuple[float, float]:
    """Tokens per second that the model predicts: full KV, HiSparse."""
    full, hisparse = fits("full", budget_gib), fits("hisparse", budget_gib)
    return cost.tokens_per_second(full), cost.tokens_per_second(hisparse, miss_rate)


print(f"{'GiB':>6}{'full':>9}{'hisparse':>10}{'gain':>8}   f: full, h: hisparse, a sign is 1,000")
for budget in BUDGETS:
    full, hisparse = rates(budget)
    gain = f"x{hisparse / full:.2f}" if full else "-"
    bar = {round(full / 1000): "f", round(hisparse / 1000): "h"}
    picture = "".join(bar.get(i, " ") for i in range(60))
    print(f"{budget:6g}{full:9,.0f}{hisparse:10,.0f}{gain:>8}   {picture.rstrip()}")

# %% [markdown]
# ## Where HiSparse loses
#
# **1. Nothing fits.** Less than one request's share of B slots and bounds, and there is nothing to
# run. Full KV is out much earlier.

# %%
for cache, num_bytes in one.items():
    print(f"{cache:9} needs {num_bytes / GIB:.4f} GiB for its first request")

# %% [markdown]
# **2. R is given.** If there are only so many clients and full KV holds all of them, HiSparse adds
# its bookkeeping and the bus to the same step.

# %%
for r in (1, 4, 16, 64, 256):
    slower = cost.hisparse_step_us(r, MISS_RATE) / cost.full_step_us(r) - 1
    print(f"R = {r:3}: a step takes {slower:.0%} longer")

# %% [markdown]
# **3. The budget is large.** That is the same at the other end of the table: full KV is near its
# limit (compute) already, and HiSparse's limit is lower. Exercise 1 asks for the budget.
#
# **4. The bus is full.** With more positions, more misses or a slower link, the last line of the
# formula is all that counts. More requests, the very thing that HiSparse buys, then bring nothing.
# (Only the bus is changed here; a larger K also takes longer to compute.)

# %%
SETTINGS = {  # label -> K, miss rate, GB/s
    "as above": (K, MISS_RATE, machine["link_gb_per_s"]),
    "PCIe 3": (K, MISS_RATE, 12),
    "K = 2048, 13.4% misses": (2048, 0.134, machine["link_gb_per_s"]),
    "both": (2048, 0.134, 12),
}
BATCHES = (1, 4, 16, 64, 256)
shares = {}  # label -> share of the step on the bus, at the largest batch
print(f"{'tok/s at R =':24}" + "".join(f"{r:8}" for r in BATCHES) + "   limit of the bus")
for label, (top_k, miss_rate, link) in SETTINGS.items():
    changed = machine | {"link_gb_per_s": link}
    other = CostModel(**changed, num_layers=L, top_k=top_k, record_bytes=RECORD)
    reached = "".join(f"{other.tokens_per_second(r, miss_rate):8,.0f}" for r in BATCHES)
    step_us = other.hisparse_step_us(BATCHES[-1], miss_rate)
    shares[label] = other.io_us(BATCHES[-1], miss_rate) / step_us
    print(f"{label:24}{reached}{1e6 / other.io_us(1, miss_rate):11,.0f}")
print("on the bus, of a step at R = 256:", {label: f"{x:.0%}" for label, x in shares.items()})

# %% [markdown]
# **5. Too many misses.** At a given budget both numbers of requests are known. The caches are
# equally fast if HiSparse's step takes as long as full KV needs for as many tokens. What is left of
# that time after compute and bookkeeping may go to the bus. Solve for the miss rate:


# %%
def break_even_miss_rate(budget_gib: float) -> float:
    """Above it, full KV is faster; over 1: never; below 0: always."""
    full, hisparse = fits("full", budget_gib), fits("hisparse", budget_gib)
    step_us = hisparse / full * cost.full_step_us(full)  # with equal throughput
    return (step_us - cost.hisparse_step_us(hisparse, 0.0)) / cost.io_us(hisparse, 1.0)


for budget in BUDGETS:
    if fits("full", budget):
        rate = break_even_miss_rate(budget)
        where = "always" if rate > 1 else f"below {rate:.1%} misses"
        print(f"{budget:6g} GiB: HiSparse wins {where}")

# %% [markdown]
# (The larger the budget, the less this should be believed: `per_request` was measured up to some R,
# and here R reaches thousands.)
#
# ## Measure: a machine, a model, a budget
#
# Now the same on this machine, with a tiny random model: its misses and its speed mean nothing
# elsewhere, but the method is the one to use with yours (`bench decode` does all this from the
# command line). The loop below serves so many clients, each with one request, and notes how many
# requests each decode step has. Of the times it takes the first quartile: what disturbs a step
# makes it longer, never shorter.

# %%
tiny = ModelConfig(256, 32, 48, 4, 4, 2, 8, max_position_embeddings=512)
tiny_setup = HiSparseConfig(top_k=32, device_buffer_size=64, page_size=16)
CONTEXT, OUTPUT = 240, 17  # tokens of a prompt; of an answer: one from prefill, 16 decode steps
IDS = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(6)).tolist()
SHAPE = {"selector": "quest", "max_model_len": CONTEXT + OUTPUT, "hisparse": tiny_setup}


def serve(runner: Runner, clients: int, context: int = CONTEXT) -> dict:
    """running: requests per step; step_us: first quartile of the steps with most of them."""
    step, running = DecodeStep(runner, progress=False), []
    scheduler = Scheduler(runner, step)

    def counted(token_ids, rows, seq_lens) -> Tensor:
        running.append(len(rows))
        return step(token_ids, rows, seq_lens)

    scheduler.decode = counted
    loop = {"concurrency": clients, "num_requests": clients}
    run_closed_loop(scheduler, prompts_of(IDS, context), OUTPUT, **loop)
    times = zip(scheduler.timings.step_ms, running, strict=True)
    at_most = sorted(1e3 * ms for ms, n in times if n == max(running))
    return {"running": running, "step_us": at_most[len(at_most) // 4]}


# %% [markdown]
# ## 1. The machine
#
# Full KV at a few batch sizes gives `fixed` and `per_request`. HiSparse that fetches nothing (the
# *no-IO oracle*: all decisions are made, outputs are wrong) gives `bookkeeping`. On a CPU there is
# no bus: a fetch is a copy within memory, so the speed of such a copy stands for the link.

# %%
model = Decoder.random(tiny, seed=0)


def tiny_runner(cache: str, **sizes) -> Runner:
    return make_runner(model, cache=cache, **SHAPE, **sizes)


serve(tiny_runner("full", max_running_requests=2), 2)  # the first run is slow
batches = (1, 2, 4, 8, 16)
full_us = [serve(tiny_runner("full", max_running_requests=r), r)["step_us"] for r in batches]
sizes = {"num_layers": tiny.num_hidden_layers, "top_k": tiny_setup.top_k}
sizes["record_bytes"] = tiny.record_width * model.dtype.itemsize
fitted = CostModel.fit(batches, full_us, **sizes, link_gb_per_s=1)
for r, us in zip(batches, full_us, strict=True):
    print(f"full KV, R = {r:2}: {us:6.0f} us, the fit says {fitted.full_step_us(r):6.0f}")


# %%
def fetch_gb_per_s(runner: Runner, records: int) -> float:
    """Of a copy of random host rows of one layer, the fastest of 20."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(runner.cache.host.records.shape[1], (records,), generator=generator)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        runner.cache.host.read(0, rows)
        seconds.append(time.perf_counter() - start)
    return records * runner.cache.record_bytes / min(seconds) / 1e9


# %% [markdown]
# ## 2. How many run at once
#
# Both caches get 1 MiB. There are twice as many clients as it holds, so half of them wait. What the
# plan says and what the scheduler does must be the same number, at every step.

# %%
BUDGET = 1 / 1024  # GiB


def planned(cache: str, setup: HiSparseConfig = tiny_setup) -> int:
    limits = {"max_model_len": CONTEXT + OUTPUT, "hbm_budget_gib": BUDGET}
    itemsize = model.dtype.itemsize
    capacity = plan_capacity(tiny, setup, cache=cache, itemsize=itemsize, **limits)
    return capacity.max_running_requests


measured = {}
for mode in ("full", "no-io"):
    cache = "full" if mode == "full" else "hisparse"
    runner = tiny_runner(cache, hbm_budget_gib=BUDGET, skip_io=mode == "no-io")
    measured[mode] = serve(runner, 2 * planned(cache))
    print(f"{mode:9} plan: {planned(cache)}, running: {set(measured[mode]['running'])}")

# %% [markdown]
# ## 3. The miss rate, from a trace
#
# The third run is HiSparse itself, and its selections are written down on the way: a `Trace` has
# the positions that each step selected in each layer, and the lengths. (`write_trace` makes a file
# of it, which `bench decode --selections` can replay on a GPU.)


# %%
def watch(runner: Runner) -> tuple[list[Tensor], list[Tensor]]:
    """Lists that fill up as the runner decodes: positions of each layer, lengths of each step."""
    select, positions, lengths = runner.selector.select, [], []

    def watched(layer, q, batch) -> Tensor:
        positions.append(select(layer, q, batch).clone())  # eager steps only: see chapter 5
        if layer == 0:
            lengths.append(batch.seq_lens)
        return positions[-1]

    runner.selector.select = watched
    return positions, lengths


runner = tiny_runner("hisparse", hbm_budget_gib=BUDGET)
positions, lengths = watch(runner)
measured["hisparse"] = serve(runner, 2 * planned("hisparse"))
by_step = torch.stack(positions).unflatten(0, (-1, tiny.num_hidden_layers))
trace = Trace(by_step, torch.stack(lengths))
steps, _, requests, top_k = trace.positions.shape
print(f"{steps} steps, {requests} requests at a time, K = {top_k}")

# %% [markdown]
# Resolve needs no records to say what misses, so the trace is enough, for any number of slots. When
# the lengths start again, new requests have come, with empty slots. For the engine's own B it must
# count the engine's own misses.


# %%
def misses(trace: Trace, slots: int) -> int:
    """Of all steps, layers and requests."""
    _, num_layers, num_requests, _ = trace.positions.shape
    count = 0
    for layer in range(num_layers):
        last = trace.seq_lens[0]
        for positions, seq_lens in zip(trace.positions[:, layer], trace.seq_lens, strict=True):
            if seq_lens[0] <= last[0]:
                tokens = torch.full((num_requests, slots), -1, dtype=torch.int32)
                lru_slots = torch.arange(slots).short().repeat(num_requests, 1)
            done = resolve_torch(positions, seq_lens, tokens, lru_slots)
            tokens, lru_slots, last = done.tokens, done.lru_slots, seq_lens
            count += int(done.fetch.sum())
    return count


counted = misses(trace, tiny_setup.device_buffer_size)
engine_counted = int(runner.cache.counters[:, 1].sum())
miss_rate = counted / trace.positions.numel()  # of K: a page that is not full leaves places empty
print(f"misses: {counted} from the trace, {engine_counted} in the engine; rate {miss_rate:.1%}")

# %% [markdown]
# ## 4. Predicted and measured
#
# Times on a busy machine scatter, and 16 steps are few: expect tens of percent. If the two last
# columns agree about which cache is faster, the model has done its work.

# %%
R = planned("hisparse")
bookkeeping_us = (measured["no-io"]["step_us"] - fitted.full_step_us(R)) / tiny.num_hidden_layers
link = fetch_gb_per_s(runner, counted // (steps * tiny.num_hidden_layers))
more = {"link_gb_per_s": link, "bookkeeping_us": bookkeeping_us}
here = CostModel.fit(batches, full_us, **sizes, **more)
print(f"bookkeeping {bookkeeping_us:.0f} us per layer, link {link:.1f} GB/s")
print(f"{'':9}{'R':>3}{'step, us: model':>17}{'measured':>10}{'tok/s: model':>14}{'measured':>10}")
for mode in ("full", "hisparse"):
    r, step_us = planned(mode), measured[mode]["step_us"]
    rate = here.tokens_per_second(r, None if mode == "full" else miss_rate)
    line = f"{mode:9}{r:3}{1e6 * r / rate:17.0f}{step_us:10.0f}"
    print(line + f"{rate:14,.0f}{1e6 * r / step_us:10,.0f}")

# %% [markdown]
# ## On a GPU
#
# All of it in one go: the five numbers of your machine, and what they say for a small budget, with
# a random model of SmolLM2's size. (What it reads is random too, so it misses far more than a real
# model. The first run compiles the kernels.)


# %%
def run(model: Decoder, setup: HiSparseConfig, context: int, cache: str, **sizes):
    """Requests at once, microseconds per step, miss rate."""
    shape = {"selector": "quest", "max_model_len": context + OUTPUT, "hisparse": setup}
    runner = make_runner(model, cache=cache, **shape, **sizes)
    got = serve(runner, runner.cache.max_requests, context)
    if cache == "full":
        return max(got["running"]), got["step_us"], 0.0
    hits, misses, _ = runner.cache.counters.sum(0).tolist()
    return max(got["running"]), got["step_us"], misses / (hits + misses)


def predict_and_measure(model: Decoder, setup: HiSparseConfig, context, budget_gib, link) -> dict:
    """cache -> (requests at once, predicted tokens per second, measured)."""
    job, budget = (model, setup, context), {"hbm_budget_gib": budget_gib}
    fitted = [run(*job, "full", max_running_requests=r)[:2] for r in (1, 4, 16)]
    found = {cache: run(*job, cache, **budget) for cache in ("full", "hisparse")}
    r, no_io_us, _ = run(*job, "hisparse", skip_io=True, **budget)
    layers = model.config.num_hidden_layers
    record_bytes = model.config.record_width * model.dtype.itemsize
    numbers = {"num_layers": layers, "top_k": setup.top_k, "record_bytes": record_bytes}
    cost = CostModel.fit(*zip(*fitted, strict=True), **numbers, link_gb_per_s=link)
    numbers["bookkeeping_us"] = (no_io_us - cost.full_step_us(r)) / layers
    cost = CostModel.fit(*zip(*fitted, strict=True), **numbers, link_gb_per_s=link)
    print(cost)
    predicted = {"full": cost.tokens_per_second(found["full"][0])}
    predicted["hisparse"] = cost.tokens_per_second(r, found["hisparse"][2])
    return {cache: (r, predicted[cache], 1e6 * r / us) for cache, (r, us, _) in found.items()}


# %%
if torch.cuda.is_available():
    bf16 = torch.cuda.get_device_capability() >= (8, 0)
    numbers = {"device": "cuda", "drawn_on": "cuda"}
    numbers["dtype"] = torch.bfloat16 if bf16 else torch.float16
    large = Decoder.random(smollm2, seed=0, **numbers)
    link = measure_link(large.device)
    for cache, got in predict_and_measure(large, setup, 2048, 0.25, link).items():
        print("{}, R = {}: model {:,.0f} tok/s, measured {:,.0f}".format(cache, *got))
else:
    print("skipped: torch finds no CUDA device")

# %% [markdown]
# ## What you know now
#
# HiSparse turns device memory into requests, and requests into throughput as long as a step has a
# part that they can share. Against it stand bookkeeping and the bus. A few numbers decide, all of
# which can be had before anything is built: bytes of a request, two step times, the speed of the
# link, and a trace.

# %%
assert one["full"] > 8 * one["hisparse"]
assert all(fits("hisparse", budget) >= fits("full", budget) for budget in BUDGETS)
for mode in measured:
    assert set(measured[mode]["running"]) == {planned("full" if mode == "full" else "hisparse")}
assert planned("hisparse") > 2 * planned("full")
assert counted == engine_counted
assert cost.tokens_per_second(10**9, MISS_RATE) <= both_limit
assert rates(1)[1] > rates(1)[0] and rates(64)[1] < rates(64)[0]
for budget in (1, 8, 64):  # at the miss rate found, both are equally fast
    full, hisparse = rates(budget, break_even_miss_rate(budget))
    assert abs(hisparse / full - 1) < 1e-9
print("chapter 6: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. In the table over budgets, full KV overtakes HiSparse between 16 and 32 GiB. Find the budget.
#    Where is it with 2% misses? Where with a link of 200 GB/s?
# 2. More slots per request mean fewer misses, but also fewer requests in the budget. Take the tiny
#    model's trace and its budget of 1 MiB, the five numbers from the beginning of the chapter, and
#    links of 0.01, 0.05 and 1 GB/s. Which B has the highest throughput?

# %% [markdown]
# ## Answers
#
# 1. Requests are whole, so the budget needs to be looked at only where one more request of full KV
#    fits. Fewer misses or a faster link move the crossing up. Over a bus that costs nothing there
#    would be none: both caches have the limit of compute, and HiSparse is nearer to it.
# 2. Both the capacity and the miss rate follow from B, so try some. The slower the link, the larger
#    the best B.


# %%
def crossing_gib(miss_rate: float, link_gb_per_s: float) -> float:
    """The smallest budget at which full KV is at least as fast, with one request or more."""
    changed = machine | {"link_gb_per_s": link_gb_per_s}
    cost = CostModel(**changed, num_layers=L, top_k=K, record_bytes=RECORD)
    for n in range(1, 100_000):  # requests of full KV
        hisparse = n * one["full"] // one["hisparse"]
        if cost.tokens_per_second(n) >= cost.tokens_per_second(hisparse, miss_rate):
            return n * one["full"] / GIB
    return float("inf")


SLOTS = (32, 48, 64, 96, 128, 192)


def rate_with(slots: int, link_gb_per_s: float) -> float:
    """Predicted tokens per second of the tiny model in its budget, with B = slots."""
    changed = HiSparseConfig(top_k=top_k, device_buffer_size=slots, page_size=tiny_setup.page_size)
    cost = CostModel(**machine | {"link_gb_per_s": link_gb_per_s}, **sizes)
    rate = misses(trace, slots) / trace.positions.numel()
    return cost.tokens_per_second(planned("hisparse", changed), rate)


# %%
crossings = {case: crossing_gib(*case) for case in ((MISS_RATE, 50), (0.02, 50), (MISS_RATE, 200))}
for (rate, link), budget in crossings.items():
    print(f"{rate:.0%} misses, {link} GB/s: full KV is faster from {budget:.1f} GiB on")
best = {}
for link in (0.01, 0.05, 1):
    by_slots = {slots: rate_with(slots, link) for slots in SLOTS}
    best[link] = max(by_slots, key=by_slots.get)
    print(f"{link} GB/s: { ({slots: round(rate) for slots, rate in by_slots.items()}) }")
print("best B:", best)

assert 16 < crossings[MISS_RATE, 50] < 32 < crossings[0.02, 50] < crossings[MISS_RATE, 200]
assert best[0.01] > best[0.05] > best[1]
