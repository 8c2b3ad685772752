"""distil_nsa: the loss and its parts, what is exported, and the selection that evaluation uses.

Guards: a student that learns another compression than the engine runs; a loss that leaves a part
out, or in which blocks that are read anyway count; gradients that never reach a weight; training
that begins worse than without any; an export without the inputs' scale; evaluation that decodes
otherwise than the engine.
"""

import math

import numpy as np
import pytest
import torch
from rig import assert_near
from torch import Tensor

from minihisparse.addon import read_addon, write_addon
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.model import AttentionInputs, Decoder
from minihisparse.nsa import NSASelector, tensor_name
from minihisparse.weights_scripts.distil_commands import make_addon, make_student
from minihisparse.weights_scripts.distil_decode import decode, masked_attention, prefill
from minihisparse.weights_scripts.distil_masks import mean_pooled, positions_of, selection_of
from minihisparse.weights_scripts.distil_model import (
    LayerStates,
    dense_layers,
    dense_probabilities,
)
from minihisparse.weights_scripts.distil_nsa import (
    SELECTION_WEIGHT,
    NsaStudent,
    forced_blocks,
    nsa_selection,
    selected_mask,
    window_mask,
)
from minihisparse.weights_scripts.distil_train import TrainSettings, train

SMALL = {"block_size": 4, "window": 6, "top_k": 24}
TOKENS = torch.randint(128, (94,), generator=torch.Generator().manual_seed(3))
ROWS = torch.tensor([2, 3, 20, 47, 70, 93])


def random_student(model: Decoder, seed: int = 0, **changes: float) -> NsaStudent:
    """Weights that are not those of the beginning, and scales that are no 1."""
    student = NsaStudent(model.config, 96, **SMALL | changes)
    generator = torch.Generator().manual_seed(seed)
    for parameter in student.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
        parameter.data += size * torch.randn(parameter.shape, generator=generator)
    student.input_scale.copy_(torch.tensor([1.5, 0.5, 1.0]))
    student._has_scales = True
    return student


def layer_states(model: Decoder, layer: int = 1) -> LayerStates:
    return list(dense_layers(model, TOKENS, ROWS))[layer]


def decode_inputs(states: LayerStates, row: int) -> AttentionInputs:
    """A row as one decode step's inputs."""
    at = int(states.rows[row])
    records = torch.cat([states.k[at], states.v[at]]).flatten()[None]
    return AttentionInputs(states.x[at : at + 1], states.q[row : row + 1], records)


# ---- the compression is the engine's ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compression_selection_and_gates_are_the_engines(tiny_decoder, dtype):
    model = tiny_decoder(dtype=dtype)
    student, layer = random_student(model), 1
    states = layer_states(model, layer)
    addon = make_addon("nsa", student, model, "tiny", {})
    reading = nsa_selection(addon, 96, model.device).layers[layer].read(states)
    shares = reading.shares.detach()
    selected = selected_mask(states, shares.sum(dim=0), student.settings)
    mask = selected | window_mask(states, student.settings)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for row, position in enumerate(ROWS.tolist()):
        selector = NSASelector(addon, model, top_k=24, max_requests=1, max_model_len=96)
        selector.admit(0, 96)
        prompt = AttentionInputs(
            states.x[:position], None, torch.cat([states.k, states.v], 1).flatten(1)[:position]
        )
        selector.write_prompt(layer, 0, 0, prompt)
        inputs, batch = decode_inputs(states, row), Batch.make([0], [position + 1], "cpu")
        selector.write(layer, inputs, batch)
        positions = selector.select(layer, inputs, batch)
        branches = selector.branches(layer, inputs, positions, batch)
        assert torch.equal(positions_of(mask, 24)[row], positions[0])
        read = positions[0][branches.selected[0]].long()
        assert selected[row].nonzero().flatten().tolist() == read.tolist()
        assert_near(branches.gates[0], reading.gates[row].detach(), tolerance)
        assert_near(branches.compressed[0], reading.compressed(shares)[row].detach(), tolerance)


def test_forced_blocks_and_window(tiny_decoder):
    model = tiny_decoder()
    states = next(dense_layers(model, TOKENS[:14], torch.tensor([0, 4, 13])))
    settings = random_student(model).settings
    got = [row.nonzero().flatten().tolist() for row in forced_blocks(states, settings)]
    assert got == [[0], [0, 1], [0, 2, 3]]
    got = [row.nonzero().flatten().tolist() for row in window_mask(states, settings)]
    assert got == [[0], [0, 1, 2, 3, 4], [8, 9, 10, 11, 12, 13]]


# ---- the loss ----


def divergence(p: list[float], scores: list[float]) -> float:
    """sum p log(p / mass / softmax(scores)), in Python numbers."""
    mass, z = sum(p), sum(math.exp(score) for score in scores)
    return sum(
        a * math.log(a / mass / (math.exp(s) / z)) for a, s in zip(p, scores, strict=True) if a
    )


def loss_by_hand(student: NsaStudent, states: LayerStates) -> tuple[float, float]:
    """Error and selection: row by row and head by head, from scores and gates."""
    scale = student.input_scale[states.layer]
    reading = student.layers[states.layer].read(states, scale)
    dense, size = dense_probabilities(states), student.settings["block_size"]
    num_heads, group = dense.shape[0], dense.shape[0] // states.k.shape[1]
    selected = selected_mask(states, reading.shares.sum(0), student.settings)
    branches = [masked_attention(states, selected)]
    branches.append(masked_attention(states, window_mask(states, student.settings)))
    expected = masked_attention(states, states.causal)
    error = size_of_all = selection = 0.0
    for row, position in enumerate(states.rows.tolist()):
        whole = (position + 1) // size
        inner = [b for b in range(whole) if 1 <= b <= position // size - 2]
        mean_target, mean_share = [0.0] * whole, [0.0] * whole
        for head in range(num_heads):
            scores = reading.scores[head, row, :whole].tolist()
            share = torch.tensor(scores).softmax(0) if whole else torch.zeros(0)
            value = reading.values[:whole, head // group]
            outputs = [(share[:, None] * value).sum(0), *(b[row, head] for b in branches)]
            gates = reading.gates[row, head]
            output = sum(g * o for g, o in zip(gates, outputs, strict=True))
            error += float((output - expected[row, head]).pow(2).sum())
            size_of_all += float(expected[row, head].pow(2).sum())
            target = [
                float(dense[head, row, b * size : (b + 1) * size].sum()) for b in range(whole)
            ]
            for b in range(whole):
                mean_target[b] += target[b] / num_heads
                mean_share[b] += float(share[b]) / num_heads
        logs = [math.log(mean_share[b]) for b in inner]
        selection += divergence([mean_target[b] for b in inner], logs)
    rows = len(states.rows)
    return error / size_of_all, selection / rows


def test_loss_is_the_sum_of_its_parts(tiny_decoder):
    model = tiny_decoder()
    student, states = random_student(model), layer_states(model)
    with torch.no_grad():
        parts = loss_by_hand(student, states)
        assert min(parts) > 0.01
        expected = parts[0] + SELECTION_WEIGHT * parts[1]
        assert abs(float(student.loss(states)) - expected) < 1e-4


def test_every_weight_of_the_layer_learns_and_no_other(tiny_decoder):
    model = tiny_decoder()
    student = random_student(model)
    student.loss(layer_states(model)).backward()
    for layer, compression in enumerate(student.layers):
        for name, weight in zip(compression.names, compression.weights, strict=True):
            moved = weight.grad is not None and bool((weight.grad != 0).any())
            assert moved == (layer == 1), name


def test_it_begins_with_mean_pooling(tiny_decoder):
    """And the selected branch alone, nearly."""
    model = tiny_decoder()
    student, states = NsaStudent(model.config, 96, **SMALL), layer_states(model)
    student.input_scale.fill_(1.0)
    addon = make_addon("nsa", student, model, "tiny", {})
    select = nsa_selection(addon, 96, model.device)
    mask = select(states)
    untrained = mean_pooled(24, block_size=4)(states)
    # Mean pooling leaves a newest block out of the scores that is complete; it is read anyway.
    late = [index for index, row in enumerate(ROWS.tolist()) if row % 4 != 3]
    window = window_mask(states, student.settings)
    assert torch.equal(mask[late], (untrained | window)[late])
    alone = masked_attention(states, untrained | mask)
    assert (select.attend(states, mask) - alone).abs().mean() < 0.2 * alone.abs().mean()


# ---- training ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_falls(tiny_decoder, dtype):
    model = tiny_decoder(dtype=dtype)
    student = make_student("nsa", model, 96, 0, **SMALL)
    text = np.random.default_rng(0).integers(0, 128, 4000).astype(np.uint16)
    settings = TrainSettings(max_steps=60, seq_len=96, rows=24, learning_rate=0.03)
    result = train(model, student, text, settings, progress=False)
    first, *_, last = (loss for _, loss in result.losses)
    assert last < 0.9 * first
    assert (student.input_scale > 0).all()


def test_export_folds_the_scale_in(tiny_decoder):
    model = tiny_decoder()
    student = random_student(model)
    exported = student.export()
    assert len(exported) == 3 * 5
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    for name, factor in {
        "pool.weight": 1.5,
        "gate.weight": 1.5,
        "place": 1.0,
        "gate.bias": 1.0,
    }.items():
        own = student.layers[0].tensors()[name].detach() * factor
        assert torch.equal(exported[tensor_name(0, name)], own.bfloat16())


def test_the_file_of_the_real_model_is_small(tiny_config):
    config = tiny_config(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    exported = NsaStudent(config, 8192).export()
    assert sum(tensor.nbytes for tensor in exported.values()) < 3e6


# ---- evaluation ----


def test_evaluation_decodes_as_the_engine_does(tiny_decoder, tmp_path):
    model, path, first = tiny_decoder(), tmp_path / "addon", 60
    write_addon(path, make_addon("nsa", random_student(model), model, "tiny", {}))
    runner = make_runner(
        model,
        cache="full",
        selector="nsa",
        hisparse=HiSparseConfig(top_k=24, page_size=4),
        max_model_len=96,
        max_running_requests=1,
        selector_weights=path,
    )
    row = runner.admit(94)
    runner.prefill(row, TOKENS[:first])
    engine_hidden, engine_positions = [], []
    for position in range(first, 94):
        batch = Batch.make([row], [position + 1], "cpu")
        hidden = runner.embed(TOKENS[position : position + 1])
        for layer in range(3):
            result = runner.decode_layer(layer, hidden, batch)
            engine_positions.append(result.positions)
            hidden = result.hidden
        engine_hidden.append(hidden)

    masks: list[Tensor] = []
    select = selection_of(read_addon(path), 94, model.device)
    text = prefill(model, TOKENS[:first], 94)
    watch = lambda states, mask: masks.append(positions_of(mask, 24))  # noqa: E731
    hidden = decode(model, text, TOKENS[first:], first, select, watch)
    expected = torch.cat(engine_positions).view(34, 3, 24)
    assert torch.equal(torch.stack(masks, dim=1), expected)
    assert_near(hidden, torch.cat(engine_hidden), 2e-4)
