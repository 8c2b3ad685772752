"""Tutorial 10 runs as a reader would run it; what it shows is so; its answers are right.

Guards: a fault that is shown but is none, or that nothing sees; pages and tokens that are reported
but not saved; comparisons and asserts that cannot fail; an answer that the engine contradicts; an
assertion that depends on times.
"""

import itertools
import math
import random
import runpy
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import assert_same_bits

from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.host_store import HostPool
from minihisparse.prefix import Prefix
from minihisparse.quest import QuestSelector

CHAPTER = Path(__file__).parents[1] / "tutorials" / "10_sharing_a_prefix.py"


def run_chapter(folder: Path) -> SimpleNamespace:
    """The chapter's globals, and what it printed, after it ran in an empty folder."""
    random_state, printed = torch.get_rng_state(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        names = runpy.run_path(str(CHAPTER), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
    assert not list(folder.iterdir()), "writes a file"
    return SimpleNamespace(**names, printed=printed.getvalue())


def run_cell(chapter: SimpleNamespace, start: str, **changes) -> None:
    """Runs the cell that begins with `start` on the chapter's globals, some of them changed."""
    cells = CHAPTER.read_text(encoding="utf-8").split("# %%\n")
    code = next(cell for cell in cells if cell.startswith(start)).split("# %% [markdown]")[0]
    exec(compile(code, str(CHAPTER), "exec"), {**vars(chapter), **changes})


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    return run_chapter(tmp_path_factory.mktemp("ten"))


def test_it_runs(ten):
    assert "chapter 10: all asserts hold" in ten.printed


def test_whatever_the_clock_says(tmp_path, monkeypatch):
    now = itertools.count(0.0, -1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert "chapter 10: all asserts hold" in run_chapter(tmp_path).printed


# ---- pages ----


def test_pages_by_hand(ten):
    """5 pages each; 22 tokens are common: 20 in whole units of 4, of which 16 in whole pages."""
    readers = ten.Readers()
    rows = [readers.come(prompt) for prompt in ten.prompts]
    assert [ten.pages_of(readers, row) for row in rows] == [
        [0, 1, 2, 3, 4],
        [0, 1, 5, 6, 7],
        [0, 1, 8, 9, 10],
    ]
    assert [readers.runner.prefixes.first_position(row) for row in rows] == [0, 20, 20]
    assert ten.users_of(readers) == ten.users
    readers.runner.cache.check_integrity()
    bounds = readers.runner.selector.bounds  # 10 units of 4 tokens each; 5 of them are common
    for start in (10, 20):
        assert_same_bits(bounds[:, start : start + 5], bounds[:, :5])


def test_users_are_those_that_the_pool_counts(ten):
    readers = ten.ask(ten.Readers())
    readers.runner.release(1)
    del readers.ids[1]
    host, users = readers.runner.cache.host, ten.users_of(readers)
    assert host._num_users == [users.get(page, 0) for page in range(host.num_pages)]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_whoever_leaves_first(ten, order):
    """The document's 2 pages go with the last one; all others keep their KV."""
    readers, pages = ten.ask(ten.Readers()), []
    host = readers.runner.cache.host
    before = {row: ten.history(readers, row, 34) for row in order}
    for row in order:
        readers.runner.release(row)
        del readers.ids[row]
        host.check_integrity()
        pages.append(host.bytes_used // host.page_bytes)
        for other in readers.ids:
            assert_same_bits(ten.history(readers, other, 34), before[other])
    assert pages == [8, 5, 0]


def test_a_pool_that_takes_everything_back_is_seen(ten, monkeypatch):
    """By the chapter's integrity check, where it is run; and KV of others is overwritten."""

    def release(host: HostPool, request: int) -> None:
        for page in host._pages[request]:
            host._num_users[page] = 1
        right(host, request)

    right = HostPool.release
    monkeypatch.setattr(HostPool, "release", release)
    three = ten.Readers()
    for prompt in ten.prompts:
        three.come(prompt)
    with pytest.raises(AssertionError, match="lost or owned twice"):
        run_cell(ten, "host, kept, in_use", three=three)


# ---- the page on which they differ ----


def test_the_careless_one(ten):
    """Row 0 has row 1's records of the third page; the others are right, and the check sees it."""
    theirs = ten.history(ten.unshared, 1, 24)
    found = ten.history(ten.careless, 0, 24)
    assert_same_bits(found[:, :20], ten.history(ten.unshared, 0, 20))
    assert (found[:, 20:] - theirs[:, 20:]).abs().max() < 1e-4
    assert not torch.equal(found[:, 22:], ten.history(ten.unshared, 0, 24)[:, 22:])
    assert ten.careless.ids[2] == ten.unshared.ids[2]
    with pytest.raises(AssertionError, match=r"req_to_host_pool\[1\] is not what request owns"):
        ten.careless.runner.cache.check_integrity()
    ten.copied.runner.cache.check_integrity()


def test_what_has_changed_is_seen(ten):
    for position in (0, 7, 23):
        readers = ten.ask(ten.Readers())
        row = readers.runner.cache.host.host_rows_of(torch.tensor(0), torch.tensor([position]))
        readers.runner.cache.host.records[1, row, -1] += 1
        differ = ten.history(readers, 0, 24) != ten.history(ten.unshared, 0, 24)
        assert differ.any(2).any(0).nonzero().flatten().tolist() == [position]


# ---- bits ----


def test_full_kv_agrees_with_and_without_sharing(ten):
    assert ten.difference(ten.unshared, ten.ask(ten.Readers("full", share=False))) == [0] * 4
    assert 0 <= max(ten.against_unshared) < 1e-4


@pytest.mark.parametrize(
    ("owner", "name"), [(HostPool, "_copy_rows"), (QuestSelector, "copy_prefix")]
)
def test_comparing_with_full_kv_can_fail(ten, monkeypatch, owner, name):
    """Where the common part of a page, or the selector's state, is not copied."""

    def poisoned(cache: str):
        readers = ten.Readers(cache)
        readers.runner.selector.bounds.fill_(torch.nan)
        if cache == "hisparse":
            readers.runner.cache.host.records.fill_(torch.nan)
        return ten.ask(readers)

    full = poisoned("full")
    assert ten.difference(poisoned("hisparse"), full) == [0] * 4
    monkeypatch.setattr(owner, name, lambda *args: None)
    found = ten.difference(poisoned("hisparse"), full)
    assert found[0] == 0 and any(x != 0 for x in found[1:])


def test_difference_is_of_each_prompt_and_of_all_steps(ten):
    logits = [torch.zeros(4) for _ in range(6)]
    for i, expected in enumerate(([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], *[[0, 0, 0, 1]] * 3)):
        other = [x.clone() for x in logits]
        other[i][2] = -1
        pair = (SimpleNamespace(logits=x) for x in (logits, other))
        assert ten.difference(*pair) == expected


# ---- sixteen readers ----


@pytest.mark.parametrize("share", [True, False])
def test_tokens_are_those_that_went_through_the_model(ten, monkeypatch, share):
    computed, right = [], QuestSelector.write_prompt

    def write_prompt(selector, layer, row, first_position, inputs) -> None:
        if layer == 0:
            computed.append(len(inputs.q))
        right(selector, layer, row, first_position, inputs)

    monkeypatch.setattr(QuestSelector, "write_prompt", write_prompt)
    report, answers = ten.serve(ten.sixteen, share=share)
    assert sum(computed) == report["tokens_computed"] == ten.work[not share][1]
    assert report["tokens_shared"] == (15 * 896 if share else 0)
    assert report["requests"] == 16 and report["requests_sharing"] == 15 * share
    assert answers == ten.answers[0] and {len(answer) for answer in answers} == {8}


def test_bytes_by_hand(ten):
    """2 layers, records of 2 * 2 heads * 8 numbers in fp32, pages of 16."""
    assert ten.page_bytes == 2 * 16 * (2 * 2 * 8) * 4
    assert [pages for pages, _ in ten.work] == [56 + 16, 57 * 16]


def test_a_name_after_the_document_does_no_harm(ten):
    """So that what saves nothing in the chapter is the place of the name."""
    report, _ = ten.serve([[*ten.text, i] for i in range(16)])
    assert report["tokens_shared"] == 15 * 896


# ---- asserts ----


@pytest.mark.parametrize(
    "change",
    [
        lambda ten: {"users": ten.users | {1: 2}},
        lambda ten: {"changed": ten.changed | {"copied": [23]}},
        lambda ten: {"changed": ten.changed | {"careless": []}},
        lambda ten: {"careless": ten.unshared},
        lambda ten: {"copied": ten.careless},
        lambda ten: {"in_use": [11, 6, 11, 0]},
        lambda ten: {"still_there": False},
        lambda ten: {"against_full": [0, 0, 1e-9, 0]},
        lambda ten: {"against_full": [0, 0, 0, math.nan]},
        lambda ten: {"against_unshared": [0, 0.1, 0, 0]},
        lambda ten: {"answers": [ten.answers[0], ten.answers[0][::-1]]},
        lambda ten: {"saved": [0, 16]},
        lambda ten: {"work": ten.work[::-1]},
    ],
)
def test_asserts_can_fail(ten, change):
    with redirect_stdout(StringIO()):
        run_cell(ten, "assert [users[page]")
    with pytest.raises(AssertionError):
        run_cell(ten, "assert [users[page]", **change(ten))


# ---- answers ----


def at_once(num_pages: int, document: int, own: int, share: bool) -> int:
    """How many requests a pool has room for, asked one by one."""
    sizes = {"num_layers": 1, "record_width": 1, "num_pages": num_pages, "page_size": 16}
    limits = {"max_requests": 300, "max_pages_per_request": document + own}
    numbers = {"dtype": torch.float32, "device": torch.device("cpu")}
    host, tokens = HostPool(**sizes, **limits, **numbers), 16 * (document + own)
    for row in range(300):
        prefix = Prefix(0, 16 * document) if share and row else None
        try:
            host.allocate(row, tokens, prefix)
        except ValueError:
            return row
    raise AssertionError("more than asked")


def test_answer_1_is_what_a_pool_holds(ten):
    rng, cases = random.Random(0), [(200, 56, 1), (56, 56, 1), (57, 56, 1), (10, 56, 1)]
    cases += [(rng.randrange(1, 90), rng.randrange(1, 20), rng.randrange(1, 6)) for _ in range(30)]
    for case in cases:
        assert ten.answer_1(*case) == tuple(at_once(*case, share) for share in (True, False))


@pytest.mark.parametrize("share", [True, False])
def test_answer_1_is_what_the_engine_runs(ten, monkeypatch, share):
    running = []

    class Watched(LLM):
        def __init__(self, *args, **settings) -> None:
            super().__init__(*args, **settings)
            assert self.cache.host.num_pages == 200
            decode = self.scheduler.decode

            def counted(token_ids, rows, seq_lens):
                running.append(len(rows))
                return decode(token_ids, rows, seq_lens)

            self.scheduler.decode = counted

    names = ten.serve.__globals__
    config = partial(HiSparseConfig, host_to_device_ratio=200.5 * 16 / (64 * 16))
    monkeypatch.setitem(names, "LLM", Watched)
    monkeypatch.setitem(names, "HiSparseConfig", config)
    ten.serve(ten.sixteen, share=share)
    assert max(running) == ten.together[not share]


def test_answer_2(ten, monkeypatch):
    """It is the sparse attention: where decoding reads every position, last bits differ."""
    for num_steps in (1, 9):
        common, apart = ten.answer_2(num_steps)
        assert common == 24 and max(apart[:24]) == 0 and min(apart[24:]) > 0.01
        assert len(apart) == 24 + num_steps
    for name in ("K", "B"):
        monkeypatch.setitem(ten.make.__globals__, name, ten.ROOM)
    common, apart = ten.answer_2(9)
    assert common == 24 and max(apart) < 1e-3
