# %% [markdown]
# # 10. Sharing a prefix
#
# - **Question**: what do sixteen readers of one document cost?
# - **Minutes**: 20
# - **Needs**: a CPU; the model is tiny and random
# - **Previous**: 09_how_much_cache
#
# Many requests begin alike: the same instructions, the same document, then a question of their own.
# A prompt's KV depends on the tokens up to there and on nothing else, so equal beginnings have
# equal KV. It need not be computed twice, nor stored twice.

# %%
import time

import torch

from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.quest import QuestSelector
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams

# %% [markdown]
# ## Three readers
#
# A document of 22 tokens, and three questions about it. Each request has room for 40 tokens, five
# pages of the host pool. (Its pages have 8 positions, and Quest's 4, to tell the two apart; `LLM`
# makes them equal.) `admit` gets the prompt, to find a request whose prompt begins alike.

# %%
PAGE, UNIT, ROOM, ROWS, K, B = 8, 4, 40, 4, 8, 16


def make(cache: str) -> Runner:
    sizes = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "top_k": K}
    limits = {"page_size": UNIT, "max_requests": ROWS, "max_model_len": ROOM}
    quest = QuestSelector(**sizes, **limits, dtype=model.dtype, device=model.device)
    setup = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE)
    limits = {"max_model_len": ROOM, "max_running_requests": ROWS}
    return make_runner(model, cache=cache, selector=quest, hisparse=setup, **limits)


config = ModelConfig(64, 32, 48, 2, 4, 2, 8, max_position_embeddings=1024)
model = Decoder.random(config, seed=10)
text = torch.randint(64, (900,), generator=torch.Generator().manual_seed(10)).tolist()
prompts = [text[:22] + question for question in ([1, 2], [3, 4], [5, 6])]


# %%
class Readers:
    """The requests of one runner: token ids by request row, and all logits so far."""

    def __init__(self, cache: str = "hisparse", share: bool = True) -> None:
        self.runner, self.share = make(cache), share
        self.ids, self.logits = {}, []

    def admit(self, prompt: list[int]) -> int:
        return self.runner.admit(ROOM, prompt if self.share else None)

    def come(self, prompt: list[int]) -> int:
        row = self.admit(prompt)
        self.logits.append(self.runner.prefill(row, torch.tensor(prompt)))
        self.ids[row] = [*prompt, int(self.logits[-1].argmax())]
        return row

    def step(self) -> None:
        newest = torch.tensor([ids[-1] for ids in self.ids.values()])
        batch = Batch.make([*self.ids], [len(ids) for ids in self.ids.values()], "cpu")
        self.logits.append(self.runner.decode(newest, batch))
        for ids, logits in zip(self.ids.values(), self.logits[-1], strict=True):
            ids.append(int(logits.argmax()))


# %%
def pages_of(readers: Readers, row: int) -> list[int]:
    table = readers.runner.cache.host.req_to_host_pool[row].tolist()
    return [page for page in table if page >= 0]


def users_of(readers: Readers) -> dict[int, int]:  # by host page
    pages = [page for row in readers.ids for page in pages_of(readers, row)]
    return {page: pages.count(page) for page in pages}


three = Readers()
prefixes, extents = three.runner.prefixes, three.runner.selector.extents
for prompt in prompts:
    row = three.come(prompt)
    (start, end), slots = extents.extent_of(row), int(three.runner.cache.first_slots(0)[row])
    print(f"row {row}: host pages {pages_of(three, row)}, prefill from position", end=" ")
    print(f"{prefixes.first_position(row)}; Quest's pages {start}..{end - 1}, slots from {slots}")
print("users of each host page:", users := users_of(three))

# %% [markdown]
# Pages 0 and 1 have three **users**: the KV of 16 tokens is in host memory once, and a page is free
# again when its last user has left (*reference counting*). That is all that is shared. The device
# is private: each row has its own slots, because each evicts what *it* does not need, and its own
# part of Quest's bounds. `copy_prefix` copies those; nothing is computed for it.
#
# ## The page on which they differ
#
# What happened to the 22 tokens that are common?
#
# - 16 are in whole pages of the pool: shared.
# - 4 more are in whole pages of Quest, but on a page of the pool that goes on differently. Rows 1
#   and 2 have that page for themselves, and their records were **copied** into it.
# - 2 are half a page of Quest, whose bounds cover row 0's question already: computed again.
#
# (`LLM` with Quest ends each prefix with a page. DSA's unit is a token: there a copy is usual.)
# Why copy? Here is an engine that does not: row 1 uses row 0's third page.


# %%
class Careless(Readers):
    def admit(self, prompt: list[int]) -> int:
        row = super().admit(prompt)
        if row == 1:
            table = self.runner.cache.host.req_to_host_pool
            table[1, 2] = table[0, 2]  # NEW: shared, though common in part only
        return row


def ask(readers: Readers) -> Readers:
    """The three questions, one after the other, and ten steps."""
    for prompt in prompts:
        readers.come(prompt)
    for _ in range(10):
        readers.step()
    return readers


def history(readers: Readers, row: int, num_tokens: int) -> torch.Tensor:
    """The records of a request's first tokens, [L, T, W]: a copy."""
    records = torch.empty(2, num_tokens, config.record_width)
    for layer in range(2):
        readers.runner.cache.read_first(layer, row, records[layer])
    return records


# %%
unshared, careless, copied = ask(Readers(share=False)), ask(Careless()), ask(Readers())
changed = {}
print(" " * 9, "row 0's answer, row 1's answer, where row 0's KV has changed")
for name, readers in {"unshared": unshared, "careless": careless, "copied": copied}.items():
    differ = (history(readers, 0, 24) != history(unshared, 0, 24)).any(2).any(0)  # [T]
    changed[name] = differ.nonzero().flatten().tolist()
    print(f"{name:9}", readers.ids[0][24:], readers.ids[1][24:], changed[name])

# %% [markdown]
# Row 1 did the harm and row 0 suffers: its question is overwritten, and its answer is another one.
# Row 1's own tokens are right, so whoever tests the new request alone sees nothing. The rule: **who
# writes is alone on the page**. All that comes after a prefix is in pages of the request's own.
#
# ## The end of a request
#
# Row 0 computed the document. It ends first; then somebody new comes.

# %%
host, kept, in_use = three.runner.cache.host, history(three, 1, 20), []


def note(what: str, *leaving: int) -> None:
    for row in leaving:
        three.runner.release(row)
        del three.ids[row]
    host.check_integrity()
    in_use.append(host.bytes_used // host.page_bytes)
    print(f"{what:18}{host.bytes_used:6} bytes, {in_use[-1]:2} pages, users: {users_of(three)}")


note("three readers")
note("row 0 has ended", 0)
three.come(text[:22] + [7, 8])
note("somebody new")
still_there = torch.equal(history(three, 1, 20), kept)
note("all have ended", *three.ids)

# %% [markdown]
# A request gives back *its references*, not its pages: of five, three are free. The document stays
# as long as somebody reads it, and the new one shares with row 1, which has computed none of it.
#
# ## Why the bits are equal
#
# HiSparse and `FullCache` give equal bits, also when they share, if both prefill **the same chunks
# from the same KV**. `FullCache` keeps a request's slots side by side, so it copies the prefix's
# records. But it finds the same prefix and cuts where HiSparse does. Cut elsewhere, and a chunk has
# another number of rows: a product may add in another order.


# %%
def difference(one: Readers, other: Readers) -> list[float]:
    """The largest, in the logits of each of the three prompts, and of all steps."""
    found = [(x - y).abs().max().item() for x, y in zip(one.logits, other.logits, strict=True)]
    return [*found[:3], max(found[3:])]


against_full = difference(copied, ask(Readers("full")))
against_unshared = difference(copied, unshared)
print("sharing, HiSparse and full KV differ by", against_full)
print("HiSparse, with and without sharing, by ", against_unshared)

# %% [markdown]
# The first reader has nobody to share with: the same bits. The others prefilled 4 rows, not 24, and
# fp32 products of up to four rows take another way on a CPU (`model.py`). So last bits depend on
# who else runs, as on the size of a batch. (Hence what changed at positions 20 and 21, if it did.)
#
# ## Sixteen readers
#
# Now with `LLM`, which shares unless told otherwise. `prefix_report` says what was saved.


# %%
def serve(*batches: list[list[int]], share: bool = True) -> tuple[dict, list]:
    """What was saved, and the last batch's answers; a batch ends before the next one comes."""
    setup = HiSparseConfig(top_k=32, device_buffer_size=64, page_size=16)
    limits = {"max_running_requests": 16, "max_model_len": 960}
    llm = LLM(model, hisparse=setup, enable_prefix_sharing=share, use_tqdm=False, **limits)
    for batch in batches:
        answers = llm.generate(batch, SamplingParams(max_new_tokens=8, ignore_eos=True))
    return llm.runner.prefix_report(), [answer["token_ids"] for answer in answers]


sixteen = [[*text, 7, i] for i in range(16)]  # 900 tokens: 56 pages of 16, and 4 tokens
work, answers, page_bytes = [], [], 2 * 16 * three.runner.cache.record_bytes
for share in (True, False):
    start = time.perf_counter()
    report, new = serve(sixteen, share=share)
    print(f"share={share}: {time.perf_counter() - start:.1f} s, {report}")
    work.append((report["host_bytes_peak"] // page_bytes, report["tokens_computed"]))
    answers.append(new)
print("(host pages, tokens prefilled), with sharing and without:", *work)

# %% [markdown]
# One document's pages and one more per reader; one prefill, and 15 times its last 6 tokens. On the
# device nothing is saved: each has slots and bounds. And the pool is as large as it was made
# (`host_to_device_ratio`): more readers find room in it, or a smaller one will do.
#
# ## When it does not help
#
# Only *prefixes* have equal KV, and only requests that run can be shared with.

# %%
before, after = serve([[i, *text] for i in range(16)]), serve(sixteen[:1], sixteen[1:2])
saved = [report["tokens_shared"] for report, _ in (before, after)]
print(f"tokens saved: a name before the document {saved[0]}, the first has ended {saved[1]}")

# %% [markdown]
# SGLang's *radix tree* keeps the KV of requests that have ended, answers too: it is a tree of token
# ids, in which a path from the root is a prefix. When memory is short, the leaf that was used least
# recently goes first, unless somebody reads it. So a document is found again after a pause, at the
# price of a policy. (Beside its HiSparse the tree must be off, in 2026: `--disable-radix-cache`.)

# %%
assert [users[page] for page in range(11)] == [3, 3] + [1] * 9
assert changed["copied"] == [] and {22, 23} <= {*changed["careless"]} <= {20, 21, 22, 23}
assert careless.ids[0] != unshared.ids[0] and careless.ids[1] == unshared.ids[1]
assert in_use == [11, 8, 11, 0] and still_there and copied.ids == unshared.ids
assert against_full == [0] * 4 and against_unshared[0] == 0 and max(against_unshared) < 1e-4
assert answers[0] == answers[1] and saved == [0, 0]
assert work == [(56 + 16, 902 + 15 * 6), (57 * 16, 902 * 16)]
print("chapter 10: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. A pool has 200 pages. How many of the sixteen run at once, with sharing and without?
# 2. While row 0 answers, somebody sends its prompt, its answer so far and more. What is shared?

# %% [markdown]
# ## Answers
#
# 1. Each takes one page of its own; the document's are taken once, or by each.
# 2. The prompt only. Its attention is dense, that of decoding reads K positions: the answer's KV is
#    there, but it is not what a prefill would compute, and not by last bits only.


# %%
def answer_1(num_pages: int, document: int = 56, own: int = 1) -> tuple[int, int]:
    return max(0, num_pages - document) // own, num_pages // (document + own)


def answer_2(num_steps: int) -> tuple[int, list[float]]:
    """Tokens shared; by position, how far the answer's KV is from that of a prefill."""
    readers = Readers()
    readers.come(prompts[0])
    for _ in range(num_steps):
        readers.step()
    row, length = readers.come([*readers.ids[0], 9]), 24 + num_steps
    apart = (history(readers, 0, length) - history(readers, row, length)).abs()
    return readers.runner.prefixes.first_position(row), apart.amax((0, 2)).tolist()


together, (common, apart) = [min(16, number) for number in answer_1(200)], answer_2(5)
print(f"1. {together}; 2. {common} tokens; apart: {[round(x, 3) for x in apart[20:]]}")
assert together == [16, 3] and common == 24 and max(apart[:24]) == 0 < 0.01 < min(apart[24:])
