# %% [markdown]
# # 3. What Quest reads, and why the cache works
#
# - **Question**: why does a cache that holds a small part of the context catch most reads?
# - **Minutes**: 20, of which the real model computes less than two
# - **Needs**: a CPU; better with the real model, which
#   `python -m minihisparse.weights_scripts.get_smollm2` makes; figures need the extra `plots`
# - **Previous**: 02_one_decode_step
#
# Chapter 1 ended with a condition: HiSparse pays if few of the selected records have to be
# fetched. Whether that is so depends on what a model reads from one step to the next. Here we
# look at a model that reads a program and continues it.

# %%
import heapq
import inspect
import os
import time
from pathlib import Path

from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.plots import plot_hit_rate, plot_overlap, save
from minihisparse.sampling import SamplingParams
from minihisparse.weights_scripts.get_smollm2 import default_out

# %% [markdown]
# ## Which model
#
# The environment variable `MINIHISPARSE_MODEL` names a model folder, or `tiny` for a model of
# random weights. Without it, the demo model is taken if it has been made. A random model shows how
# everything works, but what it reads means nothing: **the numbers of this chapter are worth
# quoting only with a real model.**

# %%
wanted = os.environ.get("MINIHISPARSE_MODEL") or str(default_out())
real = wanted != "tiny" and (Path(wanted).is_dir() or "MINIHISPARSE_MODEL" in os.environ)
if real:
    model, name = wanted, Path(wanted).name
    PROMPT_TOKENS, STEPS, K = 2000, 96, 128
else:
    tiny = ModelConfig(256, 32, 48, 4, 4, 2, 8, max_position_embeddings=1024)
    model, name = Decoder.random(tiny, seed=0), "tiny random model"
    PROMPT_TOKENS, STEPS, K = 800, 32, 64
B = 2 * K
print(f"model: {name}")
if not real:
    print("its numbers mean nothing; python -m minihisparse.weights_scripts.get_smollm2")

# %% [markdown]
# ## What it reads
#
# The beginning of `heapq.py` from the standard library, as text. The engine selects `K` positions
# per step and layer, keeps `B = 2K` slots, and so holds a small part of each layer's records.

# %%
llm = LLM(
    model,
    device="cpu",
    hisparse=HiSparseConfig(top_k=K, device_buffer_size=B),
    max_model_len=PROMPT_TOKENS + STEPS + 2,
    max_running_requests=1,
    use_tqdm=False,
)
text = inspect.getsource(heapq)
all_ids = llm.tokenizer.encode(text) if real else list(text.encode())  # tiny: a token is a byte
prompt = all_ids[:PROMPT_TOKENS]
LAYERS = llm.model.config.num_hidden_layers
PAGE = llm.hisparse.page_size


def words(ids: list[int]) -> str:
    return llm.tokenizer.decode(ids) if real else bytes(ids).decode(errors="replace")


print(f"{len(prompt)} tokens, {LAYERS} layers; K = {K}, B = {B}: {B / len(prompt):.0%} of a layer")
print("the prompt ends with:", repr(words(prompt[-24:])))

# %% [markdown]
# ## Decode, and write down every selection
#
# `LLM.step` stops after each layer of each step and says what happened there. We keep the
# selection (ascending **positions**, that is, places of tokens in the text) and the number of
# misses: selected records that were in no **slot** and had to be fetched from host memory.

# %%
selections = [[] for _ in range(LAYERS)]  # [layer][step]: (seq_len, positions)
engine_misses = [[] for _ in range(LAYERS)]  # [layer][step]
output_ids = []
start = time.perf_counter()
params = SamplingParams(max_new_tokens=STEPS + 1, ignore_eos=True)
for event in llm.step(prompt, params):
    positions = [p for p in event.positions[0].tolist() if p >= 0]
    selections[event.layer].append((event.seq_lens[0], positions))
    engine_misses[event.layer].append(int(event.missed.sum()))
print(f"prefill and {event.step} steps: {time.perf_counter() - start:.0f} s")
assert event.step == STEPS

# %% [markdown]
# ## One layer's reading, as a picture
#
# Each line is a step. Each column is a few pages of 16 positions each, side by side: `.` if one of
# them was read, `#` if more. Vertical lines are places that the layer reads again and again. The
# last page of the moment is always read; it moves to the right as tokens come.


# %%
def pages_of(positions: list[int]) -> set[int]:
    return {p // PAGE for p in positions}


def show_pages(layer: int) -> None:
    num_pages = selections[layer][-1][0] // PAGE + 1
    per_column = -(-num_pages // 80)
    print(f"layer {layer}, {num_pages} pages, {per_column} per column; step:")
    for step in range(0, STEPS, STEPS // 16):
        read = pages_of(selections[layer][step][1])
        line = ""
        for first in range(0, num_pages, per_column):
            line += " .#"[min(2, len(read & {*range(first, first + per_column)}))]
        print(f"{step + 1:4} |{line}|")


shown = LAYERS // 2
show_pages(shown)

# %% [markdown]
# ## What is on those pages
#
# Count in how many steps this layer read each page. A few it reads nearly always; many it reads
# now and then. Quest always reads whole pages, so a page's text is cut where the page is.

# %%
counts = {}
for _, positions in selections[shown]:
    for page in pages_of(positions):
        counts[page] = counts.get(page, 0) + 1
prompt_pages = [page for page in counts if (page + 1) * PAGE <= PROMPT_TOKENS]
ranked = sorted(prompt_pages, key=lambda page: (-counts[page], page))
print(f"layer {shown} read {len(ranked)} of the prompt's {PROMPT_TOKENS // PAGE} pages")
for page in ranked[:4] + ranked[-4:]:
    page_text = words(prompt[page * PAGE : (page + 1) * PAGE])
    print(f"page {page:4}, {counts[page]:3} of {STEPS} steps: {page_text!r:.70}")

# %% [markdown]
# ## Successive selections overlap
#
# Take the selections of two successive steps in one layer. *Kept* is the share of the later one
# that the earlier one had too. *Jaccard* divides what both have by what either has: 1 means equal,
# 0 means nothing in common. Two selections drawn at random would keep about `K / S` (S is the
# length so far).


# %%
def kept(before: list[int], after: list[int]) -> float:
    return len({*before} & {*after}) / len(after)


def jaccard(before: list[int], after: list[int]) -> float:
    return len({*before} & {*after}) / len({*before} | {*after})


def successive(measure, layer: int) -> list[float]:
    lists = [positions for _, positions in selections[layer]]
    return [measure(a, b) for a, b in zip(lists, lists[1:], strict=False)]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


overlap = [successive(jaccard, layer) for layer in range(LAYERS)]  # [L][steps - 1]
mean_kept = mean(mean(successive(kept, layer)) for layer in range(LAYERS))
print(f"kept: {mean_kept:.1%} on average; at random it would be {K / PROMPT_TOKENS:.1%}")
print(f"Jaccard: {mean(mean(row) for row in overlap):.2f} on average")

# %% [markdown]
# The same layer by layer: a cell is a few steps, the darker, the more overlap.

# %%
SHADES = " .:-=+*#%@"
WIDTH = 32


def show_overlap() -> None:
    print(f"layer  mean  steps 2..{STEPS}; Jaccard 0 '{SHADES}' 1")
    for layer, row in enumerate(overlap):
        edges = [len(row) * i // WIDTH for i in range(WIDTH + 1)]
        cells = [mean(row[a : max(b, a + 1)]) for a, b in zip(edges, edges[1:], strict=False)]
        shades = "".join(SHADES[min(9, int(10 * cell))] for cell in cells)
        print(f"{layer:5}  {mean(row):.2f}  {shades}")


show_overlap()

# %% [markdown]
# ## The working set
#
# Overlap with the last step is not all. A page may be left out once and come back. So count how
# many different positions a layer selected in the last `n` steps, in units of K: that is what a
# cache of `n` steps' memory would hold. If every step read something else, it would be `n`.


# %%
def working_set(layer: int, window: int) -> float:
    """Different positions in `window` successive steps, over K; mean over all windows."""
    lists = [positions for _, positions in selections[layer]]
    starts = range(len(lists) - window + 1)
    return mean(len(set().union(*lists[i : i + window])) for i in starts) / K


for window in (1, 2, 4, 8, 16, STEPS):
    size = mean(working_set(layer, window) for layer in range(LAYERS))
    print(f"last {window:3} steps: {size:5.2f} K different positions")

# %% [markdown]
# ## Replay: other cache sizes
#
# **Resolve** (chapter 2) decides what is a hit, which record is evicted, and into which slot a
# fetched one goes. It needs the selections only, not the records. So the recorded selections can
# be replayed through its oracle at any B without running the model again. Replayed at the
# engine's own B, it must count the engine's own misses.


# %%
def replay(layer: int, slots: int) -> list[int]:
    """Misses per step of one layer, with `slots` slots."""
    tokens, lru_slots = [-1] * slots, list(range(slots))
    misses = []
    for seq_len, positions in selections[layer]:
        _, plan = resolve_oracle(positions, seq_len, tokens, lru_slots)
        misses.append(len(plan))
    return misses


SIZES = {"B = K": K, "B = 2K": 2 * K, "B = 4K": 4 * K}
misses = {}  # label -> [layer][step]
for label, slots in SIZES.items():
    misses[label] = [replay(layer, slots) for layer in range(LAYERS)]
assert misses["B = 2K"] == engine_misses
print("replayed at B = 2K: the same misses as the engine's, in each layer and step")

# %% [markdown]
# ## Hit rates
#
# The first step finds empty slots (a prompt longer than B leaves nothing on the device), so it
# fetches everything. Chat answers have hundreds of steps; from here on, means leave the first out.

# %%
selected = [[len(positions) for _, positions in steps] for steps in selections]  # [layer][step]


def hit_rate(label: str, layers, steps) -> float:
    missed = sum(misses[label][layer][step] for layer in layers for step in steps)
    return 1 - missed / sum(selected[layer][step] for layer in layers for step in steps)


ALL_LAYERS, LATER = range(LAYERS), range(1, STEPS)
by_step = {x: [hit_rate(x, ALL_LAYERS, [step]) for step in range(STEPS)] for x in SIZES}
by_layer = {x: [hit_rate(x, [layer], LATER) for layer in ALL_LAYERS] for x in SIZES}

print("step      " + "".join(f"{x:>9}" for x in SIZES))
for step in [0, 1, 2, 4, 8, 16, *range(31, STEPS, 32)]:
    print(f"{step + 1:4}      " + "".join(f"{by_step[x][step]:9.1%}" for x in SIZES))
print("2 to last " + "".join(f"{hit_rate(x, ALL_LAYERS, LATER):9.1%}" for x in SIZES))
print(f"kept, the share found in the selection before: {mean_kept:.1%}")

# %% [markdown]
# With `B = K` there is room for the last selection only, and the hit rate is about the share that
# was kept. With `2K` the cache also remembers what was left out for a few steps. More than that
# brings little. The layers differ:

# %%
print("layer " + "".join(f"{x:>9}" for x in SIZES))
for layer in ALL_LAYERS:
    rates = [by_layer[x][layer] for x in SIZES]
    bar = "#" * round(40 * rates[0]) + "+" * (round(40 * rates[1]) - round(40 * rates[0]))
    print(f"{layer:5} " + "".join(f"{rate:9.1%}" for rate in rates) + f"  {bar}")
print(f"{'':34}# hits with B = K, + more with B = 2K; 40 signs are 100%")

# %% [markdown]
# ## First-time misses, and misses for lack of room
#
# Some misses no cache avoids: the position has never been on the device. (The newest token's
# record is one of them: it was written into the slot for the newest, not into the cache, so its
# second reading fetches it.) The others are records that had been evicted. Only these can a
# larger cache, or a cleverer choice of what to evict, save.

# %%
first_time = 0
for steps in selections:
    seen = set(steps[0][1]) - {steps[0][0] - 1}
    for seq_len, positions in steps[1:]:
        fresh = set(positions) - seen - {seq_len - 1}
        first_time += len(fresh)
        seen |= fresh
number_selected = sum(sum(row[1:]) for row in selected)
print(f"after the first step, of {number_selected:,} selected records")
for label in SIZES:
    missed = sum(sum(row[1:]) for row in misses[label])
    print(
        f"{label:7} {missed / number_selected:6.1%} missed: {first_time / number_selected:.1%} "
        f"for the first time, {(missed - first_time) / number_selected:.1%} were evicted before"
    )

# %% [markdown]
# ## In bytes
#
# What crosses the bus per token, against what attention reads per token, and what dense attention
# would read.

# %%
record_bytes = llm.cache.record_bytes
dense = LAYERS * (PROMPT_TOKENS + STEPS // 2) * record_bytes
sparse = mean(sum(selected[layer][step] for layer in ALL_LAYERS) for step in LATER) * record_bytes
fetched = mean(sum(engine_misses[layer][step] for layer in ALL_LAYERS) for step in LATER)
print(f"MB per token ({llm.dtype} records of {record_bytes} bytes)")
print(f"  dense attention reads  {dense / 1e6:8.2f}")
print(f"  sparse attention reads {sparse / 1e6:8.2f}")
print(f"  fetched over the bus   {fetched * record_bytes / 1e6:8.2f}")

# %% [markdown]
# ## Figures
#
# With matplotlib, the same as pictures, in the folder `out` where you started Python, each with
# its data as JSON beside it. Without it, the tables above say the same.

# %%
setting = f"{name}, Quest pages of {PAGE}, K = {K}, prompt of {PROMPT_TOKENS} tokens"
hit_data = {"config": setting, "by_step": by_step, "by_layer": by_layer}
overlap_data = {"config": setting, "jaccard": overlap}
try:
    print(save(plot_hit_rate(hit_data), hit_data, "out/03_hit_rate.png"))
    print(save(plot_overlap(overlap_data), overlap_data, "out/03_overlap.png"))
except ImportError as error:
    print("no figures:", error)

# %% [markdown]
# ## What you know now
#
# A model reads mostly what it read a moment ago. A cache of twice the selection catches nearly all
# of that; of what is left, most was never read before, and no larger cache would help.

# %%
totals = {label: sum(sum(row[1:]) for row in misses[label]) for label in SIZES}
assert totals["B = K"] >= totals["B = 2K"] >= totals["B = 4K"] >= first_time
assert mean_kept > K / PROMPT_TOKENS  # more than chance
assert all(engine_misses[layer][0] == selected[layer][0] - 1 for layer in ALL_LAYERS)
llm.cache.check_integrity()
if real:
    assert hit_rate("B = 2K", ALL_LAYERS, LATER) > 0.8
print("chapter 3: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. FIFO evicts the record that was fetched the longest ago, however often it was read since. How
#    many misses does it have at B = 2K, compared with Resolve's LRU?
# 2. Belady's rule evicts the record whose next reading is furthest in the future. It needs to know
#    the future, so no engine can use it, but no rule has fewer misses. How much is left to gain at
#    B = 2K?

# %% [markdown]
# ## Answers
#
# Both rules fit one function: among the records in the cache that this step does not read, evict
# the one with the smallest `rank`. FIFO ranks by the time of fetching, Belady by the time of the
# next reading, negated.


# %%
def replay_rule(layer: int, slots: int, rank) -> int:
    """Misses after the first step; `rank(position, step, fetched_at)`: the smallest goes first."""
    fetched_at, count = {}, 0  # fetched_at: position -> when it was fetched, for all in the cache
    for step, (seq_len, positions) in enumerate(selections[layer]):
        wanted = set(positions) - {seq_len - 1}  # the newest has a slot of its own
        for position in sorted(wanted - fetched_at.keys()):
            if len(fetched_at) == slots:
                others = fetched_at.keys() - wanted
                del fetched_at[min(others, key=lambda p: (rank(p, step, fetched_at), p))]
            fetched_at[position] = step
            count += step > 0
    return count


def fifo_misses(slots: int) -> int:
    return sum(replay_rule(layer, slots, lambda p, step, at: at[p]) for layer in ALL_LAYERS)


def belady_misses(slots: int) -> int:
    total = 0
    for layer in ALL_LAYERS:
        reads = [set(positions) for _, positions in selections[layer]]

        def next_read(position, step, _, reads=reads):
            later = (s for s in range(step + 1, STEPS) if position in reads[s])
            return -next(later, STEPS)

        total += replay_rule(layer, slots, next_read)
    return total


# %%
fifo, belady = fifo_misses(B), belady_misses(B)
for rule, count in {"FIFO": fifo, "LRU": totals["B = 2K"], "Belady": belady}.items():
    print(f"{rule:7} {count:7,} misses, {count / number_selected:.2%} of the selected records")
print(f"never read before: {first_time:,}, missed under any rule")

assert first_time <= belady <= min(fifo, totals["B = 2K"])
assert belady_misses(4 * K) <= belady
