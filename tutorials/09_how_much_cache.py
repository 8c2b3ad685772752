# %% [markdown]
# # 9. How much cache?
#
# - **Question**: how many slots must a GPU keep per request and layer?
# - **Minutes**: 25
# - **Needs**: a CPU
# - **Previous**: 08_hiding_the_rest
#
# So far B, the number of slots, was 2K because the paper says so. The paper found it by replaying
# what a model had selected. Here we do so: record, replay, get the misses of all B at once, choose
# a B, and take it to SGLang. Misses depend on model and text, so repeat this with yours.

# %%
import json
from pathlib import Path

import torch

from minihisparse.assembly import make_runner
from minihisparse.capacity import GIB
from minihisparse.config import HiSparseConfig
from minihisparse.cost_model import CostModel
from minihisparse.decode_step import DecodeStep
from minihisparse.deployment import Deployment
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.replay import replay
from minihisparse.scheduler import Scheduler
from minihisparse.sglang import SGLangFlags
from minihisparse.sizing import MissCurves, miss_curves
from minihisparse.slot_sharing import compare_per_layer, share_slots
from minihisparse.trace import Trace, read_trace
from minihisparse.trace_recorder import TraceRecorder
from minihisparse.workload import prompts_of, run_closed_loop

# %% [markdown]
# ## 1. Record
#
# A tiny random model, two request rows, three requests. The recorder has to be there before the
# `DecodeStep`, whose CUDA graphs (on a GPU) copy the selections too. It writes step by step.

# %%
tiny = ModelConfig(256, 32, 48, 4, 4, 2, 8, max_position_embeddings=512)
runner = make_runner(
    Decoder.random(tiny, seed=9),
    cache="hisparse",
    selector="quest",
    hisparse=HiSparseConfig(top_k=32, device_buffer_size=64, page_size=4),
    max_model_len=200,
    max_running_requests=2,
)
ids = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(9)).tolist()
file = Path("09_trace.safetensors")  # deleted below
about = {"model": "tiny, random", "selector": "quest"}
with TraceRecorder(runner, file, metadata=about, max_steps=100) as recorder:
    scheduler = Scheduler(runner, recorder.around(DecodeStep(runner, progress=False)))
    run_closed_loop(scheduler, prompts_of(ids, 150), 41, concurrency=2, num_requests=3)
print(f"{recorder.num_steps} steps in {file.stat().st_size:,} bytes")

# %% [markdown]
# In the file: positions; lengths, 0 where a row has no request; where it all comes from. There are
# no records and no tokens, since they do not decide what misses.

# %%
recorded = read_trace(file)
print("positions, [steps, layers, requests, K]:", tuple(recorded.positions.shape))
print("step 0, layer 2, request 0:", recorded.positions[0, 2, 0, :12].tolist(), "...")
print("seq_lens:", {step: recorded.seq_lens[step].tolist() for step in (0, 39, 40, 79)})
print(*recorded.metadata.items(), sep="\n")

# %% [markdown]
# ## 2. Replay what the engine did
#
# `replay` has the engine's own rule as a policy. At the B that was recorded it must count what the
# engine counted, layer by layer. If it does, other policies and other B can be believed too.

# %%
counted = json.loads(recorded.metadata["counters"])["misses"]
recorded_B = json.loads(recorded.metadata["device_buffer_size"])
replayed = replay(recorded, "engine", recorded_B).misses.sum(0).tolist()
print(f"misses per layer at B = {recorded_B}: engine {counted}, replay {replayed}")
assert replayed == counted == runner.cache.counters[:, 1].tolist()
del recorded  # it maps the file into memory
file.unlink()

# %% [markdown]
# ## A trace worth sizing
#
# What a random model selects means nothing. So from here on the trace is **made up**: a position's
# score is a lasting taste plus a mood that changes slowly, and the K highest are selected. Layer 0
# barely moves, layer 3 jumps. Positions that drop out often come back, as in real text.

# %%
K, PROMPT, STEPS, WARMUP = 64, 1200, 400, 64  # the first steps fill empty slots: not counted
KINDS = ((0.998, 2.0), (0.99, 1.5), (0.97, 1.5), (0.9, 1.0))  # memory and taste of each layer
generator = torch.Generator().manual_seed(9)


def wander(memory: float, taste: float) -> torch.Tensor:
    """Selections [STEPS, K] of a layer. memory: the part of the mood that outlives a step."""
    lasting, mood = torch.randn(2, PROMPT + STEPS, generator=generator)
    steps = []
    for S in range(PROMPT + 1, PROMPT + STEPS + 1):
        news = torch.randn(PROMPT + STEPS, generator=generator)
        mood = memory * mood + (1 - memory**2) ** 0.5 * news
        steps.append((taste * lasting + mood)[:S].topk(K).indices.sort().values)
    return torch.stack(steps).int()


layers, L = [wander(*kind) for kind in KINDS], len(KINDS)
seq_lens = torch.arange(PROMPT + 1, PROMPT + STEPS + 1, dtype=torch.int32)[:, None]
trace = Trace(torch.stack(layers, 1)[:, :, None], seq_lens)

# %% [markdown]
# ## 3. The points of Figure 6
#
# Nothing kept beyond the last step (B = K), four rules at 2K, LRU at 4K. Beside ours, the paper's
# (78 layers, 100K tokens) and those of SmolLM2-135M with the `dsa` add-on (`BENCHMARKS.md`).

# %%
POINTS = {  # policy, B / K: misses in % of the paper, of SmolLM2
    ("last_step", 1): (30.0, 25.6),
    ("fifo", 2): (17.2, 12.9),
    ("random", 2): (16.1, 11.8),
    ("lru", 2): (13.4, 9.7),
    ("belady", 2): (8.2, 5.9),
    ("lru", 4): (6.7, 3.9),
}
points = {(policy, times): replay(trace, policy, times * K) for policy, times in POINTS}
print("policy       B    here  SmolLM2  paper   here, by layer")
for (policy, times), (paper, smollm2) in POINTS.items():
    result = points[policy, times]
    by_layer = "".join(f"{rate:7.1%}" for rate in result.layer_miss_rates(WARMUP))
    line = f"{policy:10}{times:>3}K{result.miss_rate(WARMUP):8.1%}{smollm2:8}%{paper:6}%"
    print(line + "   " + by_layer)

# %% [markdown]
# LRU beats FIFO and random. **Belady** beats all: it evicts what is needed again last. Follow it
# through ten accesses (K = 1, three slots):


# %%
def belady(accesses: list[int], slots: int) -> int:
    """Misses; prints each access."""
    cache, misses = [], 0
    for now, position in enumerate(accesses):
        future, note = accesses[now + 1 :], "hit"
        if position not in cache:
            misses, note = misses + 1, "miss"
            if len(cache) == slots:  # the furthest next use goes; never is further than any
                waits = {p: future.index(p) if p in future else len(future) for p in cache}
                cache.remove(victim := max(cache, key=waits.get))
                note = f"miss, evicts {victim}; to come: {future}"
            cache.append(position)
        print(f"access {position}: {cache!s:10} {note}")
    return misses


def one_by_one(accesses: list[int], prompt: int = 99) -> Trace:  # prompt: its tokens; K = 1
    lens = torch.arange(prompt + 1, prompt + 1 + len(accesses), dtype=torch.int32)
    return Trace(torch.tensor(accesses, dtype=torch.int32).view(-1, 1, 1, 1), lens[:, None])


TEN = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3]
by_hand = belady(TEN, 3)
ten = {rule: int(replay(one_by_one(TEN), rule, 3).misses.sum()) for rule in ("belady", "lru")}
print(f"misses: {by_hand} by hand, {ten} by replay")

# %% [markdown]
# No rule has fewer misses, but each eviction looked at the future, and what a model will select
# depends on tokens that it has not written yet. So Belady is a bound and no policy: it says how
# much a better rule could gain at most. Twice the slots gain as much, with plain LRU.
#
# ## 4. All B at once
#
# What LRU holds in B slots, it holds in B + 1 too. So *one* list will do, last used first: a
# position at place d is a hit at every B >= d. This d is its **stack distance**. Naively, for B
# below the prompt's length (slots begin empty then), at O(n) per access:


# %%
def naive_distances(positions: list[list[int]], lens: list[int]) -> list[int]:
    stack, distances = [], []
    for picks, S in zip(positions, lens, strict=True):
        picks = [p for p in picks if p != S - 1]  # the newest is a hit anyway, and in no slot
        distances += [stack.index(p) + 1 if p in stack else 10**9 for p in picks]  # 10^9: never
        stack = picks[::-1] + [p for p in stack if p not in picks]
    return distances


curves = miss_curves(trace)  # the same with a tree, at O(log n) per access
same = {}  # layer -> equal at all B
for layer in (1, 3):
    found = torch.tensor(naive_distances(layers[layer].tolist(), seq_lens[:, 0].tolist()))
    misses = [int((found > B).sum()) for B in range(K, PROMPT)]
    same[layer] = misses == curves.layer_misses()[layer, K:PROMPT].tolist()
print(f"equal at {PROMPT - K} B, by layer: {same}")

# %% [markdown]
# The engine's rule differs: hits rank above what was just fetched, and Resolve notes nothing while
# S <= B. What was a hit, and when notes begin, depends on B. So there is no one list for all B, and
# one more slot may even bring a miss more: see four accesses after a prompt of 3 tokens. Such a
# rule is replayed at each B wanted. How far is it from the curve?

# %%
four, accesses = {}, one_by_one([0, 4, 4, 0], prompt=3)
for policy in ("lru", "engine"):
    four[policy] = [int(replay(accesses, policy, B).misses.sum()) for B in (3, 4)]
print(f"four accesses, misses with 3 and 4 slots: {four}")
curves, gaps = miss_curves(trace, warmup_steps=WARMUP), []
print(f"{'B':>5}{'LRU':>8}{'engine':>8}   {'LRU, by layer':28}# is 1%")
for B in (K, 96, 128, 192, 256, 384, 512, 768):
    engine, lru = replay(trace, "engine", B).miss_rate(WARMUP), curves.miss_rate(B)
    gaps.append(100 * abs(engine - lru))
    by_layer = "".join(f"{rate:7.1%}" for rate in curves.layer_miss_rates(B))
    print(f"{B:5}{lru:8.2%}{engine:8.2%}{by_layer}   {'#' * round(100 * lru)}")
print(f"at most {max(gaps):.3f} points apart; measured on SmolLM2: at most 0.08")

# %% [markdown]
# ## 5. Choose B
#
# More slots mean fewer misses, and fewer requests in the budget. The cost model of chapter 6 has
# both sides. Its numbers are inputs: step times of an H200 with SmolLM2-135M, and what kernels
# reach of its link. The model is made up: 32 layers, eight of each of ours, records of 4 KiB.

# %%
machine = {"fixed_us": 1300, "per_request_us": 18, "bookkeeping_us": 4, "link_gb_per_s": 45}
cost = CostModel(**machine, num_layers=8 * L, top_k=K, record_bytes=4096)
LONGEST, GRID = 8192, range(K, PROMPT, 64)  # tokens of a request; B to try
deployments = {gib: Deployment(cost, LONGEST, hbm_budget_gib=gib) for gib in (0.25, 1, 8, 32)}
bests = {gib: each.best(GRID, curves.miss_rate) for gib, each in deployments.items()}
deployment, best = deployments[8], bests[8]
print(f"{'B':>5}{'misses':>8}{'requests':>10}{'bus, ms':>9}{'TPOT, ms':>10}{'tok/s':>9}")
for B in sorted({K, 2 * K, 3 * K, 4 * K, 6 * K, 8 * K, best}):
    rate = curves.miss_rate(B)
    requests, tpot_ms, tokens = deployment.predict(B, rate).values()
    line = f"{B:5}{rate:8.2%}{requests:10}{cost.io_us(requests, rate) / 1e3:9.2f}"
    print(line + f"{tpot_ms:10.2f}{tokens:9,.0f}" + " best" * (B == best))
print("GiB -> best B:", bests)

# %% [markdown]
# (`best` is the smallest B within 1% of the highest rate.) In a small budget a step is mostly fixed
# costs, which one request more would share. In a large one it is mostly what each request costs,
# and slots make requests cheaper.
#
# Layers miss very differently, so a slot is worth more in some. `share_slots` gives the next slots
# to the layer where they save most. The total, and so the bytes, stay the same. A split fits the
# trace that it was made from, so we size on one half and measure on the other.

# %%
halves = slice(0, STEPS // 2), slice(STEPS // 2, STEPS)
first, second = (Trace(trace.positions[half], trace.seq_lens[half]) for half in halves)
split = {}  # B on average, over K -> what the split gains
for times in (2, 4):
    split[times] = compare_per_layer(first, second, L * times * K, warmup_steps=WARMUP)
    sizes, before, after = split[times].sizes, split[times].uniform, split[times].per_layer
    print(f"{times}K on average: {sizes}, {before:.2%} -> {after:.2%} misses")

# %% [markdown]
# Measured on real traces of SmolLM2 with `dsa`, sized on one document, measured on another, twice:
# at 2K 9.64% -> 9.02% and 10.58% -> 10.14%, at 4K 3.48% -> 2.41% and 4.48% -> 3.38%.
#
# ## 6. Export
#
# SGLang has one B for all layers, in whole pages of 64 tokens. It sizes its host pool by the ratio
# to its device pool, of which a request takes B and a page.

# %%
requests = deployment.num_requests(best)
flags = SGLangFlags(K, best, LONGEST, requests)
print(flags.launch_line("FOLDER"))
for name, meaning in {
    "top_k": "positions that a step reads in a layer; the model's, not ours to choose",
    "device_buffer_size": "B, which this chapter was about",
    "host_to_device_ratio": f"host tokens per device token, for {requests} requests of {LONGEST}",
}.items():
    print(f"{name} = {flags.hisparse_config[name]}: {meaning}")
print(f"--max-total-tokens {flags.max_total_tokens}: {requests} * ({best} + 64), the device pool")
print(f"pinned host memory: {flags.host_bytes(cost.num_layers, cost.record_bytes) / GIB:.1f} GiB")

# %% [markdown]
# ## What you know now
#
# A trace of positions is enough to try any cache, and one pass gives the curve for all B. The best
# B is where one slot more saves no more on the bus than it costs in requests. With your model:
# `python -m minihisparse trace record`, then `trace replay` and `trace size`.

# %%
rates = {key: result.miss_rate(WARMUP) for key, result in points.items()}
assert rates["belady", 2] < rates["lru", 2] < min(rates["fifo", 2], rates["random", 2])
assert rates["lru", 4] < rates["lru", 2] == curves.miss_rate(2 * K)
assert by_hand == ten["belady"] < ten["lru"]
assert all(same.values()) and four == {"lru": [1, 1], "engine": [1, 2]} and max(gaps) < 0.1
assert K < best < GRID[-1] and sorted(bests.values()) == [*bests.values()]
assert all(gain.per_layer < gain.uniform for gain in split.values())
print("chapter 9: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. Has FIFO a curve that never rises? Try the ten accesses and two more, 4 and 5, with three and
#    with four slots.
# 2. Two layers, K = 4. With 4, 5, 6 slots the first misses 10, 10, 2 times, the second 8, 5, 4
#    times. Share ten slots. What would be wrong with giving out one at a time?

# %% [markdown]
# ## Answers
#
# 1. No: a slot more brings a miss more. What goes next depends on what was fetched, and so on B.
# 2. Six and four, 10 misses. Slot by slot the second layer would get both, since the first gains
#    nothing from one: 14 misses. `share_slots` sees that two save 8, which is 4 each.


# %%
def answer_1(policy: str) -> list[int]:
    """Misses with three and four slots."""
    return [int(replay(one_by_one([*TEN, 4, 5]), policy, B).misses.sum()) for B in (3, 4)]


def answer_2(misses: list[list[int]], total: int, top_k: int = 4) -> list[int]:
    """B of each layer. misses: of each layer, from K slots on."""
    by_size = torch.nn.functional.pad(torch.tensor([misses]), (top_k, 0))  # the index is B
    return share_slots(MissCurves(by_size, by_size[..., top_k], top_k), total)


# %%
anomaly = {policy: answer_1(policy) for policy in ("fifo", "lru", "belady")}
shared = answer_2([[10, 10, 2], [8, 5, 4]], total=10)
print(f"misses with 3 and 4 slots: {anomaly}; shared: {shared}")
assert anomaly["fifo"] == [9, 10] and anomaly["lru"] == [10, 8] and shared == [6, 4]
