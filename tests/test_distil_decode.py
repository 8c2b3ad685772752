"""distil_decode: many steps at once give what the engine gives step by step.

Guards: a step that reads states of the dense pass where its own are due, or later positions; scores
that no engine can reproduce; continuations that begin one token off.
"""

import pytest
import torch
from dense_reference import dense_logits
from rig import assert_near

from minihisparse.addon import write_addon
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.weights_scripts.distil_commands import make_addon
from minihisparse.weights_scripts.distil_decode import (
    decode,
    dense,
    greedy,
    prefill,
    token_losses,
)
from minihisparse.weights_scripts.distil_dsa import DsaStudent
from minihisparse.weights_scripts.distil_masks import positions_of, quest, selection_of

TOKENS = torch.randint(128, (150,), generator=torch.Generator().manual_seed(3))
FIRST, TOP_K = 90, 32
SMALL = {"index_n_heads": 3, "index_head_dim": 8, "rope_dim": 4, "num_recent": 5, "top_k": TOP_K}


def test_dense_steps_are_the_dense_model(tiny_decoder):
    model = tiny_decoder()
    text = prefill(model, TOKENS[:FIRST], 150)
    for _ in range(2):  # a second run finds the first one's states there
        hidden = decode(model, text, TOKENS[FIRST:], FIRST, dense)
        assert_near(model.logits(hidden), dense_logits(model, TOKENS)[FIRST:], 2e-4)


def test_steps_can_be_taken_one_by_one(tiny_decoder):
    model, select = tiny_decoder(), quest(TOP_K, page_size=8)
    text = prefill(model, TOKENS[:FIRST], 150)
    at_once = decode(model, text, TOKENS[FIRST:], FIRST, select)
    text = prefill(model, TOKENS[:FIRST], 150)
    single = [decode(model, text, TOKENS[i : i + 1], i, select) for i in range(FIRST, 150)]
    assert_near(at_once, torch.cat(single), 1e-4)


@pytest.mark.parametrize("selector", ["quest", "dsa", "dsa-shared"])
def test_perplexity_and_selections_are_the_engines(tiny_decoder, tmp_path, selector):
    model = tiny_decoder()
    if selector == "quest":
        path, select = None, quest(TOP_K)
    else:
        anchors = (0, 1, 2) if selector == "dsa" else (0, 2)
        student = DsaStudent(model.config, anchors, 150, **SMALL)
        student.input_scale.fill_(1.0)
        addon = make_addon(selector, student, model, "tiny", {})
        path, select = tmp_path / "addon", selection_of(addon, 150, model.device)
        write_addon(path, addon)
    runner = make_runner(
        model,
        cache="full",
        selector=selector,
        hisparse=HiSparseConfig(top_k=TOP_K),
        max_model_len=160,
        max_running_requests=1,
        selector_weights=path,
    )
    row = runner.admit(150)
    runner.prefill(row, TOKENS[:FIRST])
    engine_logits, engine_positions = [], []
    for position in range(FIRST, 150):
        batch = Batch.make([row], [position + 1], "cpu")
        hidden = runner.embed(TOKENS[position : position + 1])
        for layer in range(3):
            result = runner.decode_layer(layer, hidden, batch)
            engine_positions.append(result.positions.clone())
            hidden = result.hidden
        engine_logits.append(runner.logits(hidden))

    masks = []
    text = prefill(model, TOKENS[:FIRST], 150)
    watch = lambda states, mask: masks.append(positions_of(mask, TOP_K))  # noqa: E731
    hidden = decode(model, text, TOKENS[FIRST:], FIRST, select, watch)
    expected = torch.cat(engine_positions).view(60, 3, TOP_K)
    assert torch.equal(torch.stack(masks, dim=1), expected)
    assert not torch.equal(expected[:, 0], expected[:, 1]) or selector == "dsa-shared"
    assert_near(model.logits(hidden), torch.cat(engine_logits), 2e-4)

    losses, right = token_losses(model, hidden[:-1], TOKENS[FIRST + 1 :])
    log_p = torch.cat(engine_logits)[:-1].log_softmax(-1)
    of_engine = -log_p.gather(1, TOKENS[FIRST + 1 :, None])[:, 0]
    assert_near(losses, of_engine, 2e-4)
    assert torch.equal(right, log_p.argmax(-1) == TOKENS[FIRST + 1 :])


def test_greedy_is_the_models_own_continuation(tiny_decoder):
    model, tokens = tiny_decoder(), TOKENS[:20]
    calls = []
    got = greedy(model, tokens, 12, dense, lambda: calls.append(None))
    for _ in range(12):
        tokens = torch.cat([tokens, dense_logits(model, tokens)[-1:].argmax(-1)])
    assert got.tolist() == tokens[20:].tolist() and len(calls) == 12
