# %% [markdown]
# # 5. One graph, no Python
#
# - **Question**: what does a CUDA graph freeze, and what goes wrong then?
# - **Minutes**: 30
# - **Needs**: a CPU; with a GPU, one section more runs
# - **Previous**: 04_resolve_rung_by_rung
#
# A decode step is hundreds of launches of a few microseconds each, and Python needs longer to ask
# for them than the GPU to run them. A **CUDA graph** helps: *capture* the step once, then *replay*
# it in one call. What is replayed is the GPU's work only. What Python computed beside it (lengths,
# sizes, branches) stays as it was during the capture. Three bugs follow. Each is shown here on a
# tiny model, then cured; `# NEW` marks the cure.

# %%
import time

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep, batch_sizes
from minihisparse.kernels.device import Kernel
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.runner import Runner

# %% [markdown]
# ## A recorder
#
# There may be no GPU here, so we build something that freezes the same things: a list of calls. A
# call is kept with its arguments and its result. Tensors among them keep their memory, numbers
# their value.
#
# Some operations tell Python what a tensor holds: `.item()` does, and `nonzero`, by the size of its
# result. What Python does with the answer cannot be replayed, so they are refused.

# %%
aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default: "a number", aten.nonzero.default: "a size"}


class Graph:
    def __init__(self) -> None:
        self.calls = []  # what was called, its arguments, its result

    def note(self, call, args: tuple, kwargs: dict):
        if call in WAITS:
            raise RuntimeError(f"{call} tells Python {WAITS[call]}, a graph cannot wait for it")
        result = call(*args, **kwargs)
        self.calls.append((call, args, kwargs, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for call, args, kwargs, result in self.calls:
            again = call(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)  # there the next call will look for it


# %% [markdown]
# While the recorder is active, torch hands it every operation. Kernels (chapter 4) are none, but
# all of them go through `Kernel.launch`.


# %%
class Recorder(TorchDispatchMode):
    """`with Recorder() as graph:` notes operations of torch, and launches of kernels."""

    LAUNCH = staticmethod(Kernel.launch)

    def __enter__(self) -> Graph:
        self.graph, self.launching = Graph(), False
        Kernel.launch = lambda *args, **kwargs: self.launch(args, kwargs)
        super().__enter__()
        return self.graph

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        Kernel.launch = Recorder.LAUNCH

    def launch(self, args: tuple, kwargs: dict) -> None:
        self.launching = True
        self.graph.note(Recorder.LAUNCH, args, kwargs)
        self.launching = False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.launching:  # what the simulator does is part of the launch
            return operation(*args, **kwargs or {})
        return self.graph.note(operation, args, kwargs or {})


# %% [markdown]
# First on three numbers. The tensor `x` is read at every replay; Python's number `n` was read once.

# %%
x, n = torch.tensor([1.0, 2.0, 3.0]), 2
with Recorder() as graph:
    y = x[:n].sum() * 10
recorded = float(y)
x.fill_(5.0)
n = 3
graph.replay()
print("noted:", *(call for call, *_ in graph.calls))
print(f"recorded {recorded:g}, replayed {y:g}; with n = 3 it would be {x[:n].sum() * 10:g}")

refused = []
try:
    with Recorder():
        while x.sum() > 1:  # how often?
            x.mul_(0.5)
except RuntimeError as error:
    refused.append(str(error))
    print("refused:", error)

# %% [markdown]
# ## In what this is like a CUDA graph, and in what not
#
# The same: the order of the work; the tensors' addresses, sizes and strides; numbers among the
# arguments; no branch and no loop of Python; and what waits for the device is refused.
#
# Not the same: nothing is saved, since Python still makes each call. A capture does not do what it
# notes, the recorder does. A CUDA graph lets tensors share memory if they are not needed at the
# same time; here each has its own. And a capture sees the GPU's work, so what Python does in the
# CPU's memory is lost. The recorder sees torch's work, and loses what Python does otherwise.

# %% [markdown]
# ## The model, and what is right
#
# Two request rows, each with a prompt. The engine has all KV on the device (`full`) or not
# (`hisparse`), and works with torch's operations or with kernels, which are simulated on a CPU.
# Memory that nobody wrote is NaN, so that reading it shows.

# %%
K, B, PAGE, MAX_LEN = 8, 16, 4, 32
config = ModelConfig(32, 16, 24, 2, 4, 2, 4, max_position_embeddings=MAX_LEN)
model = Decoder.random(config, seed=5)
setup = HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE, swap_in_block_size=32)
SIZES = {"hisparse": setup, "max_model_len": MAX_LEN, "max_running_requests": 2}
PROMPTS = [
    torch.tensor([7, 21, 3, 14, 30, 9, 1, 26, 5]),
    torch.tensor([18, 2, 11, 29, 4, 6, 13] * 3)[:18],
]


def make(cache: str, kernels: bool = False, model: Decoder = model) -> Runner:
    return make_runner(model, cache=cache, selector="quest", kernels=kernels, **SIZES)


def with_prompts(runner: Runner) -> Runner:
    host = runner.cache.host
    for records in [*runner.cache.records, *([host.records] if host else [])]:
        records.fill_(torch.nan)
    for prompt in PROMPTS:
        row = runner.admit(MAX_LEN)
        runner.prefill(row, prompt.to(runner.model.device))
    return runner


# %% [markdown]
# What is right: `full`, not replayed (*eager*). It decodes for request row 0. Whatever we try is
# fed the same tokens, and its logits are compared. `S` counts the newest token too (chapter 2).

# %%
FIRST = len(PROMPTS[0]) + 1  # S in the first step


def compare(step, num_steps: int, padding: int = 0) -> dict:
    """S -> "equal", how much `step(token, S)` differs from the right logits, or an error."""
    reference, token, found = with_prompts(make("full")), 17, {}
    for S in range(FIRST, FIRST + num_steps):
        batch = Batch.make([0], [S], "cpu", padding)
        expected = reference.decode(torch.tensor([token] + [0] * padding), batch)[0]
        try:
            logits = step(token, S)[0]
            found[S] = f"differs by {float((logits - expected).abs().max()):.3f}"
            if torch.equal(logits, expected):
                found[S] = "equal"
        except (IndexError, RuntimeError) as error:
            found[S] = str(error).splitlines()[0]
            break
        token = int(expected.argmax())
    print("\n".join(f"S = {S}: {how}" for S, how in found.items()))
    return found


# %% [markdown]
# ## Bug 1: stale lengths
#
# `Batch.make` takes lengths from Python. Only the token ids lie in a tensor that we can change
# between replays.

# %%
runner, ids = with_prompts(make("full")), torch.tensor([17])
with Recorder() as graph:
    logits = runner.decode(ids, Batch.make([0], [FIRST], "cpu"))


def all_from_python(token: int, S: int) -> Tensor:
    ids.fill_(token)
    graph.replay()
    return logits


stale = compare(all_from_python, 4)
written = runner.cache.read(0, 0, torch.arange(FIRST + 3))[:, 0].isnan().logical_not()
print(f"positions with a record: {written.nonzero()[:, 0].tolist()}")

# %% [markdown]
# The first replay repeats the recorded step, so it is right. From then on, each token is stored at
# the position of the one before, and attention never sees more than `FIRST` positions.
#
# So let the lengths be a tensor that changes in place:

# %%
runner, ids = with_prompts(make("full")), torch.tensor([17])
batch = Batch.make([0], [FIRST], "cpu")
with Recorder() as graph:
    logits = runner.decode(ids, batch)


def lengths_in_place(token: int, S: int) -> Tensor:
    ids.fill_(token)
    batch.seq_lens.fill_(S)  # NEW
    graph.replay()
    return logits


half = compare(lengths_in_place, 8)

# %% [markdown]
# Right for some steps, then an error. A `Batch` also has Python's numbers, which spare torch some
# work: `max_seq_len` says how many pages Quest has to score. That was frozen, and the newest page
# is beyond it. Here torch checks the index. A kernel that does not check reads whatever is there.
#
# The cure has two parts. **What changes lies in one tensor** that never moves: token ids, request
# rows, lengths, and how many requests are real. `DecodeStep` has the same one, and writes it before
# each replay. **What cannot be a tensor is made as large as it can ever be**: Quest scores the
# pages of `MAX_LEN` positions, and masks those that are not there.


# %%
class Inputs:
    """The inputs of a step for `size` requests, padded; as in DecodeStep."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = torch.zeros(3 * size + 1, dtype=torch.int64)

    def set(self, token_ids: list[int], rows: list[int], seq_lens: list[int]) -> None:
        padding = [0] * (self.size - len(rows))
        values = [*token_ids, *padding, *rows, *padding, *seq_lens, *padding, len(rows)]
        self.memory.copy_(torch.tensor(values))

    def decode(self, runner: Runner, **frozen: int) -> Tensor:
        """frozen: the numbers that torch's operations want to know."""
        token_ids, rows, seq_lens = self.memory[:-1].view(3, self.size)
        num_real_reqs = self.memory[-1:].int()
        return runner.decode(token_ids, Batch(rows, seq_lens.int(), num_real_reqs, **frozen))


LARGEST = {"min_seq_len": 0, "max_seq_len": MAX_LEN}

# %%
runner, inputs = with_prompts(make("full")), Inputs(1)
inputs.set([17], [0], [FIRST])
with Recorder() as graph:
    logits = inputs.decode(runner, **LARGEST, num_real_reqs=1)


def inputs_in_place(token: int, S: int) -> Tensor:
    inputs.set([token], [0], [S])  # NEW
    graph.replay()
    return logits


fixed = compare(inputs_in_place, 12)

# %% [markdown]
# ## Bug 2: padded rows that write
#
# The number of requests is a size too. So there are graphs for some batch sizes, and a smaller
# batch is padded. Here a step of both requests is recorded. Then row 1's request ends, and row 0's
# goes on alone, beside a padded row: token 0, request row 0, length 0.

# %%
runner, inputs = with_prompts(make("full")), Inputs(2)
inputs.set([17, 8], [0, 1], [FIRST, len(PROMPTS[1]) + 1])
with Recorder() as graph:
    logits = inputs.decode(runner, **LARGEST, num_real_reqs=2)
in_row_0 = torch.arange(FIRST - 1)
before = runner.cache.read(0, 0, in_row_0).clone()


def padded(token: int, S: int) -> Tensor:
    inputs.set([token], [0], [S])
    graph.replay()
    return logits


harmed = compare(padded, 4, padding=1)
lost = (runner.cache.read(0, 0, in_row_0) != before).any(1).nonzero()[:, 0].tolist()
print(f"row 0's prompt has another record now at positions {lost}")

# %% [markdown]
# A padded row's position, `S - 1`, is clamped to 0, and request row 0 is somebody's. The beginning
# of their context is gone, and with it the bounds of their first page. The eager step is padded too
# and right: it slices to the real rows, by `num_real_reqs`, a number of Python. 2 was frozen.
#
# The kernels read it from a tensor. A block whose request is not below `num_real_reqs[0]` writes
# nothing, whatever its row says. So a replay in which nobody is real must change nothing at all,
# even if the rows are full of what was left from another step:


# %%
def state_of(runner: Runner) -> dict[str, Tensor]:
    """Copies of what a step may change: in bytes, so that NaN equals NaN."""
    cache, selector = runner.cache, runner.selector
    state = {f"records {layer}": records for layer, records in enumerate(cache.records)}
    state |= {"bounds": selector.bounds, "host": cache.host.records, "counters": cache.counters}
    state |= {"tokens": cache.device_buffer_tokens, "lru_slots": cache.lru_slots}
    return {name: tensor.clone().view(torch.uint8) for name, tensor in state.items()}


# %%
kernel_runner, kernel_inputs = with_prompts(make("hisparse", kernels=True)), Inputs(2)  # NEW
before = state_of(kernel_runner)
with Recorder() as kernel_graph:  # a step for nobody: the inputs are zeros
    kernel_logits = kernel_inputs.decode(kernel_runner)

kernel_inputs.set([17, 8], [0, 1], [FIRST, len(PROMPTS[1]) + 1])
kernel_inputs.memory[-1] = 0  # nobody is real
kernel_graph.replay()
after = state_of(kernel_runner)
unharmed = all(torch.equal(before[name], after[name]) for name in before)
print("unchanged by a replay for nobody:", unharmed)
launches = sum(call is Recorder.LAUNCH for call, *_ in kernel_graph.calls)
operations = len(kernel_graph.calls) - launches
print(f"noted: {launches} launches of kernels, {operations} operations of torch")

# %% [markdown]
# That was also the first recording of HiSparse. With torch's operations there is none: Resolve asks
# how many misses there are, to fetch as many. Its kernel has the same number of threads always, and
# a thread without a miss has nothing to fetch.

# %%
try:
    with Recorder():
        inputs.decode(with_prompts(make("hisparse")), **LARGEST, num_real_reqs=2)
except RuntimeError as error:
    refused.append(str(error))
    print("refused:", error)

# %% [markdown]
# ## Bug 3: a host write that a replay skips
#
# Write-through stores each new record twice: in the device's cache, and in its host row. The second
# one is a write to memory of the CPU, so Python can do it. What could be wrong with that?
#
# (The simulator is slow at selecting, so that selector and attention are torch's in this section.)


# %%
def make_mixed(prompts: bool = True) -> Runner:
    cache, selector = make("hisparse", kernels=True).cache, make("full").selector
    runner = Runner(model, cache, selector, kernels=False)
    return with_prompts(runner) if prompts else runner


def write_through_in_python(layer: int, records: Tensor, batch: Batch) -> None:
    cache, rows, positions = runner.cache, batch.req_pool_indices, batch.positions
    slots = positions.clamp(max=B)
    cache.records[layer][rows, slots] = records
    tokens = torch.where(slots < B, positions.int(), cache.device_buffer_tokens[layer][rows, 0])
    cache.device_buffer_tokens[layer][rows, slots % B] = tokens
    host_rows = cache.host.host_rows_of(rows, positions)
    cache.host.records[layer].numpy()[host_rows.numpy()] = records.numpy()  # no operation


runner, inputs = make_mixed(), Inputs(1)
runner.cache.write_through = write_through_in_python
inputs.set([17], [0], [FIRST])
with Recorder() as graph:
    logits = inputs.decode(runner, **LARGEST, num_real_reqs=1)


# %%
complaints = {}  # S -> what the integrity check says


def replay_and_check(token: int, S: int) -> Tensor:
    inputs.set([token], [0], [S])
    graph.replay()
    try:
        runner.cache.check_integrity()
    except AssertionError as error:
        complaints[S] = str(error)
    return logits


late = compare(replay_and_check, 10)
seen_at = min(complaints)
print(f"integrity check, S = {seen_at}: {complaints[seen_at]}")

# %% [markdown]
# The recorded step wrote its host row, because Python ran. No replay did. Nothing shows for many
# steps: as long as S <= B, all records are in slots, and nobody asks the host. The first record
# that is no longer in a slot is fetched from a host row that was never written. Here B is 16; by
# default it is 512, so that every short chat would be right. Only the integrity check, which
# compares slots with host rows, saw it at once.
#
# With a GPU, `records.to("cpu")` waits for the device, so a capture refuses it. What a capture lets
# through is worse: a write to tables that lie in the CPU's memory, a number that is counted up, an
# entry put into a list.
#
# The cure: **the write is an operation of the graph**. The kernel `write_through` stores both
# copies. Host memory is *pinned*, so that it has an address on the GPU.

# %%
runner, complaints = make_mixed(), {}  # NEW
inputs.set([17], [0], [FIRST])
with Recorder() as graph:
    logits = inputs.decode(runner, **LARGEST, num_real_reqs=1)
cured = compare(replay_and_check, 12)
print("integrity check:", complaints or "never a complaint")

# %% [markdown]
# ## All of it: a step without Python
#
# Back to the recording with all kernels, of a step for nobody. Both requests take a step, then row
# 0 alone, then both. Eager steps of the same kernels, padded alike, must leave the same bits: in
# the logits, in each table, on the device and in host memory.

# %%
eager = with_prompts(make("hisparse", kernels=True))
same_logits = []
for token_ids, rows, seq_lens in (
    ([17, 8], [0, 1], [FIRST, 19]),
    ([4], [0], [FIRST + 1]),
    ([30, 12], [0, 1], [FIRST + 2, 20]),
):
    kernel_inputs.set(token_ids, rows, seq_lens)
    kernel_graph.replay()
    padding = 2 - len(rows)
    batch = Batch.make(rows, seq_lens, "cpu", padding)
    expected = eager.decode(torch.tensor(token_ids + [0] * padding), batch)
    same_logits.append(torch.equal(kernel_logits[: len(rows)], expected[: len(rows)]))

replayed, expected = state_of(kernel_runner), state_of(eager)
same_state = {name: torch.equal(replayed[name], expected[name]) for name in expected}
print("logits equal:", same_logits)
print("state equal: ", same_state)
print("hits, misses, evictions:", eager.cache.counters.sum(0).tolist())

# %% [markdown]
# ## On a GPU
#
# `DecodeStep` does the same with `torch.cuda.graph`: inputs in one tensor, a warm-up for nobody
# (the kernels must be loaded before), a capture for each batch size. Requests are admitted after
# the capture: their pages are written into tables that stay where they are.


# %%
def decode_steps(device: str, enforce_eager: bool) -> tuple[list[Tensor], dict, float]:
    """Logits of each step, the state after the last one, and the median seconds per step."""
    on_device = Decoder.random(config, seed=5, device=device)
    runner = make("hisparse", kernels=device == "cuda", model=on_device)
    decode = DecodeStep(runner, enforce_eager=enforce_eager, progress=False)
    with_prompts(runner)
    steps, seconds, lengths = [], [], [len(prompt) for prompt in PROMPTS]
    for i in range(MAX_LEN - len(PROMPTS[1])):
        rows = [0] if i % 4 == 3 else [0, 1]
        for row in rows:
            lengths[row] += 1
        start = time.perf_counter()
        logits = decode([3 + i, 20 - i][: len(rows)], rows, lengths[: len(rows)])
        steps.append(logits.cpu())  # waits for the step
        seconds.append(time.perf_counter() - start)
    return steps, state_of(runner), sorted(seconds)[len(seconds) // 2]


# %%
gpu_is_equal = None
if torch.cuda.is_available():
    steps, state, eager_seconds = decode_steps("cuda", enforce_eager=True)
    graph_steps, graph_state, graph_seconds = decode_steps("cuda", enforce_eager=False)
    gpu_is_equal = all(map(torch.equal, steps, graph_steps))
    gpu_is_equal &= all(torch.equal(state[name], graph_state[name]) for name in state)
    print(f"{torch.cuda.get_device_name()}: eager and replayed are equal: {gpu_is_equal}")
    print(f"a step: eager {1e6 * eager_seconds:.0f} us, replayed {1e6 * graph_seconds:.0f} us")
else:
    print("skipped: torch finds no CUDA device")

# %% [markdown]
# ## What you know now
#
# A graph knows addresses and numbers. So: what changes from step to step lies in tensors that never
# move, sizes are the largest there can be, every write is guarded by `num_real_reqs`, and all that
# a step must do is an operation on the device. Python admits, releases and samples between replays.
# Chapter 6 asks what all this is worth.

# %%
assert refused[0].startswith("aten._local_scalar_dense") and refused[1].startswith("aten.nonzero")
assert [S for S, how in stale.items() if how == "equal"] == [FIRST]  # the recorded one
assert [S for S, how in half.items() if how == "equal"] == [10, 11, 12] and "bounds" in half[13]
assert {*fixed.values()} == {*cured.values()} == {"equal"} and not complaints
assert lost == [0] and harmed[FIRST] != "equal" and unharmed
assert seen_at == FIRST + 1  # the first step that was only replayed
assert [S for S, how in late.items() if how != "equal"] == [B + 2, B + 3]
assert all(same_logits) and all(same_state.values())
assert gpu_is_equal in (None, True)
print("chapter 5: all asserts hold")

# %% [markdown]
# ## Exercises
#
# 1. When a request is admitted, the pool writes its pages into `req_to_host_pool`, in place.
#    Suppose that it made a new table instead, with the new pages in it. A graph was captured
#    before. What happens in the first replay, and why?
# 2. `batch_sizes(64)` are the sizes of the graphs for up to 64 requests. If each number of requests
#    from 1 to 64 is equally likely, what part of the replayed rows is padding, and where is it
#    largest? What would be the price of a graph for each number?

# %% [markdown]
# ## Answers
#
# 1. The graph still reads the old table, where the request has no pages (-1). So the kernel writes
#    the newest record nowhere, and attention reads a slot that nobody wrote.
# 2. See below. The price: 64 captures at the start instead of a few, and their memory. (Padded rows
#    are cheap: the kernels leave at once, and a matrix product of few rows reads the weights
#    anyway.)


# %%
def admitted_later(new_table: bool) -> dict:
    """`compare` for requests that come after the recording."""
    runner, inputs = make_mixed(prompts=False), Inputs(1)
    with Recorder() as graph:
        logits = inputs.decode(runner, **LARGEST, num_real_reqs=1)
    pool = runner.cache.host
    if new_table:
        pool.req_to_host_pool = pool.req_to_host_pool.clone()
    with_prompts(runner)

    def step(token: int, S: int) -> Tensor:
        inputs.set([token], [0], [S])
        graph.replay()
        return logits

    return compare(step, 3)


def padding(max_requests: int) -> tuple[float, int, float]:
    """Padded rows over all rows; where their share is largest, and how large."""
    sizes = batch_sizes(max_requests)
    graph_of = {n: min(s for s in sizes if s >= n) for n in range(1, max_requests + 1)}
    shares = {n: 1 - n / size for n, size in graph_of.items()}
    worst = max(shares, key=shares.get)
    return 1 - sum(graph_of) / sum(graph_of.values()), worst, shares[worst]


# %%
in_place, replaced = admitted_later(new_table=False), admitted_later(new_table=True)
mean, worst, share = padding(64)
print(f"sizes {batch_sizes(64)}")
print(f"{mean:.1%} of all rows are padding; most with {worst} requests: {share:.1%}")

assert {*in_place.values()} == {"equal"} and "equal" not in replaced.values()
assert 0 < mean < share < 0.5
