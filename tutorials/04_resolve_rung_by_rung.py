# %% [markdown]
# # 4. Resolve, rung by rung
#
# - **Question**: how do a thousand threads do together what the oracle does in a loop?
# - **Minutes**: 45
# - **Needs**: a CPU; no CUDA, its words are explained where they come up
# - **Previous**: 03_why_the_cache_works
#
# Resolve runs in every layer of every step, and attention waits for it. On a GPU it is a *kernel*:
# a function that many threads run at once. Kernels are hard to read because two things come
# together: what is computed, and who does which part. Here they come one after the other: ever more
# threads do one call of Resolve, on a cache of 8 slots, and have to leave the same bits each time.

# %%
import torch
from torch import Tensor

from minihisparse.kernels import simulator
from minihisparse.kernels.device import (
    cuda,
    device_function,
    fetch_inc_wrap,
    int32,
    load_acquire,
    store_release,
)
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.kernels.resolve_fused import ALL_LANES, MISS, TICKET
from minihisparse.kernels.resolve_one_block import (
    EMPTY,
    NOT_FOUND,
    hash_of,
    lookup,
    one_block_table_bits,
    share,
    sum_below,
)
from minihisparse.kernels.resolver import Resolver

# %% [markdown]
# ## The state before the call
#
# Two requests share the tables; ours has request row 1. Its cache has `B = 8` slots, and slot 8 for
# the newest token. Word `w` of position `p`'s record is `100 p + w` (50,000 more in the other
# request): a record tells where it comes from. Host memory has pages of 4 positions, in any order.


# %%
def ints(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


B, K, PAGE, WORDS, ROW = 8, 6, 4, 8, 1
host_pages = torch.tensor([[8, 3, 10, 1, 6, 5], [4, 9, 0, 7, 2, 11]], dtype=torch.int32)
host_rows = (PAGE * host_pages[:, :, None] + torch.arange(PAGE)).flatten(1)  # [2, positions]
host = ints(12 * PAGE, WORDS)  # [host rows, words]
words = 100 * torch.arange(6 * PAGE)[:, None] + torch.arange(WORDS)
host[host_rows] = torch.stack([50_000 + words, words]).int()


# %%
def state_of(tokens: list[list[int]], lru_slots: list[list[int]], seq_lens: list[int]) -> dict:
    """What Resolve changes, of both requests, in one layer."""
    held = torch.tensor([[*row, s - 1] for row, s in zip(tokens, seq_lens, strict=True)])
    records = host[host_rows.gather(1, held.clamp(min=0))]  # [2, B + 1, words]
    records[held == -1] = -7
    return {
        "device_buffer_tokens": torch.tensor(tokens, dtype=torch.int32),  # [2, B]
        "lru_slots": torch.tensor(lru_slots, dtype=torch.int16),  # [2, B]
        "records": records,
    }


def copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


# %%
def show(name: str, values, width: int = 4) -> None:
    print((f"{name:>10} " + "".join(f"{x:>{width}}" for x in values)).rstrip())


def draw(title: str, state: dict, fate: dict[int, str]) -> None:
    """Our request, a column per slot; fate: slot -> what becomes of it."""
    tokens, lru_slots, records = (tensor[ROW].tolist() for tensor in state.values())
    print(f"{title}: lru_slots {lru_slots}, least recent first")
    show("slot", range(B + 1), 8)
    show("position", [*tokens, "newest"], 8)
    show("record", [f"{record[0]}.." for record in records], 8)
    show("", [fate.get(slot, "") for slot in range(B + 1)], 8)


S, NEWEST = 23, 22  # tokens so far, the last position
SELECTION = [3, 9, 14, 17, 20, 22]  # what the selector picked
before = state_of(
    tokens=[[7, 1, 0, 3, 2, 6, 5, 4], [5, 17, 2, 11, 9, 0, 13, 7]],
    lru_slots=[[2, 0, 1, 3, 4, 5, 7, 6], [6, 1, 3, 0, 7, 4, 2, 5]],
    seq_lens=[12, S],
)
tokens, lru = (before[name][ROW] for name in ("device_buffer_tokens", "lru_slots"))
fate = {slot: "hit" for slot in range(B) if tokens[slot] in SELECTION}
print(f"selected: {SELECTION}")
draw("before", before, fate)

# %% [markdown]
# ## First rung: the oracle
#
# The rule, from chapter 2: a selected position that is in a slot is a *hit*; each other one is a
# *miss* and takes the least recent slot that is no hit. The new order of use: untouched slots, then
# those just filled, then the hits. `resolve_oracle` is that in plain Python; it plans, we copy.


# %%
def by_oracle(positions: Tensor, seq_lens: Tensor, rows: Tensor, state: dict):
    """positions [R, K], the others [R] -> slots [R][K], the state after, the last row's plan."""
    after, slots, plan = copy(state), [], []
    tokens, lru_slots, records = after.values()
    for i, row in enumerate(rows.tolist()):
        tables = tokens[row].tolist(), lru_slots[row].tolist()
        answer, plan = resolve_oracle(positions[i].tolist(), int(seq_lens[i]), *tables)
        tokens[row], lru_slots[row] = map(torch.tensor, tables)
        for fetch in plan:
            records[row, fetch.slot] = host[host_rows[row, fetch.position]]
        slots.append(answer)
    return slots, after, plan


positions, rows = torch.tensor([SELECTION], dtype=torch.int32), torch.tensor([ROW])
call = (positions, ints(1, value=S), rows)
[answer], after, plan = by_oracle(*call, before)
draw("after", after, fate | {fetch.slot: "fetched" for fetch in plan})
print("misses: " + "; ".join(f"{p} into slot {s}, evicts {old}" for p, s, old in plan))
print(f"answer: {answer}, the slots of {SELECTION}")

# %% [markdown]
# ## Second rung: a kernel, one thread per request
#
# A *launch* runs a kernel in so many **blocks** of so many **threads** (1,024 at most). All run the
# same function, and each finds its part of the work by its number in the block,
# `cuda.threadIdx.x`, and the block's number, `cuda.blockIdx.x`.
#
# `Resolver` launches any rung of the ladder. On tensors of a GPU it runs compiled. On CPU tensors
# the same function runs in a *simulator*: a thread is a Python function that can be paused, and one
# of them runs at a time. That is slow, but it checks every access, and threads can take turns, at
# barriers and atomics, in any order. `one_thread` is the oracle, line by line, and copies, too.


# %%
def agrees(rung: str, call: tuple, state: dict, slots: list, after: dict, **more) -> bool:
    """Whether a rung answers `slots` and leaves `after` behind, to the bit."""
    sizes = {"max_requests": 2, "top_k": K, "device_buffer_size": B, "record_bytes": 4 * WORDS}
    resolver = Resolver(**sizes, req_to_host_pool=host_pages, page_size=PAGE, rung=rung, **more)
    num_real_reqs, counters, left = ints(1, value=len(call[0])), ints(3).long(), copy(state)
    got = resolver.resolve(*call, num_real_reqs, host_records=host, counters=counters, **left)
    return got.tolist() == slots and all(torch.equal(left[name], after[name]) for name in left)


assert agrees("one_thread", call, before, [answer], after)

# %% [markdown]
# ## Third rung: one block, five stages
#
# For each selected position, `one_thread` searches through the slots: if `K = 2048` and `B = 4096`,
# up to 8 million comparisons, and it does them twice. More threads alone leave as much work. A hash
# table makes it less, and the threads of a block have **shared memory**, small and fast, to build
# one in. `resolve_one_block` has the paper's five stages. We do them with small kernels; what it
# keeps in shared memory, the table's keys first, are tensors here, so that we can look at them.
#
# **1. Fast path.** While `S <= B`, position `p` is in slot `p`, and there is nothing to do.
#
# **2. Hits.** Thread `t` of `n` takes the selected positions `t`, `t + n`, `t + 2n`, ... and enters
# each as a key. A hash says where; if another key is there, the next entry is tried. And if two
# threads want an entry at the same moment? An **atomic** operation cannot be interrupted. `cas`,
# compare and swap, is "write `p` if the entry is EMPTY, and say what was there": only one of the
# threads will read EMPTY. Beside the key, `first` says where in the selection it is: at the lowest
# index, by an atomic minimum, so that a position selected twice is not two misses.


# %%
BITS = one_block_table_bits(K)
TABLE = 1 << BITS  # entries


@device_function  # for the GPU; the simulator takes the plain function
def enter_selection(positions, shared, first):
    for i in range(cuda.threadIdx.x, positions.shape[0], cuda.blockDim.x):
        p = positions[i]
        if 0 <= p < NEWEST:
            e = hash_of(p, BITS)
            key = cuda.atomic.cas(shared, e, EMPTY, p)
            while key != EMPTY and key != p:
                e = (e + 1) & (TABLE - 1)
                key = cuda.atomic.cas(shared, e, EMPTY, p)
            cuda.atomic.min(first, e, i)


shared, first = ints(TABLE, value=EMPTY), ints(TABLE, value=K)
# 1 block of 32 threads; the arguments. A kernel returns nothing: it changes tensors.
simulator.run(enter_selection, 1, 32, (positions[0], shared, first))
print("wanted entries:", {p: hash_of.py_func(p, BITS) for p in SELECTION[:-1]})
show("entry", range(TABLE))
show("key", ["." if x == EMPTY else x for x in shared.tolist()])
show("first", ["." if x == K else x for x in first.tolist()])

# %% [markdown]
# Two positions wanted the same entry, and one went next door. Now the threads share out the slots
# and look up what each holds. If it is in the table, that is a hit, and `found` gets the slot.


# %%
@device_function
def find_hits(tokens, shared, found, hit):
    for slot in range(cuda.threadIdx.x, tokens.shape[0], cuda.blockDim.x):
        e = lookup(shared, BITS, tokens[slot])
        hit[slot] = 0
        if e >= 0:
            hit[slot] = 1
            found[e] = slot


found, hit = ints(TABLE, value=NOT_FOUND), ints(B, value=-1)
simulator.run(find_hits, 1, 32, (tokens, shared, found, hit))
show("found", ["." if x == NOT_FOUND else x for x in found.tolist()])
show("slot", range(B))
show("hit", hit.tolist())
assert [slot for slot in range(B) if hit[slot]] == [*fate]

# %% [markdown]
# **3. LRU order.** Which miss is this one? How many slots before this one are no hit? Such a number
# is a **rank**, and it looks like a loop. The way out: each thread counts in its own *share* of the
# list; then it learns the sum of the counts before its own (`sum_below`); from there it numbers its
# share. First the misses are ranked, in the order of the selection (`miss_rank`); then the *rest*,
# the slots that are no hit, in the old order of use (`rest_rank`).


# %%
@device_function
def rank_flags(flags, counts, ranks):
    begin, end = share(flags.shape[0], cuda.threadIdx.x, cuda.blockDim.x)
    count = 0
    for i in range(begin, end):
        count += flags[i]
    rank = sum_below(counts, 0, count)
    for i in range(begin, end):
        ranks[i] = rank  # how many flags are before i
        rank += flags[i]


entry_of = [shared.tolist().index(p) if p < NEWEST else -1 for p in SELECTION]
missed = [e >= 0 and found[e] == NOT_FOUND and first[e] == i for i, e in enumerate(entry_of)]
missed, rest = torch.tensor(missed).int(), 1 - hit[lru.long()]
miss_rank, rest_rank, counts = ints(K), ints(B), ints(2, 4 + 1)
simulator.run(rank_flags, 1, 4, (missed, counts[0], miss_rank))
simulator.run(rank_flags, 1, 4, (rest, counts[1], rest_rank))
names = ("missed", "counts", "miss_rank", "rest", "counts", "rest_rank")
shown = (missed, counts[0], miss_rank, rest, counts[1], rest_rank)
for name, values in zip(names, shown, strict=True):
    show(name, values.tolist())
num_misses, num_rest = counts[:, 4].tolist()

# %% [markdown]
# (`counts`: what is before the shares of the four threads, and in all.) Now every slot knows its
# place in the new order. The lowest ranks are the *victims*: rank `m` goes to the `m`-th miss.


# %%
def place(i: int) -> int:
    """Where the i-th slot of the old order goes."""
    if not rest[i]:
        return num_rest + i - int(rest_rank[i])  # a hit: among the most recent
    if rest_rank[i] < num_misses:
        return num_rest - num_misses + int(rest_rank[i])  # a victim: in between
    return int(rest_rank[i]) - num_misses  # untouched: among the least recent


old_order = lru.tolist()
new_order = sorted(old_order, key=lambda slot: place(old_order.index(slot)))
victims = [slot for slot in old_order if not hit[slot]][:num_misses]
show("old order", old_order)
show("place", map(place, range(B)))
show("new order", new_order)
show("victims", victims)
assert new_order == after["lru_slots"][ROW].tolist()

# %% [markdown]
# **4. Misses.** A selected position reads `found` at its entry. If that is no slot, `first` says
# whose miss it is, `miss_rank` which miss, and `victims` which slot it gets. The newest is in slot
# `B`.
#
# **5. Copy.** The GPU reads the records from the CPU's memory, over the bus. 32 threads of
# successive numbers are a **warp**, and its threads are also called *lanes*. They run together, and
# what they read side by side travels in one piece. So a warp copies a record, each lane a word.


# %%
def answer_at(e: int) -> int:
    slot = int(found[e])
    return victims[miss_rank[first[e]]] if slot == NOT_FOUND else slot


assert [answer_at(e) if e >= 0 else B for e in entry_of] == answer
assert agrees("one_block", call, before, [answer], after)

# %% [markdown]
# ## What a race looks like
#
# Between stages stands a **barrier**: `cuda.syncthreads()` lets no thread of the block pass before
# all have come, so that what they wrote before it can be read after it. Without one, a thread may
# look for a key that another has not entered yet. That is a *race*: the result depends on who is
# faster. The simulator's threads take turns in ascending order, or, with a `seed`, in a random one:


# %%
@device_function
def stage_2(positions, tokens, shared, first, found, hit, barrier):
    enter_selection(positions, shared, first)
    if barrier:
        cuda.syncthreads()
    find_hits(tokens, shared, found, hit)


wrong = {1: {}, 0: {}}  # barrier -> seed -> flags
for barrier, flags_of in wrong.items():
    for seed in (None, *range(40)):
        table = [ints(TABLE, value=x) for x in (EMPTY, K, NOT_FOUND)]
        flags = ints(B, value=-1)
        simulator.run(stage_2, 1, 32, (positions[0], tokens, *table, flags, barrier), seed=seed)
        if not torch.equal(flags, hit):
            flags_of[seed] = flags.tolist()
    print(f"barrier {barrier}: wrong in {len(flags_of)} of 41 orders")
assert not wrong[1] and wrong[0] and None not in wrong[0]
show("hits", hit.tolist())
show("with race", next(iter(wrong[0].values())))

# %% [markdown]
# An overlooked hit is fetched again, into a second slot, and the state is wrong from then on. The
# ascending order does not find it, nor do many others: a kernel with a race can pass its tests.
#
# ## Fourth rung, idea 1: votes, and two counts in one word
#
# The kernel in use, `resolve_fused`, has the same stages with less waiting. `sum_below` lets thread
# 0 add up all counts while the others wait. But the lanes of a warp can **vote**: `ballot_sync`
# gives each of them one word whose bit `i` is lane `i`'s yes or no. `popc` counts the ones in a
# word, `lanemask_lt` has ones for the lanes below. So each lane knows its rank in the warp at once.
#
# A warp must also know how many of the rest, and how many misses, the warps before it have. Neither
# reaches 2^16, so both fit into one word, and are added in one go (how: exercise 1).


# %%
@device_function
def rank_by_vote(rest, missed, ranks, words):
    lane, below = cuda.threadIdx.x, cuda.lanemask_lt()
    rest_bits = cuda.ballot_sync(ALL_LANES, lane < B and rest[lane] == 1)
    miss_bits = cuda.ballot_sync(ALL_LANES, lane < K and missed[lane] == 1)
    if lane < B:
        ranks[lane] = cuda.popc(rest_bits & below)
    if lane == 0:
        words[0], words[1] = rest_bits, miss_bits
        words[2] = cuda.popc(rest_bits) + (cuda.popc(miss_bits) << 16)  # the warp's `totals`


ranks, words = ints(B), ints(3)
simulator.run(rank_by_vote, 1, 32, (rest, missed, ranks, words))
print(f" rest_bits  {words[0]:032b} (lane 0 is on the right)")
print(f" miss_bits  {words[1]:032b}")
print(f"    totals  {words[2]:#010x}: {words[2] >> 16} misses, {words[2] & 0xFFFF} not hit")
show("ranks", ranks.tolist())
assert torch.equal(ranks, rest_rank) and words[2] == num_rest + (num_misses << 16)

# %% [markdown]
# ## Idea 2: keys that turn into answers
#
# The table needs neither `first` nor `found`. A position is 0 or more, -1 is EMPTY, so all below
# can mean something else. First each thread looks up the positions of its slots, and keeps their
# entries (`found_at`) as it has kept those of its selected positions (`entry_of`). After a barrier
# nobody searches any more, and a hit writes its slot over the key, as `-2 - slot`. After one more,
# the keys that are left are those of misses, which write their rank, as `-2 - (MISS + rank)`. That
# is a third of the memory; the real table has twice as many entries, so that searches end sooner.
# (Who is first is settled only if a position is selected twice, which is rare.)


# %%
@device_function
def write_hits(tokens, table):
    slot = cuda.threadIdx.x
    found_at = lookup(table, BITS, tokens[slot])
    cuda.syncthreads()
    if found_at >= 0:
        table[found_at] = -2 - slot


@device_function
def write_misses(entry_of, table):
    lane, below = cuda.threadIdx.x, cuda.lanemask_lt()
    miss = lane < K and entry_of[lane] >= 0 and table[entry_of[lane]] >= 0
    miss_bits = cuda.ballot_sync(ALL_LANES, miss)
    if miss:
        table[entry_of[lane]] = -2 - (MISS + cuda.popc(miss_bits & below))


def meaning(x: int) -> str:  # a key; s and the slot of a hit; m and the rank of a miss
    if x >= EMPTY:
        return "." if x == EMPTY else str(x)
    return f"s{-2 - x}" if -2 - x < MISS else f"m{-2 - x - MISS}"


# %%
table = shared.clone()
show("keys", map(meaning, table.tolist()))
simulator.run(write_hits, 1, B, (tokens, table))
show("hits (s)", map(meaning, table.tolist()))
simulator.run(write_misses, 1, 32, (torch.tensor(entry_of), table))
show("misses (m)", map(meaning, table.tolist()))
assert {*map(meaning, table.tolist())} == {".", "s1", "s4", "m0", "m1", "m2"}

# %% [markdown]
# ## Idea 3: several blocks for one request
#
# One block cannot keep the bus busy. If several copy, who plans? Each takes a *ticket*, the next
# number, in one atomic step: ticket 0 plans, the others wait for the plan and help to copy. Blocks
# have no shared memory in common, so the plan lies in the GPU's main memory, and `handover` too,
# three words: the next ticket; ready, 0 or the plan's length + 1; taken, how many
# helpers have the plan: the last one sets ready back to 0 for the next launch. Ready is written
# with `store_release` and read with `load_acquire`: who sees it set sees all that was written
# before. (The simulator cannot test this: its stores are seen at once.) `ticketed` and `cleared`
# are 1 in a right launch.


# %%
@device_function
def plan_and_help(handover, launch, plan, copied, blocks, ticketed, cleared):
    ticket_at, ready_at, taken_at = handover, handover + 4, handover + 8
    words = cuda.shared.array(4, int32)  # `shared_words` in the file
    tid, num_threads = cuda.threadIdx.x, cuda.blockDim.x
    if tid == 0:  # the next ticket goes 0, 1, ..., blocks - 1, 0, ...
        words[TICKET] = fetch_inc_wrap(ticket_at, blocks - 1) if ticketed else cuda.blockIdx.x
    cuda.syncthreads()
    part = words[TICKET]
    if part == 0:
        for m in range(tid, plan.shape[0], num_threads):
            cuda.nanosleep(100)  # stands for the stages above
            plan[m] = launch
    cuda.syncthreads()
    if tid == 0 and part == 0:
        store_release(ready_at, plan.shape[0] + 1)
    if tid == 0 and part != 0:
        while load_acquire(ready_at) == 0:
            pass
        if fetch_inc_wrap(taken_at, blocks - 2) == blocks - 2 and cleared:
            store_release(ready_at, 0)
    cuda.syncthreads()
    for m in range(part * num_threads + tid, plan.shape[0], blocks * num_threads):
        copied[0, m] = cuda.blockIdx.x
        copied[1, m] = plan[m]


# %% [markdown]
# A GPU starts blocks in any order, and some only when others have ended; the harshest case is room
# for one. A block that waits for one that has not started then waits forever: a **deadlock**.
# Tickets exclude it: ticket 0 belongs to a block that *has* started and waits for nobody, and
# nobody waits for anything else. Tempting, and wrong, is "block 0 plans" (`ticketed = 0`). On a GPU
# it now and then never ends and says nothing; the simulator notices that nothing changes any more.


# %%
def launch_in_order(seed: int, ticketed: int) -> list[int]:
    handover, plan, copied = ints(3), ints(9), ints(2, 9, value=-1)
    args = (handover.data_ptr(), 7, plan, copied, 3, ticketed, 1)
    simulator.run(plan_and_help, 3, 2, args, memory=[handover], seed=seed, resident_blocks=1)
    assert handover.tolist() == [0, 0, 0] and copied[1].tolist() == [7] * 9
    return copied[0].tolist()


for seed in range(4):
    print(f"tickets, seed {seed}: copied by blocks {launch_in_order(seed, ticketed=1)}")
hangs = {}
for seed in range(12):
    try:
        launch_in_order(seed, ticketed=0)
    except simulator.SimulationError as error:
        hangs[seed] = str(error)
print(f"block 0 plans: {len(hangs)} of 12 orders hang. One of them:\n{[*hangs.values()][0]}")
assert 0 < len(hangs) < 12

# %% [markdown]
# ## All rungs, two requests, many steps
#
# One request grows from 6 tokens past `B`, the other begins with 14 and an empty cache. Selections
# are random, with repetitions and padding. In each step the newest record is written through; then
# all rungs start from one state, and must leave one state.

# %%
generator = torch.Generator().manual_seed(4)
both, seq_lens = torch.tensor([1, 0]), torch.tensor([6, 14], dtype=torch.int32)
state = state_of([[-1] * B, [*range(6), -1, -1]], [[*range(B)]] * 2, seq_lens=[14, 6])
STEPS, WAYS = 9, [("one_thread", {}), ("one_block", {}), ("one_block", {"swap_in_block_size": 64})]
WAYS += [("fused", {"blocks_per_request": blocks}) for blocks in (1, 3)]
for _ in range(STEPS):
    seq_lens += 1
    for row, length in zip(both.tolist(), seq_lens.tolist(), strict=True):
        state["records"][row, min(length - 1, B)] = host[host_rows[row, length - 1]]
        if length <= B:
            state["device_buffer_tokens"][row, length - 1] = length - 1
    chance = torch.rand(2, K, generator=generator) * (seq_lens[:, None] + 1)
    batch = (chance.int() - 1, seq_lens, both)  # positions: -1 to the newest
    *expected, _ = by_oracle(*batch, state)
    for rung, more in WAYS:
        assert agrees(rung, batch, state, *expected, **more), (rung, more)
    state = expected[1]
print(f"{STEPS} steps, {len(WAYS)} ways each, all with the oracle's bits")

# %% [markdown]
# ## What you know now
#
# A kernel is a rule and a division of work. The rule is the oracle's. It becomes parallel by a hash
# table (all search at once), ranks (everyone knows their place) and barriers (who may read what).
# The fused kernel votes instead of writing, turns keys into answers, and its blocks never wait for
# one that has not started. The rest is about many reads of the bus at once (`copy_records.py`). The
# simulator says what is right, not what is fast: what a GPU takes for it is in `BENCHMARKS.md`.

# %%
assert all(torch.equal(before[name][0], after[name][0]) for name in before)  # not our row
print("chapter 4: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. `cuda.shfl_up_sync(ALL_LANES, x, n)` gives each lane the `x` of the lane `n` below it (the
#    lowest `n` lanes get their own). With it, write a kernel for one warp that leaves in each lane
#    the sum of all lanes below it: in five steps, not 31, and without memory in between.
# 2. In `plan_and_help`, suppose that nobody sets ready back to 0 (`cleared = 0`). The first
#    launch is right. What happens in the second, and does it always?

# %% [markdown]
# ## Answers
#
# 1. After steps of 1, 2, 4, 8 and 16 each lane has the sum up to its own value; less that value, it
#    is the sum below. A lane that has nobody `n` below it must not add.
# 2. The helpers find ready set and do not wait. If they overtake the planner, they copy by the
#    plan of the launch before: sometimes the wrong records are fetched, and nothing says so.


# %%
@device_function
def warp_sums(values, sums):
    lane, n = cuda.threadIdx.x, 1
    total = values[lane]
    while n < 32:
        other = cuda.shfl_up_sync(ALL_LANES, total, n)
        if lane >= n:
            total += other
        n *= 2
    sums[lane] = total - values[lane]


def sums_below(values: list[int], seed: int | None = None) -> list[int]:
    """For 32 numbers: the sum of those before each."""
    sums = ints(32, value=-1)
    simulator.run(warp_sums, 1, 32, (torch.tensor(values), sums), seed=seed)
    return sums.tolist()


def second_launch(seed: int, cleared: int) -> list[int]:
    """By the plan of which launch each record was copied in the second one."""
    handover, plan, copied = ints(3), ints(9), ints(2, 9, value=-1)
    for launch in (1, 2):
        args = (handover.data_ptr(), launch, plan, copied, 3, 1, cleared)
        simulator.run(plan_and_help, 3, 2, args, memory=[handover], seed=seed)
    return copied[1].tolist()


# %%
show("sums below", sums_below([*range(32)])[:12])
for seed in range(4):
    print(f"not cleared, seed {seed}: by the plans of launches {second_launch(seed, cleared=0)}")

assert sums_below([*range(32)]) == [i * (i - 1) // 2 for i in range(32)]
assert all(second_launch(seed, cleared=1) == [2] * 9 for seed in range(20))
stale = [second_launch(seed, cleared=0) != [2] * 9 for seed in range(20)]
assert any(stale) and not all(stale)
