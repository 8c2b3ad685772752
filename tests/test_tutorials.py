"""Each tutorial runs, top to bottom, as a reader would run it, and its exercises have answers.

Guards against: a chapter that rots while the engine moves, that needs another one to have run,
that writes into the repository, or whose answers nobody has checked. Chapter 3 runs with the tiny
model everywhere, and with the real one where there is a folder (marker `model`).
"""

import itertools
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from minihisparse.kernels.resolve import Fetch

REPOSITORY = Path(__file__).parents[1]
TUTORIALS = sorted((REPOSITORY / "tutorials").glob("*.py"))
MAX_LINES = 25  # of code in a cell, comments included
NOT_OURS = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}


def files_of_repository() -> set[str]:
    """All files but caches and Python sources: somebody may be editing while the tests run."""
    folders = [REPOSITORY / name for name in ("tutorials", "minihisparse", "kernels", "tests")]
    files = [p for folder in folders for p in folder.rglob("*")] + list(REPOSITORY.iterdir())
    return {
        str(path)
        for path in files
        if path.is_file() and not NOT_OURS & {*path.parts} and path.suffix != ".py"
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(number, model="tiny"): the chapter's globals after it ran in an empty folder."""

    def run_chapter(number: int, model: str = "tiny") -> dict:
        monkeypatch.setenv("MPLBACKEND", "Agg")
        monkeypatch.setenv("MINIHISPARSE_MODEL", model)
        monkeypatch.chdir(tmp_path)
        before, random_state = files_of_repository(), torch.get_rng_state()
        result = runpy.run_path(str(TUTORIALS[number - 1]), run_name="__main__")
        assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
        written = files_of_repository() - before
        assert not written, f"a tutorial writes into its working folder only: {written}"
        return result

    return run_chapter


# ---- the format ----


def cells_of(path: Path) -> list[tuple[str, list[str]]]:
    """("markdown" or "code", lines) of each cell of a percent file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# %% [markdown]", f"{path.name} starts with {lines[0]!r}"
    cells = []
    for line in lines:
        if line.startswith("# %%"):
            cells.append(("markdown" if line == "# %% [markdown]" else "code", []))
            assert line in ("# %%", "# %% [markdown]"), f"{path.name}: {line!r}"
        else:
            cells[-1][1].append(line)
    return cells


def test_chapters_are_numbered_from_one():
    assert [int(path.name[:2]) for path in TUTORIALS] == [*range(1, len(TUTORIALS) + 1)]
    assert len(TUTORIALS) >= 8


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_format(path):
    cells = cells_of(path)
    header = "\n".join(cells[0][1])
    number = TUTORIALS.index(path) + 1
    assert header.startswith(f"# # {number}. ")
    for key in ("Question", "Minutes", "Needs", "Previous"):
        assert f"# - **{key}**: " in header, f"the header has no {key}"
    if number > 1:
        assert TUTORIALS[number - 2].stem in header
    assert cells[1][0] == "code"
    for kind, lines in cells:
        if kind == "markdown":
            assert all(not line or line.startswith("#") for line in lines), lines
        else:
            code = [line for line in lines if line.strip()]
            assert 0 < len(code) <= MAX_LINES, f"{len(code)} lines of code, from {code[:1]}"
    titles = re.findall(r"^# ## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[-2:] == ["Exercises", "Answers"]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_two_exercises_with_answers(path):
    prose = ["\n".join(lines) for kind, lines in cells_of(path) if kind == "markdown"]
    exercises = next(text for text in prose if text.startswith("# ## Exercises"))
    assert re.findall(r"^# (\d)\. ", exercises, re.MULTILINE) == ["1", "2"]
    last_kind, last_lines = cells_of(path)[-1]
    assert last_kind == "code" and any(line.startswith("assert ") for line in last_lines)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_imports_only_torch_minihisparse_and_the_standard_library(path):
    source = path.read_text(encoding="utf-8")
    names = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    standard = {"heapq", "inspect", "json", "os", "pathlib", "time", "typing"}
    assert names <= {"torch", "minihisparse", *standard}


# ---- the answers ----


def test_capacity_wall(run):
    chapter = run(1)
    full, hisparse = chapter["longest_context"](32)
    # By hand: (80e9 - 16.06e9) / 32 requests = 1.998 GB each, at 131,072 bytes per token.
    assert full == pytest.approx(1.998e9 / 131_072, rel=1e-3)
    # Less 0.537 GB of records and 0.8 MB of tables; then a page of 16 tokens per record.
    assert hisparse == pytest.approx((1.998e9 - 0.5378e9) / 131_072 * 16, rel=1e-3)
    # 14 requests in HBM, 79 under HiSparse; per request and step 0.268 GB of records, 0.268 GB of
    # page bounds; the wanted time per token is what full HBM has.
    seconds_full = (16.06e9 / 14 + 0.5369e9) / 3350e9
    seconds_read = (16.06e9 / 79 + 0.5369e9) / 3350e9
    expected = (seconds_full - seconds_read) * 55.4e9 / (2048 * 131_072)
    assert chapter["break_even_miss_rate"](32 * 1024) == pytest.approx(expected, rel=2e-3)
    assert chapter["break_even_miss_rate"](128 * 1024) > chapter["MISS_RATE"]


def test_capacity_wall_has_the_published_numbers(run):
    models = run(1)["models"]
    assert models["Llama-3.1-8B"] == (32, 4096, 2 * 8_030_261_248)
    assert models["SmolLM2-135M"] == (30, 768, 2 * 134_515_008)


def test_one_decode_step(run):
    chapter = run(2)
    tokens, lru, newest = chapter["tokens"][0], chapter["lru"][0], chapter["NEWEST"]
    before = [*tokens], [*lru]
    slots, plan = chapter["next_step"]()
    assert (tokens, lru) == before  # an answer leaves the tables alone
    hits = {slot for slot in lru if tokens[slot] in (0, 1)}
    free = [slot for slot in lru if slot not in hits]
    wanted = [p for p in (0, 1, newest) if p not in tokens]
    expected = [Fetch(p, s, tokens[s]) for p, s in zip(wanted, free, strict=False)]
    assert plan == expected
    assert slots[3] == chapter["B"]
    # The first of a page is read again in the next step, whatever the model; no step is wrong
    # while the record is still in the newest slot.
    assert [chapter["first_wrong_step"](p) for p in (12, 14)] == [1, 1]
    assert all(chapter["first_wrong_step"](p) != 0 for p in (11, 13))


def check_chapter_3(chapter: dict, folder: Path) -> None:
    slots, totals = chapter["B"], chapter["totals"]
    first_time, lru = chapter["first_time"], totals["B = 2K"]
    fifo, belady = chapter["fifo_misses"](slots), chapter["belady_misses"](slots)
    assert first_time <= belady <= lru < fifo
    # A cache that forgets nothing has first-time misses only, under either rule.
    assert chapter["fifo_misses"](10**6) == chapter["belady_misses"](10**6) == first_time
    assert sum(sum(row) for row in chapter["engine_misses"]) == int(
        chapter["llm"].cache.counters[:, 1].sum()
    )
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    stems = ["03_hit_rate", "03_overlap"]
    assert names == [f"out/{stem}.{ending}" for stem in stems for ending in ("json", "png")]


def test_why_the_cache_works(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    chapter = run(3)
    assert not chapter["real"]
    assert "model: tiny random model" in capsys.readouterr().out
    check_chapter_3(chapter, tmp_path)


def fewest_misses(steps: list[set[int]], slots: int) -> int:
    """After the first step, over all possible evictions; tries them all."""
    cost = {frozenset(steps[0]): 0}  # what the cache may hold -> fewest misses so far
    for wanted in steps[1:]:
        after: dict[frozenset, int] = {}
        for held, misses in cost.items():
            others = sorted(held - wanted)
            for size in range(min(len(others), slots - len(wanted)) + 1):
                for kept in itertools.combinations(others, size):
                    new = frozenset({*kept, *wanted})
                    total = misses + len(wanted - held)
                    after[new] = min(total, after.get(new, total))
        cost = after
    return min(cost.values())


def test_no_rule_beats_the_answer_to_exercise_2_of_chapter_3(run):
    belady = run(3)["belady_misses"]
    rng = random.Random(0)
    for _ in range(30):
        steps = [set(rng.sample(range(8), 3)) for _ in range(8)]
        belady.__globals__.update(
            selections=[[(100, sorted(step)) for step in steps]],
            ALL_LAYERS=range(1),
            STEPS=len(steps),
        )
        for slots in (3, 4, 5):
            assert belady(slots) == fewest_misses(steps, slots)


def test_why_the_cache_works_without_matplotlib(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(3)
    assert "minihisparse[plots]" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.model
@pytest.mark.slow
def test_why_the_cache_works_with_the_real_model(run, tmp_path, smollm2_dir):
    pytest.importorskip("matplotlib")
    chapter = run(3, str(smollm2_dir))
    assert chapter["real"]
    check_chapter_3(chapter, tmp_path)
    assert chapter["totals"]["B = 2K"] < 0.5 * chapter["totals"]["B = K"]


def test_resolve_rung_by_rung(run, capsys):
    chapter = run(4)
    # By hand: 9 and 17 are in slots 4 and 1; 6, 3 and 0 are the least recent others.
    assert chapter["answer"] == [6, 4, 3, 1, 0, 8]
    assert chapter["after"]["lru_slots"][1].tolist() == [7, 2, 5, 6, 3, 0, 1, 4]
    assert chapter["after"]["device_buffer_tokens"][1].tolist() == [20, 17, 2, 14, 9, 0, 3, 7]
    firsts = [2000, 1700, 200, 1400, 900, 0, 300, 700, 2200]
    assert chapter["after"]["records"][1, :, 0].tolist() == firsts
    assert chapter["by_oracle"](*chapter["call"], chapter["before"])[2] == [
        Fetch(3, slot=6, evicted=13),
        Fetch(14, slot=3, evicted=11),
        Fetch(20, slot=0, evicted=5),
    ]
    out = capsys.readouterr().out
    assert re.search(
        r"hangs, \d blocks cannot start(.*\n){1,2}.*while load_acquire\(ready_at\)", out
    )
    assert re.search(r"barrier 1: wrong in 0 of .*\nbarrier 0: wrong in [1-9]", out)


def test_chapter_4_compares_with_the_oracle(run):
    """What it asserts of each rung can be false: for another answer, and for another state."""
    chapter = run(4)
    agrees, after, answer = chapter["agrees"], chapter["after"], chapter["answer"]
    for rung in ("one_thread", "one_block", "fused"):
        call = rung, chapter["call"], chapter["before"]
        assert agrees(*call, [answer], after)
        assert not agrees(*call, [[*answer[:-1], 0]], after)
        for name in after:
            other = chapter["copy"](after)
            other[name][0].view(-1)[0] += 1  # of the request that is not in the batch
            assert not agrees(*call, [answer], other)


def test_the_table_of_chapter_4_in_any_order_of_threads(run):
    """Positions selected twice, and padding: the lowest index is first; no key is lost."""
    chapter, rng = run(4), random.Random(0)
    ints, launch = chapter["ints"], chapter["simulator"].run
    newest, size = chapter["NEWEST"], chapter["TABLE"]
    for seed in (None, *range(20)):
        selection = [rng.choice([-1, 4, 9, 17, newest]) for _ in range(chapter["K"])]
        keys, first = ints(size, value=-1), ints(size, value=99)
        args = (torch.tensor(selection, dtype=torch.int32), keys, first)
        launch(chapter["enter_selection"], 1, 4, args, seed=seed)  # fewer threads than positions
        entered = {k: i for k, i in zip(keys.tolist(), first.tolist(), strict=True) if k != -1}
        assert entered == {p: selection.index(p) for p in {*selection} - {-1, newest}}
        found, hit = ints(size, value=-1), ints(chapter["B"], value=-1)
        launch(chapter["find_hits"], 1, 3, (chapter["tokens"], keys, found, hit), seed=seed)
        tokens = chapter["tokens"].tolist()
        assert hit.tolist() == [int(t in entered) for t in tokens]
        expected = [tokens.index(k) if k in {*tokens} - {-1} else -1 for k in keys.tolist()]
        assert found.tolist() == expected


def test_answers_of_chapter_4(run):
    chapter, rng = run(4), random.Random(0)
    for seed in (None, *range(10)):
        values = [rng.randrange(-1000, 1000) for _ in range(32)]
        assert chapter["sums_below"](values, seed) == [sum(values[:i]) for i in range(32)]
    launches = {cleared: set() for cleared in (0, 1)}
    for seed, cleared in itertools.product(range(40), launches):
        launches[cleared] |= {*chapter["second_launch"](seed, cleared)}
    assert launches == {0: {1, 2}, 1: {2}}


def test_the_kernels_of_chapter_4_rank_like_a_loop(run):
    """In any order of threads: by shares, by votes, and both counts in one word."""
    chapter, rng = run(4), random.Random(0)
    ints, launch = chapter["ints"], chapter["simulator"].run
    for seed in (None, *range(10)):
        rest, missed = [[rng.randrange(2) for _ in range(n)] for n in (chapter["B"], chapter["K"])]
        expected = [0, *itertools.accumulate(rest)]
        flags = [torch.tensor(x, dtype=torch.int32) for x in (rest, missed)]
        ranks, sums, words = ints(chapter["B"]), ints(8), ints(3)
        launch(chapter["rank_flags"], 1, 7, (flags[0], sums, ranks), seed=seed)
        assert (ranks.tolist(), int(sums[7])) == (expected[:-1], expected[-1])
        launch(chapter["rank_by_vote"], 1, 32, (*flags, ranks.zero_(), words), seed=seed)
        assert ranks.tolist() == expected[:-1]
        assert words[2] == sum(rest) + 2**16 * sum(missed)
