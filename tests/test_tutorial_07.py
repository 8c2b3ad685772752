"""Tutorial 7 runs as a reader would run it; what it shows is so; its answers are right.

Guards: an indexer, a loss or a mask in the chapter that are not the ones that were shipped; a layer
made by hand whose heads read something else than is said; measures that another count does not
confirm; numbers that are not those of the files; comparisons and asserts that cannot fail.

The chapter runs without the real model everywhere, and with it where there is a folder (`model`).
"""

import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model_config import ModelConfig
from minihisparse.weights_scripts.distil_dsa import DsaStudent
from minihisparse.weights_scripts.distil_model import dense_probabilities

REPOSITORY = Path(__file__).parents[1]
CHAPTER = REPOSITORY / "tutorials" / "07_teaching_a_model_where_to_look.py"
FILES = {
    name: REPOSITORY / "weights_scripts" / "addons" / f"smollm2-135m-{name}.safetensors"
    for name in ("dsa", "dsa-shared")
}


def run_chapter(folder: Path, model: str) -> SimpleNamespace:
    """The chapter's globals, and what it printed, after it ran in an empty folder."""
    random_state, printed = torch.get_rng_state(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("MINIHISPARSE_MODEL", model)
        names = runpy.run_path(str(CHAPTER), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
    return SimpleNamespace(**names, printed=printed.getvalue(), folder=folder)


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    return run_chapter(tmp_path_factory.mktemp("seven"), "tiny")


def run_cell(chapter: SimpleNamespace, beginning: str, **changes) -> dict:
    """Runs the cell that begins so once more, with some globals changed; its globals."""
    cells = CHAPTER.read_text(encoding="utf-8").split("# %%\n")
    (cell,) = [cell for cell in cells if cell.lstrip("\n").startswith(beginning)]
    names = vars(chapter) | changes
    exec(cell.split("# %% [markdown]")[0], names)
    return names


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_it_runs(seven):
    assert not seven.real
    assert "chapter 7: all asserts hold" in seven.printed
    assert "model: a layer made by hand" in seven.printed


def test_the_figure_and_its_data(seven):
    pytest.importorskip("matplotlib")
    names = ["07_addon.safetensors", "07_hit_rate.json", "07_hit_rate.png"]
    assert files_in(seven.folder) == [f"out/{name}" for name in names]
    data = json.loads((seven.folder / "out/07_hit_rate.json").read_text())
    assert data == {
        "config": seven.setting,
        "by_step": seven.by_step,
        "by_layer": seven.by_layer,
    }


def test_without_matplotlib(seven, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.chdir(tmp_path)
    run_cell(seven, "compared, by_layer")
    assert "minihisparse[plots]" in capsys.readouterr().out and not list(tmp_path.iterdir())


# ---- the layer by hand ----


def test_what_the_heads_of_the_layer_by_hand_read(seven):
    for text in seven.texts:
        sink, near, induction = dense_probabilities(text.states)
        rows = text.states.rows
        assert sink[:, 0].min() > 0.9
        distance = rows[:, None] - torch.arange(seven.T)
        assert (near * (distance < 64)).sum(1).mean() > 0.7
        copied = (rows >= text.copy + 2) & (rows < text.copy + seven.SPAN - 1)
        after_source = rows - text.copy + text.source + 1  # what followed there
        read = induction.gather(1, after_source.clamp(0, seven.T - 1)[:, None])[copied]
        assert copied.sum() == seven.SPAN - 3 and read.mean() > 0.8


def test_texts(seven):
    assert len(seven.train_on) == seven.NUM_TRAIN and len(seven.held_out) == 3
    for text in seven.texts:
        assert text.source + seven.SPAN <= seven.T // 2 < text.copy <= seven.T - seven.SPAN
        assert torch.allclose(text.dense.sum(1), torch.ones(len(seven.ROWS)), atol=1e-5)
        x = text.states.x  # a copy's third token and the ones after it know only copied tokens
        one, other = (x[at + 2 : at + seven.SPAN] for at in (text.source, text.copy))
        assert torch.equal(one, other)
    trained_on = {file for file, _ in seven.PIECES[: seven.NUM_TRAIN]}
    assert not trained_on & {file for file, _ in seven.PIECES[seven.NUM_TRAIN :]}


# ---- the indexer and its training are those that were shipped ----


@pytest.fixture(scope="module")
def student(seven):
    """What distil.py trains, for the layer by hand."""
    hidden = seven.texts[0].states.x.shape[1]
    config = ModelConfig(256, hidden, 48, 1, 4, 2, 8)
    sizes = {"index_n_heads": seven.HEADS, "index_head_dim": seven.DIM, "rope_dim": seven.DIM // 2}
    return DsaStudent(config, (0,), seven.T, seed=5, **sizes)


def test_always_is_what_the_selection_holds(seven):
    """The first four positions, and the newest 16: of each query, by a loop."""
    for row, position in enumerate(seven.ROWS.tolist()):
        held = {*range(4), *range(position - 15, position + 1)}
        assert seven.given[row].nonzero()[:, 0].tolist() == sorted(held)
        assert seven.causal[row].sum() == position + 1 and seven.causal[row, : position + 1].all()


def test_the_indexer_and_the_loss(seven, student):
    for text in seven.texts[:2]:
        states = text.states
        loss = student.loss(states)
        indexer, scale = student.indexers[0], float(student.input_scale[0])
        ours = seven.index_scores(states.x * scale, states.rows, indexer)
        theirs = indexer.scores(states.x, states.rows, student._angles, scale)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        left_out = ~states.causal | seven.given
        torch.testing.assert_close(
            seven.divergence(text.dense, ours, left_out), loss, rtol=1e-4, atol=1e-6
        )
        assert loss > 0.1


def test_the_divergence_by_hand(seven):
    p = torch.tensor([[0.5, 0.25, 0.25]])
    out = torch.tensor([[False, False, True]])
    scores = torch.tensor([[0.0, 0.0, 9.0]])
    expected = 0.5 * torch.log(torch.tensor(0.5 / 0.375)) + 0.25 * torch.log(
        torch.tensor(0.25 / 0.375)
    )
    torch.testing.assert_close(seven.divergence(p, scores, out), expected)
    assert seven.divergence(p, p.log(), torch.zeros_like(out)).abs() < 1e-6


def without_relu(x, rows, of):
    gain, bias = of.k_norm_weight, of.k_norm_bias
    k = torch.nn.functional.layer_norm(x @ of.wk.T, gain.shape, gain, bias, 1e-6)
    q = (x[rows] @ of.wq.T).unflatten(1, (len(of.weights_proj), -1))
    return torch.einsum("rhd,td,rh->rt", q, k, x[rows] @ of.weights_proj.T)


def test_comparing_with_the_engine_can_fail(seven):
    assert all(run_cell(seven, "N, NEWEST")["same_lists"])
    assert not all(run_cell(seven, "N, NEWEST", index_scores=without_relu)["same_lists"])
    for change in ({"RECENT": seven.RECENT + 1}, {"SINKS": seven.SINKS - 1}):
        assert not all(run_cell(seven, "N, NEWEST", **change)["same_lists"])
    other = {"indexer_of": lambda addon, layer: seven.indexer_of(addon, layer + 1)}
    assert not all(run_cell(seven, "N, NEWEST", **other)["same_lists"])


# ---- what is measured ----


def test_found_counts_what_is_read(seven):
    texts = seven.held_out
    every = seven.found(lambda states: states.causal, texts)
    assert every == pytest.approx([1, 1, 1], abs=1e-5)
    assert seven.found(lambda states: torch.zeros_like(states.causal), texts) == [0, 0, 0]
    mass, searched, _ = seven.found(lambda states: seven.given, texts)
    assert mass == pytest.approx(seven.free, abs=1e-5) and searched == 0
    mass, _, _ = seven.found(seven.oracle(seven.K), texts)
    assert mass == pytest.approx(seven.top_mass[seven.K], abs=1e-5)
    # What is at the source only: found by queries of the copy; by a loop.
    at_source = [torch.zeros_like(text.states.causal) for text in texts]
    shares = []
    for mask, text in zip(at_source, texts, strict=True):
        mask[:, text.source : text.source + seven.SPAN // 2] = True
        half = whole = 0.0
        for row, position in enumerate(seven.ROWS.tolist()):
            if text.copy <= position < text.copy + seven.SPAN:
                read = text.dense[row, text.source : text.source + seven.SPAN]
                half += float(read[: seven.SPAN // 2].sum())
                whole += float(read.sum())
        shares.append(half / whole)
    masks = iter(at_source)
    _, _, source = seven.found(lambda states: next(masks), texts)
    assert source == pytest.approx(sum(shares) / 3, rel=1e-4) and 0.3 < source < 0.7


def test_picks_are_k_positions_and_hold_what_is_given(seven):
    select = seven.picks(seven.students["trained"], seven.SCALE, seven.K)
    for text in seven.held_out:
        mask = select(text.states)
        assert (mask.sum(1) == seven.K).all() and not (mask & ~text.states.causal).any()
        assert (mask | ~seven.given).all()


def test_the_table_of_perplexities_is_that_of_the_files(seven):
    for name, path in FILES.items():
        with safe_open(path, framework="pt") as file:
            columns = json.loads(file.metadata()["scores"])["columns"]
        ours = seven.measured[name]
        assert ours == columns["addon"]
        row = f"{ours['ppl']:8.2f}{ours['copy']:8.2f}{ours['needles']:6} of {seven.NEEDLES}"
        assert f"{name:14}{row}" in seven.printed
        if name == "dsa":
            others = {x: row for x, row in columns.items() if x not in ("addon", "dense")}
            assert others == {x: seven.measured[x] for x in others} and len(others) == 4


def test_sizes_are_those_of_the_model_in_the_header(seven):
    """By hand: 64 numbers in bf16; K and V of 3 heads of 64; 4 heads of 64 and a weight each."""
    assert (seven.KEY_BYTES, seven.RECORD_BYTES) == (128, 768)
    assert (seven.index_flops, seven.attention_flops) == (4 * 2 * 65, 4 * 9 * 64)


# ---- the engine ----


def test_misses_counted_from_selections_alone(seven, monkeypatch):
    """The same engine again; its selections through the oracle, which keeps tables of its own."""
    monkeypatch.chdir(seven.folder)
    llm = seven.make_llm("hisparse", "dsa")
    select, selections, slots = llm.runner.selector.select, [], 2 * seven.TOP_K

    def watched(layer, inputs, batch):
        positions = select(layer, inputs, batch)
        selections.append((layer, batch.max_seq_len, positions[0].tolist()))
        return positions

    monkeypatch.setattr(llm.runner.selector, "select", watched)
    _, counts = seven.decode(llm)
    assert torch.equal(counts, seven.counts["dsa"])
    tables = [([-1] * slots, [*range(slots)]) for _ in range(4)]
    misses = []
    for layer, S, positions in selections:
        picks = [position for position in positions if position >= 0]
        misses.append(len(resolve_oracle(picks, S, *tables[layer])[1]))
    assert torch.tensor(misses).view(-1, 4).tolist() == counts[:, :, 1].tolist()
    assert counts[:, :, 1].sum() > 100


def test_comparing_with_full_kv_can_fail(seven, monkeypatch):
    """A record in the wrong slot, in the last layer alone, is seen in the logits."""
    monkeypatch.chdir(seven.folder)
    fetch = HiSparseCache._fetch

    def shifted(cache, layer, plan):
        fetch(cache, layer, (plan[0], plan[1].roll(1)) if layer == 3 else plan)

    right = seven.logits["dsa, full"]
    assert torch.equal(seven.decode(seven.make_llm("hisparse", "dsa"))[0], right)
    monkeypatch.setattr(HiSparseCache, "_fetch", shifted)
    assert not torch.equal(seven.decode(seven.make_llm("hisparse", "dsa"))[0], right)


def test_dense_leaves_nothing_out(seven):
    runner = seven.make_llm("full", "quest", seven.ALL).runner
    row = runner.admit(len(seven.prompt) + seven.NEW)
    runner.prefill(row, seven.prompt)
    batch = Batch.make([row], [len(seven.prompt) + 1], "cpu")
    result = runner.decode_layer(0, runner.embed(seven.right[:1]), batch)
    assert (result.positions[0] >= 0).sum() == len(seven.prompt) + 1


# ---- asserts ----


@pytest.mark.parametrize(
    "change",
    [
        lambda seven: {"exact": False},
        lambda seven: {"same_lists": [*seven.same_lists[1:], False]},
        lambda seven: {"with_relu": seven.collapsed},
        lambda seven: {"curves": seven.curves | {"unmasked": [1.0] * seven.STEPS}},
        lambda seven: {"results": seven.results | {"trained": seven.results["unmasked"]}},
        lambda seven: {"results": seven.results | {"trained": seven.results["Quest"]}},
        lambda seven: {"results": seven.results | {"Quest": seven.results["oracle"]}},
        lambda seven: {"results": seven.results | {"oracle": seven.results["trained"]}},
        lambda seven: {"measured": seven.measured | {"quest": seven.measured["dsa"]}},
        lambda seven: {"measured": seven.measured | {"dsa": seven.measured["quest"]}},
        lambda seven: {"lru": {"dsa": 0.1, "quest": 0.2}},
    ],
)
def test_asserts_can_fail(seven, change):
    run_cell(seven, "assert all(same_lists)")
    changes = change(seven)
    with pytest.raises(AssertionError):
        run_cell(seven, "assert all(same_lists)", **changes)


# ---- answers ----


def check_answer_2(chapter: SimpleNamespace) -> None:
    target = chapter.searched["Quest"]

    def searched(top_k: int) -> float:
        select = chapter.picks(chapter.students["trained"], chapter.SCALE, top_k)
        return chapter.found(select, chapter.held_out)[1]

    assert searched(chapter.fewest - 1) < target <= searched(chapter.fewest)


def test_answers(seven):
    for key, record, top_k in ((128, 768, 256), (68, 768, 256), (64, 128, 7), (1, 1000, 5)):
        lengths = range(1, 10_000)
        least = next(S for S in lengths if S * key + top_k * record < S * record)
        assert seven.answer_1(key, record, top_k) == least
    check_answer_2(seven)
    assert f"from {seven.lengths[0]} tokens on" in seven.printed


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("MINIHISPARSE_LONG_TESTS"),
    reason="trains on the real model for minutes; MINIHISPARSE_LONG_TESTS=1 runs it",
)
def test_with_the_real_model(tmp_path, smollm2_dir):
    chapter = run_chapter(tmp_path, str(smollm2_dir))
    assert chapter.real and "chapter 7: all asserts hold" in chapter.printed
    assert chapter.texts[0].states.layer == 18 and len(chapter.same_lists) == 8
    assert min(chapter.follows["dense"], chapter.follows["dsa"]) > chapter.follows["quest"]
    check_answer_2(chapter)
