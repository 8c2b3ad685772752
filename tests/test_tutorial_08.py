"""Tutorial 8 runs as a reader would run it; what it shows is so; its answers are right.

Guards: counts of guesses that another count does not confirm; a time line in which a stream does
two things at once, or a copy ends after its wait; a hazard that is shown but is none, or is none
but could not be seen; comparisons that cannot fail; a GPU section that is wrong where nobody looks.
"""

import json
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.kernels.resolve import Fetch, resolve_oracle
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig

CHAPTER = Path(__file__).parents[1] / "tutorials" / "08_hiding_the_rest.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_chapter(folder: Path, matplotlib: bool = True) -> SimpleNamespace:
    """The chapter's globals, and what it printed, after it ran in an empty folder."""
    random_state, printed = torch.get_rng_state(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        if not matplotlib:
            patch.setitem(sys.modules, "matplotlib.figure", None)
            patch.setattr(torch.cuda, "is_available", lambda: False)  # twice would take minutes
        names = runpy.run_path(str(CHAPTER), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
    return SimpleNamespace(**names, printed=printed.getvalue(), folder=folder)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return run_chapter(tmp_path_factory.mktemp("eight"))


def test_it_runs(eight):
    assert "chapter 8: all asserts hold" in eight.printed
    skipped = "skipped: torch finds no CUDA device" in eight.printed
    assert skipped != torch.cuda.is_available()
    assert skipped == (eight.setting == "made-up times")
    assert eight.printed.count(f"{eight.setting}, ") == 3  # the parts of a step in each mode


def test_the_figure_and_its_data(eight):
    pytest.importorskip("matplotlib")
    names = sorted(path.relative_to(eight.folder).as_posix() for path in eight.folder.rglob("*.*"))
    assert names == ["out/08_time_line.json", "out/08_time_line.png"]
    data = json.loads((eight.folder / names[0]).read_text())
    assert data["config"] == eight.setting
    assert data["lines"] == {m: [list(bar) for bar in bars] for m, bars in eight.lines.items()}


def test_without_matplotlib(tmp_path):
    """Says which extra is missing, and goes on to the end."""
    chapter = run_chapter(tmp_path, matplotlib=False)
    assert "minihisparse[plots]" in chapter.printed
    assert "very large R" in chapter.printed and not list(tmp_path.iterdir())


# ---- guesses ----


def test_guesses_counted_from_selections_alone(eight):
    """The same engine again; its selections through the oracle, which keeps tables of its own."""
    quest = eight.quest
    quest.release(eight.row)
    assert quest.admit(eight.CONTEXT + eight.STEPS) == eight.row
    quest.prefill(eight.row, eight.ids[: eight.CONTEXT - 1])
    tables = [([-1] * 64, [*range(64)]) for _ in range(6)]
    counts, select, selected = [0, 0, 0], quest.selector.select, []

    def watched(*args):
        selected.append({*select(*args)[0].tolist()} - {-1})
        return select(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quest.selector, "select", watched)
        for S in range(eight.CONTEXT, eight.CONTEXT + eight.STEPS + 1):
            selected.clear()
            quest.decode(eight.ids[S - 1 : S], Batch.make([eight.row], [S], "cpu"))
            for layer, picks in enumerate(selected):
                before = {*tables[layer][0]}
                missed = {f.position for f in resolve_oracle(sorted(picks), S, *tables[layer])[1]}
                if layer and S > eight.CONTEXT:
                    guess = selected[layer - 1] - before - {S - 1}
                    counts[0] += len(missed)
                    counts[1] += len(guess)
                    counts[2] += len(guess & missed)
    assert counts == [eight.misses, eight.guessed, eight.useful]


# ---- lockstep ----


def test_lockstep(eight):
    assert eight.ANCHOR_OF == (0, 0, 0, 3, 3, 3) and eight.groups == {0: [1, 2], 3: [4, 5]}
    assert any(eight.plans[S] for S in eight.LENGTHS) and len(eight.same_bytes) == 40
    last = eight.between[1]
    assert {*last} == {f.slot for f in eight.plan} and len(eight.plan) == 3
    assert all(isinstance(f, Fetch) for _, f in eight.copies)


def test_comparing_the_shared_cache_can_fail(eight, monkeypatch):
    """A replay that copies nothing, or one record into the next slot, is seen."""
    fetch = HiSparseCache._fetch
    assert all(eight.share())
    for fault in (
        lambda cache, layer, plan: layer == 1 or fetch(cache, layer, plan),
        lambda cache, layer, plan: fetch(cache, layer, (plan[0], (plan[1] + layer) % 8)),
    ):
        monkeypatch.setattr(HiSparseCache, "_fetch", fault)
        assert not all(eight.share())


def test_same_means_bytes(eight):
    nan, x = torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0])
    assert eight.same([nan, x], [nan.clone(), x.clone()])
    assert not eight.same([x], [-x]) and not eight.same([x], [torch.tensor([-0.0, 1.0])])


# ---- time lines ----


def test_one_group_by_hand(eight):
    """compute 40 (10 of it before the selection), select 10, Resolve 5, io 50."""
    assert eight.made_up == (40, 10, 10, 5, 50)
    steps = [eight.made_up.step(mode, (0, 0, 0)) for mode in eight.MODES]
    assert steps == [3 * (40 + 55) + 10, 10 + 10 + 55 + 30 + 2 * (10 + 10 + 30), 3 * 40 + 15]
    bars = eight.time_line("prefetch", eight.made_up, (0, 0, 0))
    assert [bar[1:] for bar in bars if bar.stream == "side"] == [
        (1, "copy", 75, 125),
        (2, "copy", 125, 175),
    ]
    assert [bar[1:] for bar in bars if bar.what == "wait"] == [
        (1, "wait", 115, 125),
        (2, "wait", 165, 175),
    ]


def test_time_lines_are_possible(eight):
    """Of groups of any sizes: one thing at a time per stream, nothing before what it needs, and no
    pause that has no reason.
    """
    rng = Random(0)
    for _ in range(100):
        starts = [0, *sorted(rng.sample(range(1, 9), rng.randrange(5)))]
        anchor_of = tuple(max(a for a in starts if a <= layer) for layer in range(9))
        before = rng.randrange(20)
        us = eight.Times(before + rng.randrange(50), before, *(rng.randrange(60) for _ in range(3)))
        for mode in eight.MODES:
            bars = eight.time_line(mode, us, anchor_of)
            at = {(bar.what, bar.layer): bar for bar in bars}
            assert len(at) == len(bars)
            layers = [at["compute", layer] for layer in range(9)]
            for stream in (layers, [bar for bar in bars if bar.what == "copy"]):
                for one, other in zip(stream, stream[1:], strict=False):
                    assert one.start <= one.end <= other.start
            for layer, anchor in enumerate(anchor_of):
                bar, work = layers[layer], us.compute
                for what in ("select", "resolve", "wait"):
                    if (what, layer) in at:
                        part = at[what, layer]
                        work += part.end - part.start
                        assert bar.start + us.before <= part.start <= part.end <= bar.end
                assert work == bar.end - bar.start
                resolves = anchor == layer or mode == "hisparse"
                assert (("resolve", layer) in at) == resolves
                assert (("select", layer) in at) == (anchor == layer)
                if mode == "prefetch" and not resolves:
                    copy, wait = at["copy", layer], at["wait", layer]
                    assert at["resolve", anchor].end <= copy.start and copy.end <= wait.end
                    assert copy.end - copy.start == us.io
                    assert wait.end == max(wait.start, copy.end)


def test_exposed_io_by_size_of_groups(eight):
    """By hand, 12 layers: io 60 and compute 40, in groups of 3: 4 * (60 + 2 * 20)."""
    assert eight.found == {1: 720, 2: 6 * 80, 3: 400, 4: 3 * 120, 6: 2 * 160, 12: 60 + 11 * 20}


# ---- hazards ----


def test_what_is_in_the_wrong_slots(eight):
    """Some were never filled; the others have what layer 3's slot of that number was to get."""
    before = {S: picks for S, picks in eight.SIX.items() if S < eight.FAULT}
    *_, (S, cache) = eight.walk(eight.ANCHOR_OF, before)
    plans = {}
    for anchor in (0, 3):
        picks = eight.SIX[S + 1][anchor][0].tolist()
        plans[anchor] = resolve_oracle(picks, S + 1, *eight.tables_of(cache, anchor))[1]
    tokens = eight.tables_of(cache, 0)[0]
    for fetch in plans[0]:
        tokens[fetch.slot] = fetch.position
    never_filled = {f.slot: (f.position, 2000 + f.evicted) for f in plans[0]}
    overwritten = {f.slot: (tokens[f.slot], 2000 + f.position) for f in plans[3]}
    wrong = eight.broken[eight.FAULT][1]
    assert wrong == {
        slot: pair
        for slot, pair in (never_filled | overwritten).items()
        if pair[0] != pair[1] - 2000
    }
    assert {*never_filled} - {*overwritten} and overwritten


def test_a_wait_is_missed_whenever_there_is_something_to_copy(eight):
    """In any step: it is refused; where something misses in one of the groups, slots are wrong."""
    seen = set()
    for fault_at in range(eight.LENGTHS[0], 21):
        eight.refused.clear()
        found = eight.damage(fault_at)
        assert len(eight.refused) == 1
        assert not any(found[S][0] for S in found if S < fault_at)
        assert bool(found[fault_at][0]) == bool(found[fault_at][1])
        seen.add((fault_at > eight.B, bool(found[fault_at][0])))
    assert {(False, False), (True, True)} <= seen
    assert (False, True) not in seen  # while S <= B there is nothing to copy


def test_comparing_orders_can_fail(eight, monkeypatch):
    """A copy that also writes slot B does harm in one of the two orders only."""
    fetch = HiSparseCache._fetch

    def into_slot_b_too(cache, layer, plan):
        fetch(cache, layer, plan)
        if layer == 1:
            cache.records[1][0, eight.B] = -1.0

    monkeypatch.setattr(HiSparseCache, "_fetch", into_slot_b_too)
    assert all(eight.share(early=True)[eight.B - eight.K :])
    assert not any(eight.share()[eight.B - eight.K :])


# ---- the engine ----


def engine_of(eight, mode: str):
    sizes = {"top_k": eight.K, "device_buffer_size": eight.B, "page_size": 4}
    return eight.make_engine(mode, eight.model, eight.given, eight.B - 3, **sizes)


def test_the_engine_grows_across_b_and_misses_in_each_layer(eight):
    assert [len(prompt) for prompt in eight.prompts] == [eight.B - 3, eight.B + 5]
    assert len(eight.right) == 42 and all(x.isfinite().all() for x in eight.right)
    assert int(eight.other.counters[:, 1].min()) > 40
    tokens = eight.other.device_buffer_tokens
    assert torch.equal(tokens[0], tokens[2]) and not torch.equal(tokens[0], tokens[3])


def test_a_prefetch_that_is_not_waited_for_is_seen(eight):
    """By the integrity check; without it, by the logits."""
    engine = engine_of(eight, "prefetch")
    engine.prefetcher.wait = lambda layer: engine.prefetcher._waiting.remove(layer)
    with pytest.raises(AssertionError, match="layer 1, request row 1: a slot differs"):
        eight.decode_all(engine)
    engine = engine_of(eight, "prefetch")
    engine.prefetcher.wait = lambda layer: engine.prefetcher._waiting.remove(layer)
    engine.cache.check_integrity = lambda lengths: None
    assert not eight.same(eight.right, eight.decode_all(engine))


# ---- on a GPU ----


@pytest.fixture(scope="module", params=DEVICES)
def small(request):
    config = ModelConfig(64, 32, 48, 4, 4, 2, 8, 1e-6, 128, index_topk_freq=2)
    return Decoder.random(config, seed=0, device=request.param)


def test_compare_modes(eight, small, capsys):
    """What the GPU section runs, on a tiny model; times are not looked at."""
    rows = eight.compare_modes(small, 16, 64, (1, 3), 4)
    assert [(row["concurrency"], row["mode"]) for row in rows] == [
        (R, mode) for R in (1, 3) for mode in ("full", "hisparse", "prefetch", "no-io")
    ]
    assert ["share_of_no_io" in row for row in rows] == [False, True, True, False] * 2
    printed = capsys.readouterr().out
    assert printed.count("of the no-IO oracle's tok/s") == 4 and "R =   3 prefetch" in printed


def test_measured_time_lines(eight, small):
    for mode in eight.MODES:
        bars = eight.measure(mode, small, 16, 64, 2, 4, bars=True)
        parts = {what: [bar.layer for bar in bars if bar.what == what] for what in eight.COLOUR_OF}
        shared = [1, 3] if mode == "prefetch" else []
        assert parts == {
            "compute": [0, 1, 2, 3],
            "select": [0, 1, 2, 3],
            "resolve": [0, 1, 2, 3] if mode == "hisparse" else [0, 2],
            "copy": shared,
            "wait": shared,
        }
        at = {(bar.what, bar.layer): bar for bar in bars}
        assert at["compute", 0].start == 0
        for bar in bars:
            assert bar.stream == ("side" if bar.what == "copy" else "main") and bar.start <= bar.end
            if bar.what == "copy":
                assert bar.end <= at["wait", bar.layer].end
                assert at["resolve", bar.layer - 1].end <= bar.start
            else:
                layer = at["compute", bar.layer]
                assert layer.start <= bar.start and bar.end <= layer.end


# ---- answers ----


def test_answers(eight):
    for seed in range(6):
        tables, resident = eight.one_step_apart(seed)
        assert len(tables) == 37 and not any(tables) and all(resident[-20:])
    # By hand: io is 36 * 4096 / 50,000 us per request, compute 40 + R / 2.
    limit, share = eight.answer_2(50.0)
    io = 36 * 4096 / 50e3
    assert limit == pytest.approx(40 / (io - 0.5))
    assert share == pytest.approx(2 / (2 + io + 3 * (io - 0.5)), rel=1e-6)
    assert eight.answer_2(1000.0)[0] == float("inf")
    for R, hidden in ((int(limit), True), (int(limit) + 1, False)):
        us = eight.times(R)
        left = us.exposed("prefetch", eight.grouped[4])
        assert (left == pytest.approx(3 * us.io)) == hidden
