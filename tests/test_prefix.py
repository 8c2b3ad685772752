"""Prefix sharing: the same bits from both caches, and nobody's pages are anybody else's.

Guards: a page that is freed while somebody uses it, or never; a request that writes into what
others read; a prefix that is longer than what is really common, or read before it was written;
state of a selector that is copied from the wrong place, or half; a donor that ends, or is aborted,
at a bad moment; a prefix that is computed all the same.

Both caches serve the same random requests, whose prompts begin alike; everything that nobody wrote
is NaN, and after every event each request's host records are compared with those it wrote itself.
"""

import random
from collections.abc import Callable
from itertools import takewhile

import pytest
import torch
from addon_rig import tiny_addon_file
from conftest import make_tiny_decoder
from rig import assert_near, assert_same_bits
from test_nsa import nsa_addon
from torch import Tensor

from minihisparse.addon import write_addon
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.indexer import DSASelector
from minihisparse.model import Decoder
from minihisparse.prefix import MIN_TOKENS, Prefix, Prefixes
from minihisparse.quest import QuestSelector
from minihisparse.request import Request
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams, make_generator
from minihisparse.scheduler import Scheduler
from minihisparse.selector import Selector

K, B, PAGE, MAX_MODEL_LEN, ROWS = 24, 32, 4, 96, 4
UNITS = {"quest": PAGE, "dsa": 1, "dsa-shared": 1, "dsa-fp8": 1, "nsa": 8}  # the selectors' units
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CACHES = ("full", "hisparse")
both_caches = pytest.mark.parametrize("cache", CACHES)
of_all_selectors = pytest.mark.parametrize("selector", UNITS)

MakeRunner = Callable[..., Runner]


@pytest.fixture
def make(tmp_path) -> MakeRunner:
    """make(cache, selector="quest", device="cpu", num_pages=None, **settings): a small engine that
    shares prefixes of four tokens and more; what nobody wrote is NaN.
    """

    def make(
        cache: str,
        selector: str = "quest",
        device: str = "cpu",
        num_pages: int | None = None,
        **settings,
    ) -> Runner:
        decoder = make_tiny_decoder(num_hidden_layers=4, device=device)
        path, hisparse = None, {"top_k": K, "device_buffer_size": B, "page_size": PAGE}
        if selector == "dsa-fp8":
            selector, hisparse["index_dtype"] = "dsa", "fp8"
        if selector == "nsa":
            path = tmp_path / "nsa"
            write_addon(path, nsa_addon(make_tiny_decoder(num_hidden_layers=4), block_size=8))
        elif selector != "quest":
            path = tiny_addon_file(tmp_path, decoder, selector)
        if num_pages is not None:
            rows = settings.get("max_running_requests", ROWS)
            hisparse["host_to_device_ratio"] = (num_pages + 0.5) * PAGE / (B * rows)
        defaults = {"max_model_len": MAX_MODEL_LEN, "max_running_requests": ROWS, "checked": True}
        runner = make_runner(
            decoder,
            cache=cache,
            selector=selector,
            selector_weights=path,
            hisparse=HiSparseConfig(**hisparse),
            **defaults | settings,
        )
        runner.prefixes.min_tokens = 4
        poison(runner)
        return runner

    return make


def state_of(selector: Selector) -> list[Tensor]:
    """All that it keeps of positions, [layers, units, ...] each."""
    if isinstance(selector, DSASelector):
        return [state for state in (selector.keys, selector.scales) if state is not None]
    return [selector.bounds if isinstance(selector, QuestSelector) else selector.records]


def poison(runner: Runner) -> None:
    for state in (*runner.cache.records, *state_of(runner.selector)):
        if state.dtype == torch.float8_e4m3fn:
            state.view(torch.uint8).fill_(0x7F)
        else:
            state.fill_(torch.nan)
    if runner.cache.host is not None:
        runner.cache.host.records.fill_(torch.nan)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(128), k=length)


def prefill(runner: Runner, prompt: list[int], num_tokens: int) -> tuple[int, Tensor]:
    """Admits and prefills; the row, and the logits of the prompt's end."""
    row = runner.admit(num_tokens, prompt)
    return row, runner.prefill(row, torch.tensor(prompt, device=runner.model.device))


def history(runner: Runner, row: int, num_tokens: int) -> Tensor:
    """[L, T, W]: the records of a request's first tokens."""
    shape = (runner.num_layers, num_tokens, runner.model.config.record_width)
    records = torch.full(shape, torch.nan, device=runner.model.device)
    for layer in range(runner.num_layers):
        runner.cache.read_first(layer, row, records[layer])
    return records


def common(a: list[int], b: list[int]) -> int:
    """How many first tokens are equal."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])


# ---- whom to share with ----


def test_the_longest_prefix_is_found():
    prefixes = Prefixes(min_tokens=2)
    for row, prompt in enumerate([[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8, 9, 9]]):
        assert prefixes.find(prompt[:2] + [99]) == (None if row != 1 else Prefix(0, 2))
        prefixes.admit(row, prompt, None)
        assert prefixes.find(prompt + [99]) == (None if row != 1 else Prefix(0, 3))
        prefixes.complete(row, len(prompt))  # only now it can be shared
        assert prefixes.find(prompt + [99]) == Prefix(row, len(prompt))
    assert prefixes.find([1, 2, 3, 5, 9]) == Prefix(1, 4)
    assert prefixes.find([1, 2, 3, 9]) == Prefix(0, 3)  # both have it: the lowest row
    assert prefixes.find([1, 2, 3, 5, 6]) == Prefix(1, 4)  # one token is left to compute
    assert prefixes.find([1, 9]) is None and prefixes.find([7]) is None
    assert prefixes.find([1, 2, 3, 5, 6], unit_tokens=3) == Prefix(0, 3)
    assert prefixes.find([1, 2, 3, 5, 6], unit_tokens=5) is None
    prefixes.remove(0)
    assert prefixes.find([1, 2, 3, 4, 9]) == Prefix(1, 3)
    prefixes.clear()
    assert prefixes.find([1, 2, 3, 4, 9]) is None
    prefixes.remove(1)
    prefixes.remove(1)  # nothing more happens


def test_short_prefixes_do_not_pay():
    prefixes, prompt = Prefixes(), list(range(40))
    prefixes.admit(0, prompt, None)
    prefixes.complete(0, len(prompt))
    assert prefixes.find(prompt[: MIN_TOKENS - 1] + [99]) is None
    assert prefixes.find([*prompt[:MIN_TOKENS], 99]) == Prefix(0, MIN_TOKENS)


def test_find_against_brute_force():
    rng = random.Random(0)
    for _ in range(300):
        prompts = [rng.choices((0, 1), k=rng.randint(1, 9)) for _ in range(6)]
        prefixes, new, unit = Prefixes(min_tokens=1), prompts.pop(), rng.randint(1, 3)
        for row, prompt in enumerate(prompts):
            prefixes.admit(row, prompt, None)
            prefixes.complete(row, len(prompt))
        lengths = [common(prompt, new[:-1]) // unit * unit for prompt in prompts]
        longest = max(lengths)
        expected = Prefix(lengths.index(longest), longest) if longest else None
        assert prefixes.find(new, unit) == expected


# ---- one request after another ----


@of_all_selectors
@both_caches
def test_state_and_records_are_those_of_a_whole_prefill(make, cache, selector):
    """Of the prefix to the bit, of the rest nearly: it was computed in other chunks."""
    rng = random.Random(1)
    document = prompt_of(rng, 45)
    prompts = [document + prompt_of(rng, 5), document + prompt_of(rng, 9)]
    shared, alone = make(cache, selector), make(cache, selector)
    prefill(shared, prompts[0], 60)
    length = 45 - 45 % UNITS[selector]
    row, logits = prefill(shared, prompts[1], 70)
    other_row, expected = prefill(alone, prompts[1], 70)
    assert shared.prefixes.first_position(row) == length
    assert_near(logits, expected, 1e-4, "logits")
    records = [history(shared, r, 54) for r in (0, row)]
    assert_same_bits(records[1][:, :length], records[0][:, :length], "the prefix's records")
    assert_near(records[1], history(alone, other_row, 54), 1e-4, "records")
    num_units = length // UNITS[selector]
    for state, whole in zip(state_of(shared.selector), state_of(alone.selector), strict=True):
        first, start = (shared.selector.extents.extent_of(r)[0] for r in (0, row))
        ours = state[:, start : start + num_units]
        assert_same_bits(ours, state[:, first : first + num_units], "the prefix's state")
        end = -(-54 // UNITS[selector])
        wanted = whole[:, alone.selector.extents.extent_of(other_row)[0] :][:, :end].float()
        tolerance = 1e-4 if whole.dtype == torch.float32 else 0.07 * wanted.abs().max().item()
        assert_near(state[:, start : start + end].float(), wanted, tolerance, "state")


@both_caches
def test_nothing_shared_is_the_prefill_as_it_was(make, cache):
    """Without anybody to share with, and without being asked: the same bits and counts."""
    prompt = prompt_of(random.Random(2), 50)
    plain, asked = make(cache), make(cache)
    row = plain.admit(60)
    expected = plain.prefill(row, torch.tensor(prompt))
    assert_same_bits(prefill(asked, prompt, 60)[1], expected)
    assert plain.prefix_report() == asked.prefix_report()
    assert plain.admit(60, prompt) == 1  # the first one was not admitted for it
    assert plain.prefixes.first_position(1) == 0
    report = asked.prefix_report()
    assert (report["requests"], report["tokens_computed"], report["tokens_shared"]) == (1, 50, 0)


@both_caches
def test_many_questions_about_one_document(make, cache):
    """About one document of host memory, and one prefill."""
    rng, num_requests = random.Random(3), 16
    document = prompt_of(rng, 80)
    prompts = [document + prompt_of(rng, rng.randint(3, 7)) for _ in range(num_requests)]
    runner = make(cache, max_running_requests=num_requests)
    computed, right = [], runner.model.attention_inputs

    def attention_inputs(layer, hidden, positions):
        computed.append(len(hidden))
        return right(layer, hidden, positions)

    runner.model = without_cache(runner.model)
    runner.model.attention_inputs = attention_inputs
    for prompt in prompts:
        prefill(runner, prompt, len(prompt) + 4)
    num_questions = sum(map(len, prompts)) - 80 * num_requests
    assert sum(computed) == runner.num_layers * (80 + num_questions)
    report = runner.prefix_report()
    assert report["requests"] == num_requests and report["requests_sharing"] == num_requests - 1
    assert report["tokens_computed"] == 80 + num_questions
    assert report["tokens_shared"] == 80 * (num_requests - 1)
    if cache == "full":
        assert [key for key, value in report.items() if value is None] == [
            "pages_shared",
            "host_bytes_peak",
            "host_bytes_saved",
        ]
        return
    host = runner.cache.host
    own = sum(-(-(len(prompt) + 4 - 80) // PAGE) for prompt in prompts)
    assert host.bytes_used == report["host_bytes_peak"] == (80 // PAGE + own) * host.page_bytes
    assert report["pages_shared"] == 80 // PAGE * (num_requests - 1)
    assert report["host_bytes_saved"] == report["pages_shared"] * host.page_bytes
    host.check_integrity()
    runner.reset_counters()  # what is in use now is the new peak
    counted = runner.prefix_report()
    assert counted["host_bytes_peak"] == report["host_bytes_peak"]
    assert counted["host_bytes_saved"] == report["host_bytes_saved"]
    others = [counted[key] for key in report if not key.startswith("host_")]
    assert others == [0] * 5


def without_cache(decoder: Decoder) -> Decoder:
    """A decoder of its own, so that a test may change it."""
    copy = object.__new__(Decoder)
    copy.__dict__.update(decoder.__dict__)
    return copy


def test_admission_counts_what_is_not_shared(make):
    """A pool of 30 pages holds two requests of 20 pages that share 15, and no third stranger."""
    rng = random.Random(4)
    document = prompt_of(rng, 60)
    runner = make("hisparse", num_pages=30)
    host = runner.cache.host
    assert host.num_pages == 30
    prefill(runner, document + [1], 80)
    with pytest.raises(ValueError, match="40 tokens free of 120, 80 are needed"):
        runner.admit(80, prompt_of(rng, 70))
    with pytest.raises(ValueError, match="80 are needed"):
        runner.admit(80)
    row, _ = prefill(runner, document + [2], 80)
    assert host.num_free_tokens == 20
    with pytest.raises(ValueError, match="20 tokens free of 120, 24 are needed"):
        runner.admit(84, document + [3])
    runner.release(0)  # its own pages are free again, the document's are not
    assert host.num_free_tokens == 40
    runner.release(row)
    assert host.num_free_tokens == 120
    host.check_integrity()


def test_a_refusal_of_the_selector_gives_shared_pages_back(make):
    runner, rng = make("hisparse"), random.Random(5)
    prompt = prompt_of(rng, 40)
    prefill(runner, prompt, 50)
    before = runner.cache.host.num_free_tokens

    def refuse(row: int, num_tokens: int) -> None:
        raise ValueError("no room")

    right, runner.selector.admit = runner.selector.admit, refuse
    with pytest.raises(ValueError, match="no room"):
        runner.admit(60, prompt)
    runner.selector.admit = right
    assert runner.cache.host.num_free_tokens == before and runner.cache.rows == {0}
    runner.cache.check_integrity()
    row, _ = prefill(runner, prompt, 60)
    assert runner.prefixes.first_position(row) == 36


@both_caches
def test_an_admission_that_breaks_off_leaves_nothing(make, monkeypatch, cache):
    """Ctrl-C while records, or the selector's state, are copied."""
    runner, rng = make(cache, "dsa"), random.Random(5)
    prompt = prompt_of(rng, 41)
    prefill(runner, prompt, 50)
    host = runner.cache.host
    copies = (host, "_copy_rows") if host else (runner.cache, "read_first")

    def state() -> tuple:
        free = host.num_free_tokens if host else runner.cache.slots.num_free
        return free, set(runner.cache.rows), runner.selector.extents.owners

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    before = state()
    for owner, name in (copies, (runner.selector, "copy_prefix")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                runner.admit(60, prompt + [1])
        assert state() == before
        assert runner.prefixes.first_position(1) == 0
        runner.cache.check_integrity()
    row, _ = prefill(runner, prompt + [1], 60)
    assert runner.prefixes.first_position(row) == 41


@of_all_selectors
@both_caches
def test_a_donor_that_ends_before_the_prefill(make, cache, selector):
    """What is shared stays, though a stranger gets everything that the donor gave back."""
    rng = random.Random(16)
    document = prompt_of(rng, 45)
    prompts = [document + [1], document + [2] + prompt_of(rng, 6)]
    logits = []
    for ends in (False, True):
        runner = make(cache, selector, num_pages=30 if cache == "hisparse" else None)
        donor, _ = prefill(runner, prompts[0], 56)
        row = runner.admit(60, prompts[1])
        if ends:
            runner.release(donor)
            stranger, _ = prefill(runner, prompt_of(random.Random(17), 56), 60)
            assert stranger == donor
        logits.append(runner.prefill(row, torch.tensor(prompts[1])))
        logits.append(history(runner, row, len(prompts[1])))
        assert runner.prefixes.first_position(row) == 45 - 45 % UNITS[selector]
    assert_same_bits(logits[2], logits[0], "logits")
    assert_same_bits(logits[3], logits[1], "records")


def test_another_selector_has_no_state_to_share(make):
    runner, prompt = make("hisparse"), prompt_of(random.Random(6), 40)
    prefill(runner, prompt, 50)
    runner.use_selector(make("hisparse", "dsa").selector)
    assert runner.prefixes.find(prompt) is None


# ---- both caches, many requests ----


class Twins:
    """Both caches at the same work; prompts and lengths by row."""

    def __init__(self, make: MakeRunner, selector: str, seed: int, **settings) -> None:
        self.rng = random.Random(seed)
        self.full, self.sparse = (make(cache, selector, **settings) for cache in CACHES)
        self.unit = UNITS[selector]
        self.host = self.sparse.cache.host
        self.rng.shuffle(self.host._free)  # no host row is right by accident
        self.roots = [prompt_of(self.rng, 50) for _ in range(2)]
        self.tokens: dict[int, list[int]] = {}  # prompt and answer
        self.prompts: dict[int, list[int]] = {}
        self.written: dict[int, Tensor] = {}  # the records that a request should have
        self.steps: set[int] = set()  # who has had a decode step
        self.device = self.full.model.device

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self.full, self.sparse

    def new_prompt(self) -> list[int]:
        """One that begins like a root, or like one that runs; or is the same, or its beginning."""
        start = self.rng.choice([*self.roots, *self.prompts.values()])
        start = start[: self.rng.randint(1, 60)]
        return start + prompt_of(self.rng, self.rng.choice([0, 0, 1, 2, 5, 12]))

    def come(
        self, prompt: list[int], abort_at: int | None = None, leaving: int | None = None
    ) -> None:
        """A request comes, if there is room; abort_at: the layer where its prefill breaks off;
        leaving: who ends between its admission and its prefill.
        """
        num_tokens = len(prompt) + 12
        shared = max((common(prompt[:-1], p) for p in self.prompts.values()), default=0)
        shared -= shared % self.unit
        shared = shared if shared >= 4 else 0
        try:
            rows = [runner.admit(num_tokens, prompt) for runner in self.runners]
        except ValueError:
            rows = []
        if len(rows) < 2:  # FullCache comes first: it is admitted there, and must not be
            for row in self.full.cache.rows - self.sparse.cache.rows:
                self.full.release(row)
            return
        row = rows[0]
        assert rows == [row, row]
        assert [r.prefixes.first_position(row) for r in self.runners] == [shared, shared]
        if leaving is not None:
            self.leave(leaving)
        done = [0]

        def progress() -> None:
            done[0] += 1
            if done[0] - 1 == abort_at:
                raise KeyboardInterrupt

        ids, logits = torch.tensor(prompt, device=self.device), []
        for runner in self.runners:
            done[0] = 0
            try:
                logits.append(runner.prefill(row, ids, progress))
            except KeyboardInterrupt:
                assert abort_at is not None
        if abort_at is not None:
            for runner in self.runners:
                runner.release(row)
            return
        assert_same_bits(*logits, "logits of the prompt")
        assert logits[0].isfinite().all()
        self.prompts[row], self.tokens[row] = prompt, list(prompt)
        self.written[row] = history(self.full, row, len(prompt))
        self.written[row] = self.written[row].clone()

    def leave(self, row: int) -> None:
        for runner in self.runners:
            runner.release(row)
        for of_row in (self.prompts, self.tokens, self.written):
            del of_row[row]
        self.steps.discard(row)

    def decode(self) -> None:
        rows = self.rng.sample(sorted(self.tokens), len(self.tokens))
        rows = [row for row in rows if len(self.tokens[row]) < len(self.prompts[row]) + 12]
        if not rows:
            return
        new = [self.rng.randrange(128) for _ in rows]
        for row, token in zip(rows, new, strict=True):
            self.tokens[row].append(token)
        lens = [len(self.tokens[row]) for row in rows]
        batch = Batch.make(rows, lens, self.device)
        ids = torch.tensor(new, device=self.device)
        hidden = [runner.embed(ids) for runner in self.runners]
        for layer in range(self.full.num_layers):
            results = [
                runner.decode_layer(layer, x, batch)
                for runner, x in zip(self.runners, hidden, strict=True)
            ]
            for name in ("positions", "attention", "hidden"):
                pair = (getattr(result, name) for result in results)
                assert_same_bits(*pair, f"layer {layer}, {name}")
            hidden = [result.hidden for result in results]
        assert hidden[0].isfinite().all()
        assert_same_bits(*(r.logits(x) for r, x in zip(self.runners, hidden, strict=True)))
        for row, length in zip(rows, lens, strict=True):
            newest = history(self.full, row, length)[:, -1:]
            self.written[row] = torch.cat([self.written[row], newest], dim=1)
        self.steps.update(rows)

    def check(self) -> None:
        """Owners and counts are those of who runs, and every record is what its request wrote."""
        for runner in self.runners:
            assert runner.cache.rows == set(self.tokens)
            assert runner.selector.extents.owners == set(self.tokens)
            runner.selector.extents.check_integrity()
        self.full.cache.check_integrity()
        lens = [len(self.tokens[r]) if r in self.steps else 0 for r in range(ROWS)]
        self.sparse.cache.check_integrity(lens)
        for row, records in self.written.items():
            for runner in self.runners:
                held = history(runner, row, records.shape[1])
                assert_same_bits(held, records, f"row {row}: somebody changed its records")
        used = {page for pages in self.host._pages.values() for page in pages}
        assert self.host.num_free_tokens == PAGE * (self.host.num_pages - len(used))

    def check_idle(self) -> None:
        for row in list(self.tokens):
            self.leave(row)
            self.check()
        assert sorted(self.host._free) == list(range(self.host.num_pages))
        assert not any(self.host._num_users) and not self.host._num_shared
        for runner in self.runners:
            assert runner.prefixes.find(self.roots[0]) is None


@pytest.mark.parametrize("device", DEVICES)
@of_all_selectors
def test_storm(make, selector, device):
    """Requests come, decode, end and are aborted at random; there is not room for all of them."""
    twins = Twins(make, selector, seed=7, device=device, num_pages=50)
    for _ in range(150):
        what = twins.rng.random()
        if what < 0.5:
            abort_at = twins.rng.choice([None, None, None, 0, 2])
            leaving = twins.rng.choice([*twins.tokens, *[None] * ROWS])
            twins.come(twins.new_prompt(), abort_at, leaving)
        elif what < 0.65 and twins.tokens:
            twins.leave(twins.rng.choice(sorted(twins.tokens)))
        else:
            twins.decode()
        twins.check()
    report = twins.sparse.prefix_report()
    assert report["requests_sharing"] > 8 and report["pages_shared"] > 30, report
    twins.check_idle()


@of_all_selectors
def test_across_the_size_of_the_cache(make, selector):
    """Three short requests over one document, from below B slots to above them."""
    twins = Twins(make, selector, seed=8)
    document = twins.roots[0][:22]
    for _ in range(3):
        twins.come(document + prompt_of(twins.rng, 2))
    assert len(twins.tokens) == 3
    for _ in range(12):
        twins.decode()
        twins.check()
    assert min(map(len, twins.tokens.values())) > B
    twins.check_idle()


def test_with_kernels(make):
    """Simulated: the prompt's kernel writes behind the shared pages, and nowhere else."""
    twins = Twins(make, "dsa", seed=9, kernels=True)
    document = twins.roots[0][:18]
    for num_more in (1, 3):
        twins.come(document + prompt_of(twins.rng, num_more))
        twins.check()
    assert twins.sparse.prefix_report()["pages_shared"] == 4
    twins.decode()
    twins.check()
    twins.check_idle()


def test_a_prefix_of_a_prefix(make):
    """Each shares with the one before; whoever leaves first, the others keep everything."""
    for leaving in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        twins = Twins(make, "dsa", seed=10)
        prompt = prompt_of(twins.rng, 30)
        for _ in range(3):
            twins.come(prompt)
            prompt = prompt[:-3] + prompt_of(twins.rng, 10)
        shared = [twins.full.prefixes.first_position(row) for row in range(3)]
        assert shared == [0, 27, 34]
        users = [twins.host._num_users[page] for page in twins.host._pages[2]]
        assert users[:9] == [3] * 6 + [2] * 2 + [1]  # 27 tokens: 6 pages and a part; 34: 8
        for row in leaving:
            twins.decode()
            twins.leave(row)
            twins.check()
        twins.check_idle()


def test_a_page_that_is_common_in_part_is_copied(make):
    twins = Twins(make, "dsa", seed=11)
    document = prompt_of(twins.rng, 18)
    for _ in range(2):
        twins.come(document + [twins.rng.randrange(128) for _ in range(5)])
    assert twins.sparse.prefixes.first_position(1) == 18
    first, second = (twins.host._pages[row] for row in range(2))
    assert first[:4] == second[:4] and not set(first[4:]) & set(second[4:])
    rows = twins.host.records.unflatten(1, (-1, PAGE))
    assert_same_bits(rows[:, second[4], :2], rows[:, first[4], :2])
    twins.check()


# ---- the scheduler ----


def make_request(index: int, prompt: list[int], num_new: int = 6) -> Request:
    params = SamplingParams(temperature=1.0, seed=index, max_new_tokens=num_new, ignore_eos=True)
    generator = make_generator(params, engine_seed=0, index=index)
    return Request(index, None, prompt, params, generator=generator)


def run(make: MakeRunner, cache: str, requests: list[Request], enable: bool, **settings) -> Runner:
    runner = make(cache, **settings)
    scheduler = Scheduler(runner, DecodeStep(runner, progress=False), enable_prefix_sharing=enable)
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        scheduler.step()
    assert not runner.cache.rows
    runner.cache.check_integrity()
    return runner


def questions(seed: int, number: int, num_new: int = 6) -> list[Request]:
    rng = random.Random(seed)
    document = prompt_of(rng, 48)
    return [make_request(i, document + prompt_of(rng, 3 + i), num_new) for i in range(number)]


@both_caches
def test_tokens_do_not_depend_on_sharing(make, cache):
    """In fp32, where the last bits decide nothing. More requests than rows: some come later."""
    with_it, without = questions(12, 7), questions(12, 7)
    sharing = run(make, cache, with_it, True).prefix_report()
    plain = run(make, cache, without, False).prefix_report()
    assert [r.output_ids for r in with_it] == [r.output_ids for r in without]
    num_tokens = sum(len(request.prompt_ids) for request in without)
    assert (plain["requests"], plain["requests_sharing"], plain["tokens_shared"]) == (7, 0, 0)
    assert plain["tokens_computed"] == num_tokens and plain["host_bytes_saved"] in (0, None)
    assert sharing["requests"] == 7 and sharing["requests_sharing"] >= 5
    assert sharing["tokens_computed"] + sharing["tokens_shared"] == num_tokens


def test_a_budget_of_prompt_tokens_counts_what_is_computed(make):
    runner = make("hisparse")
    scheduler = Scheduler(runner, DecodeStep(runner, progress=False), max_prefill_tokens=56)
    for request in questions(13, 4, num_new=9):
        scheduler.add(request)
    scheduler.step()  # 48 + 3, then 4: below 56; then 5
    assert [len(r.output_ids) for r in scheduler.running] == [1, 1, 1]
    scheduler.step()
    assert [len(r.output_ids) for r in scheduler.running] == [2, 2, 2]


@both_caches
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("who", ["donor", "sharer"])
def test_abort_during_a_prefill_of_what_is_shared(make, cache, layer, who):
    """The one that is shared with, and the one that shares: the others get their tokens."""
    requests, alone = questions(14, 4), questions(14, 4)
    run(make, cache, alone, False)
    gone = requests[0 if who == "donor" else 1]
    runner = make(cache)
    scheduler = Scheduler(runner, DecodeStep(runner, progress=False))
    right = runner.cache.write_prompt

    def write_prompt(at_layer: int, row: int, records: Tensor) -> None:
        if len(records) == len(requests[1].prompt_ids) and at_layer == layer:
            scheduler.abort(gone)
            assert gone.finished
        right(at_layer, row, records)

    runner.cache.write_prompt = write_prompt
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        scheduler.step()
        runner.cache.check_integrity()
    for request, other in zip(requests, alone, strict=True):
        if request is not gone:
            assert request.output_ids == other.output_ids, request.index
    assert gone.finish_reason == "abort" and not runner.cache.rows
    assert runner.prefix_report()["requests_sharing"] >= 2


def test_who_waits_is_asked_again_when_somebody_has_left(make, monkeypatch):
    """Not in every step: its prompt would be compared with all others each time."""
    runner = make("hisparse", max_running_requests=2)
    scheduler = Scheduler(runner, DecodeStep(runner, progress=False))
    requests = questions(17, 4, num_new=9)
    for request in requests:
        scheduler.add(request)
    admit, asked = runner.admit, []
    monkeypatch.setattr(runner, "admit", lambda *args: asked.append(1) or admit(*args))
    while not requests[0].finished:
        scheduler.step()
    assert len(asked) == 3  # two came in, the third did not
    scheduler.step()
    assert len(asked) == 5 and len(scheduler.running) == 2
    scheduler.abort(requests[2])
    assert not scheduler.waiting
    while scheduler.has_unfinished:
        scheduler.step()
    assert len(asked) == 5 and [r.finish_reason for r in requests][3] == "length"


def test_who_waits_for_memory_comes_in_by_sharing(make):
    """Four requests of 15 pages in a pool of 28: all at once if they share, else one by one."""
    for enable, most in ((True, 4), (False, 1)):
        runner = make("hisparse", num_pages=28)
        scheduler = Scheduler(
            runner, DecodeStep(runner, progress=False), enable_prefix_sharing=enable
        )
        for request in questions(15, 4, num_new=6):
            scheduler.add(request)
        counts = []
        while scheduler.has_unfinished:
            scheduler.step()
            counts.append(len(scheduler.running))
        assert max(counts) == most
