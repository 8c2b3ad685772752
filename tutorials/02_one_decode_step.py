# %% [markdown]
# # 2. One decode step by hand
#
# - **Question**: what happens between one token and the next?
# - **Minutes**: 30
# - **Needs**: a CPU; the model is tiny and random
# - **Previous**: 01_capacity_wall
#
# The engine's `Runner.decode_layer` fits on a screen. Here each of its lines is done by hand, on a
# model small enough to print: every tensor, every table. At the end the engine does the same step,
# and all results have to be equal, bit for bit.

# %%
import torch
import torch.nn.functional as F

from minihisparse.assembly import make_runner
from minihisparse.attention import decode_attention
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.kernels.resolve import Fetch, resolve_oracle
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.rope import apply_rope, rope_table
from minihisparse.runner import Runner


def show(name: str, tensor: torch.Tensor) -> None:
    """Prints a tensor of one or two dimensions, a row per line."""
    for number, row in enumerate(tensor.reshape(-1, tensor.shape[-1]).tolist()):
        print(f"{name if number == 0 else '':>10} " + "".join(f"{x:7.2f}" for x in row))


# %% [markdown]
# ## The model
#
# Two layers; four query heads of four numbers; two KV heads, each shared by two query heads. The
# type is bf16: in fp32 the engine takes a shortcut for small matrices, which gives other last bits
# than a plain `F.linear`; in bf16 it does not, so that we can ask for equal bits with plain code.

# %%
config = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
model = Decoder.random(config, seed=31, dtype=torch.bfloat16)
HQ, HKV, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
print("weights of a layer:")
for name, weight in vars(model.layers[0]).items():
    if weight is not None:
        print(f"{name:>12} {tuple(weight.shape)}")

# %% [markdown]
# ## Two engines for one model
#
# Both select `K = 4` positions per step and layer, in pages of 2. They differ in where records are:
# `full` keeps all of them on the device; `runner` keeps `B = 6` per layer, and one more for the
# newest token. Another request takes the first row of every table, so that numbers which mean
# different things do not look the same by accident.

# %%
K, B, PAGE = 4, 6, 2
setup = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE)


def make(cache: str) -> tuple[Runner, int]:
    """A runner, and the row of our request in its tables."""
    runner = make_runner(
        model,
        cache=cache,
        selector="quest",
        hisparse=setup,
        max_model_len=32,
        max_running_requests=2,
    )
    runner.admit(6)  # somebody else
    return runner, runner.admit(32)


runner, row = make("hisparse")
full, full_row = make("full")

# %% [markdown]
# ## Up to the step that we look at
#
# *Prefill* runs the prompt through the model and stores its records. Then the engine decodes four
# tokens, always the likeliest one. `S`, the sequence length, counts the newest token too; the
# newest **position** is therefore `S - 1`.

# %%
PROMPT = torch.tensor([7, 21, 3, 14, 14, 30, 9, 1, 26, 5, 18])
ids = PROMPT.tolist()
logits = runner.prefill(row, PROMPT)
assert torch.equal(logits, full.prefill(full_row, PROMPT))
ids.append(int(logits.argmax()))

for _ in range(4):
    newest_id = torch.tensor([ids[-1]])
    logits = runner.decode(newest_id, Batch.make([row], [len(ids)], "cpu"))
    full_logits = full.decode(newest_id, Batch.make([full_row], [len(ids)], "cpu"))
    assert torch.equal(logits, full_logits)
    ids.append(int(logits.argmax()))

S = len(ids)
NEWEST = S - 1
print("token ids", ids)
print(f"S = {S}: the token {ids[-1]} at position {NEWEST} is known, but no layer has seen it yet")

# %% [markdown]
# ## A copy of the state
#
# All that HiSparse knows of our request, before the step. We work on copies; the engine's own
# state stays as it is until the end.
#
# - `gpu[layer]`: the records on the device. A record's place there is its **slot**: 0..B-1, and
#   slot B for the newest token.
# - `host[layer]`: the records of all requests in host memory. A record's place there is its
#   **host row**. `host_pages` says in which page of host rows a page of positions lies.
# - `tokens[layer]`: which position each slot holds, -1 if none (`device_buffer_tokens`).
# - `lru[layer]`: the slots in order of use, least recent first (`lru_slots`).
# - `bounds[layer]`: for Quest, the largest and smallest key of each page. A request's pages lie
#   side by side among those of all requests; `bounds` begins with our first one.

# %%
cache, selector = runner.cache, runner.selector
gpu = [records[row].clone() for records in cache.records]  # per layer [B + 1, W]
host = cache.host.records.clone()  # [L, host rows, W]
host_pages = cache.host.req_to_host_pool[row].tolist()
tokens = cache.device_buffer_tokens[:, row].tolist()
lru = cache.lru_slots[:, row].tolist()
our_pages = slice(*selector.extents.extent_of(row))
bounds = selector.bounds[:, our_pages].clone()  # [L, P, Hkv, 2, D]


def host_row(position: int) -> int:
    return host_pages[position // PAGE] * PAGE + position % PAGE


def slot_table(layer: int) -> str:
    cells = "".join(f"{p if p >= 0 else '-':>4}" for p in tokens[layer])
    return f"position in slot 0..{B - 1}:{cells}    lru_slots: {lru[layer]}"


print("host pages of our request:", host_pages[: S // PAGE])
print(f"position 0 is in host row {host_row(0)}, position {NEWEST} will be in {host_row(NEWEST)}")
for layer in range(2):
    print(f"layer {layer}  {slot_table(layer)}")

# %% [markdown]
# ## 1. From the token to q, k and v
#
# The token id picks a row of the embedding: `hidden`, 16 numbers that each layer reads and adds
# to. A layer first normalises a copy of it (*RMS norm*: divide by the root of the mean square,
# multiply by a learned weight), then one matrix gives four queries, two keys and two values.

# %%
NO_ROTATION = rope_table(config.rope, D, 1).to(model.dtype)[0]
ROTATION = rope_table(config.rope, D, S).to(model.dtype)[NEWEST]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def project(layer: int, hidden: torch.Tensor, rotation: torch.Tensor):
    """hidden [1, 16] -> q [Hq, D], k [Hkv, D], v [Hkv, D]."""
    w = model.layers[layer]
    qkv = F.linear(norm(hidden, w.input_norm), w.qkv).view(HQ + 2 * HKV, D)
    q, k, v = qkv.split([HQ, HKV, HKV])
    return apply_rope(q, *rotation), apply_rope(k, *rotation), v


hidden = model.embedding[ids[-1]][None]  # [1, 16]: one request in the batch
show("hidden", hidden)
show("k, plain", project(0, hidden, NO_ROTATION)[1])
q, k, v = project(0, hidden, ROTATION)
show("k, rotated", k)
show("v", v)

# %% [markdown]
# *RoPE* turns pairs of numbers in q and k by an angle that grows with the position, so that their
# product depends on how far apart they are. Keys are stored rotated: a stored record needs no
# position any more, and may lie anywhere. Check: turning changes no lengths.

# %%
plain = project(0, hidden, NO_ROTATION)[1]
print("length of k before and after:", plain.norm(dim=1).tolist(), k.norm(dim=1).tolist())
assert torch.allclose(plain.norm(dim=1), k.norm(dim=1), rtol=0.02)

# %% [markdown]
# ## 2. The record, and write-through
#
# A **record** is what the position leaves behind in this layer: K of all KV heads, then V of all
# KV heads. **Write-through** stores it in two places at once: on the device, in slot B, because
# this very step may read it; and in its host row, for all later steps. From now on the copy on
# the device can be dropped without writing anything back. (While S <= B there is no need for
# slot B: position p is simply in slot p.)


# %%
def write_through(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    record = torch.cat([k.flatten(), v.flatten()])  # [W], W = 2 * Hkv * D
    gpu[layer][B] = record
    host[layer][host_row(NEWEST)] = record
    show("record", record)


write_through(0, k, v)
print(f"-> slot {B} on the device, host row {host_row(NEWEST)} in host memory")

# %% [markdown]
# ## 3. Quest: bounds of a page
#
# Which earlier positions matter? Reading all keys to find out would be as much work as attention
# itself. **Quest** keeps, per page and KV head, the largest and the smallest value that each of
# the D numbers takes among the page's keys. The newest key joins its page.


# %%
def update_bounds(layer: int, k: torch.Tensor) -> None:
    largest, smallest = bounds[layer, NEWEST // PAGE].unbind(1)  # [Hkv, D] each
    if NEWEST % PAGE == 0:  # the first key of a new page
        largest, smallest = k, k
    bounds[layer, NEWEST // PAGE] = torch.stack(
        [torch.maximum(largest, k), torch.minimum(smallest, k)], dim=1
    )


show("before", bounds[0, NEWEST // PAGE, 0])
show("new key", k[0])
update_bounds(0, k)
show("after", bounds[0, NEWEST // PAGE, 0])

# %% [markdown]
# ## 4. Quest: scores of pages
#
# From the bounds follows the most that `q . k` can be for any key in the page: in each of the D
# numbers, take whichever bound gives the larger product. A softmax over the pages turns these
# limits into shares, and the shares of all query heads are added, because one selection serves
# all heads: a record holds all of them.


# %%
def page_scores(layer: int, q: torch.Tensor) -> torch.Tensor:
    """q [Hq, D] -> [P] float32."""
    num_pages = -(-S // PAGE)
    scores = torch.zeros(num_pages)
    for head in range(HQ):
        kv_head = head // (HQ // HKV)
        largest, smallest = bounds[layer, :num_pages, kv_head].float().unbind(1)  # [P, D] each
        query = q[head].float()
        limit = torch.maximum(query * largest, query * smallest).sum(1) / D**0.5  # [P]
        scores += limit.softmax(0)
    return scores


scores = page_scores(0, q)
show("score", scores)
print("      page " + "".join(f"{page:7}" for page in range(len(scores))))

# %% [markdown]
# ## 5. From scores to positions
#
# The newest page is always read. Of the others, the best come along until K positions are full;
# at equal scores, the lower page. The answer is a list of positions in ascending order. (Unused
# places would be -1. The engine's lists always have K entries.)


# %%
def select(layer: int, q: torch.Tensor) -> list[int]:
    scores = page_scores(layer, q)
    scores[NEWEST // PAGE] = torch.inf
    best = sorted(range(len(scores)), key=lambda page: (-scores[page].item(), page))
    pages = sorted(best[: K // PAGE])
    positions = [page * PAGE + i for page in pages for i in range(PAGE)]
    positions = [p for p in positions if p < S]
    return positions + [-1] * (K - len(positions))


positions = select(0, q)
print("selected positions", positions)

# %% [markdown]
# ## 6. Resolve: from positions to slots
#
# **Resolve** is the heart of HiSparse. A selected position that is in a slot already is a *hit*.
# Each other one is a *miss*: it takes the least recently used slot that is not a hit, and what was
# there is *evicted*, that is, forgotten. Nothing is copied yet; Resolve answers with one slot per
# position, and a plan of what to fetch. `resolve_oracle` is the engine's definition of the rule.


# %%
def resolve(layer: int, positions: list[int]) -> tuple[list[int], list[Fetch]]:
    print(f"before   {slot_table(layer)}")
    print(f"select   {positions}, of which {NEWEST} is the newest, in slot {B}")
    slots, plan = resolve_oracle(positions, S, tokens[layer], lru[layer])  # changes both tables
    for fetch in plan:
        print(f"miss     {fetch.position} -> slot {fetch.slot}, evicts {fetch.evicted}")
    print(f"after    {slot_table(layer)}")
    print(f"slots    {slots}")
    return slots, plan


slots, plan = resolve(0, positions)

# %% [markdown]
# Read the order of use after the call: first the slots that nobody touched, then the slots just
# filled, then the hits. The newest position is in slot B, which is no part of that order.
#
# ## 7. Fetch
#
# The plan is carried out: each missed record moves from its host row into its slot. On a GPU, this
# is the traffic on the bus, and it is all the traffic there is.


# %%
def fetch(layer: int, plan: list[Fetch]) -> None:
    for position, slot, _ in plan:
        gpu[layer][slot] = host[layer][host_row(position)]
        print(f"host row {host_row(position)} (position {position}) -> slot {slot}")


fetch(0, plan)
print(f"{len(plan)} records of {gpu[0][0].nbytes} bytes")

# %% [markdown]
# ## 8. Attention over slots
#
# Gather the records from their slots, in the order of the selection, into one block; compare each
# query with the keys of its KV head; the softmax gives weights; the answer is the weighted mean of
# the values. Attention sees slots and records, and never learns which positions they are.

# %%
block = gpu[0][slots].float()  # [K, W]
keys, values = block.view(K, 2, HKV, D).unbind(1)  # [K, Hkv, D] each
by_hand = torch.zeros(HQ, D)
for head in range(HQ):
    kv_head = head // (HQ // HKV)
    weights = (keys[:, kv_head] @ q[head].float() / D**0.5).softmax(0)  # [K]
    by_hand[head] = weights @ values[:, kv_head]
    show(f"head {head}", weights)
show("attention", by_hand)

# %% [markdown]
# The engine does this with one fused operation of torch. It adds in another order, so its bits
# differ from ours, by no more than bf16 rounds. To end with equal bits, we go on with its result.


# %%
def attend(layer: int, q: torch.Tensor, slots: list[int]) -> torch.Tensor:
    first_slot = torch.tensor([0])  # the engine's records are those of all requests, ours are alone
    slots = torch.tensor([slots], dtype=torch.int32)
    return decode_attention(q[None], gpu[layer], slots, first_slot)


attention = attend(0, q, slots)  # [1, Hq, D]
show("engine's", attention[0])
print("largest difference", (attention[0].float() - by_hand).abs().max().item())
assert torch.allclose(attention[0].float(), by_hand, atol=0.03)

# %% [markdown]
# ## 9. Output projection and MLP
#
# The heads' answers are mixed by one matrix and added to `hidden`; then the *MLP* works on each
# token alone: two projections up, one of them gates the other, one projection down, and again it
# is added. The result is the input of the next layer.


# %%
def finish_layer(layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    w = model.layers[layer]
    hidden = hidden + F.linear(attention.flatten(1), w.o)
    gate, up = F.linear(norm(hidden, w.post_norm), w.gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, w.down)


hidden = finish_layer(0, hidden, attention)
show("hidden", hidden)

# %% [markdown]
# ## Layer 1: the same, in one go
#
# Each layer has tables and slots of its own, and selects for itself.

# %%
layer = 1
q, k, v = project(layer, hidden, ROTATION)
write_through(layer, k, v)
update_bounds(layer, k)
slots, plan = resolve(layer, select(layer, q))
fetch(layer, plan)
hidden = finish_layer(layer, hidden, attend(layer, q, slots))

# %% [markdown]
# ## The next token
#
# One more norm, and the last matrix gives a number (a *logit*) per entry of the vocabulary.

# %%
my_logits = F.linear(norm(hidden, model.final_norm), model.head).float()  # [1, V]
best = my_logits[0].topk(3)
for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"token {token:2}  logit {value:.3f}")

# %% [markdown]
# ## The engine does the same step
#
# Equal means equal bits, of the logits and of all state. And `full`, which kept everything on the
# device and missed nothing, gives the same logits again: HiSparse changes where records are, not
# what is computed.


# %%
def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


newest_id = torch.tensor([ids[-1]])
engine_logits = runner.decode(newest_id, Batch.make([row], [S], "cpu"))
full_logits = full.decode(newest_id, Batch.make([full_row], [S], "cpu"))

assert torch.equal(my_logits, engine_logits)
assert torch.equal(my_logits, full_logits)
assert cache.device_buffer_tokens[:, row].tolist() == tokens
assert cache.lru_slots[:, row].tolist() == lru
assert torch.equal(bits(cache.host.records), bits(host))
assert torch.equal(bits(selector.bounds[:, our_pages]), bits(bounds))
for layer in range(2):
    assert torch.equal(bits(cache.records[layer][row]), bits(gpu[layer]))
cache.check_integrity()
print("chapter 2: by hand, HiSparse and full HBM are equal, bit for bit")

# %% [markdown]
# ## Exercises
#
# 1. Next step, layer 0: S is one more. Suppose a selector (not Quest, which reads whole pages)
#    picks positions 0 and 1, the position that was the newest just now, and the new newest one.
#    From the last slot table of layer 0, say which records are fetched, into which slots, and what
#    is evicted.
# 2. Suppose write-through forgets the host row: it stores the newest record in slot B only. The
#    step itself gives the right logits. How many steps later is the first wrong logit, and why?

# %% [markdown]
# ## Answers
#
# 1. The record that was the newest is in no slot of the LRU order, and slot B is now somebody
#    else's: it is a miss, as always one step later. Each miss takes the least recent slot that is
#    not a hit.
# 2. At the first later step that selects the position: the only good copy was overwritten in slot
#    B. Eviction discards, and what it discards must be in host memory. If the position is the
#    first of its page, the very next step reads it, because the newest page is always read.


# %%
def next_step() -> tuple[list[int], list[Fetch]]:
    """Slots and plan of exercise 1; the tables of layer 0 are left alone."""
    return resolve_oracle([0, 1, NEWEST, NEWEST + 1], S + 1, [*tokens[0]], [*lru[0]])


answer_slots, answer_plan = next_step()
print(f"slots before: {tokens[0]}, order of use: {lru[0]}")
print(f"answer: slots {answer_slots}")
for item in answer_plan:
    print(item)


# %%
def first_wrong_step(forgotten: int) -> int:
    """How many steps after position `forgotten` its missing host row shows in the logits."""
    (good, good_row), (bad, bad_row) = make("hisparse"), make("hisparse")
    logits = good.prefill(good_row, PROMPT)
    bad.prefill(bad_row, PROMPT)
    for position in range(len(PROMPT), 31):
        token = logits.argmax().view(1)
        logits = good.decode(token, Batch.make([good_row], [position + 1], "cpu"))
        bad_logits = bad.decode(token, Batch.make([bad_row], [position + 1], "cpu"))
        if not torch.equal(logits, bad_logits):
            return position - forgotten
        if position == forgotten:
            lost = bad.cache.host.host_rows_of(torch.tensor([bad_row]), torch.tensor([[position]]))[
                0
            ]
            for layer in range(2):
                bad.cache.host.write(layer, lost, torch.zeros(1, config.record_width).bfloat16())
    return -1  # never selected again


for position in (12, 13):
    print(f"host row of position {position} forgotten: wrong {first_wrong_step(position)} later")

# %%
assert NEWEST in [item.position for item in answer_plan]
free = [slot for slot in lru[0] if tokens[0][slot] not in (0, 1)]
assert [item.slot for item in answer_plan] == free[: len(answer_plan)]
assert first_wrong_step(12) == 1  # 12 is the first of its page
assert first_wrong_step(13) != 0  # the step itself is right: slot B was written
