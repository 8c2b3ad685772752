"""distil_model: the frozen model's layers are those of the model, and autograd can use them.

Guards: queries of other rows than asked for; probabilities that see the future or mix up the heads
of a KV group; inference tensors, which a backward pass refuses.
"""

import pytest
import torch
from dense_reference import dense_attention
from rig import assert_near

from minihisparse.weights_scripts.distil_model import dense_layers, dense_probabilities

ROWS = torch.tensor([3, 17, 18, 40])


@pytest.fixture
def layers(tiny_decoder):
    tokens = torch.randint(128, (41,), generator=torch.Generator().manual_seed(0))
    return tiny_decoder(), tokens, list(dense_layers(tiny_decoder(), tokens, ROWS))


def test_states_are_those_of_a_plain_forward_pass(layers):
    model, tokens, found = layers
    hidden = model.embed(tokens)
    for layer, states in enumerate(found):
        inputs = model.attention_inputs(layer, hidden, torch.arange(41))
        k, v = inputs.records.view(41, 2, -1, inputs.q.shape[2]).unbind(1)
        assert states.layer == layer
        expected = [inputs.x, inputs.q[ROWS], k, v]
        for got, want in zip((states.x, states.q, states.k, states.v), expected, strict=True):
            assert_near(got, want, 1e-5, f"layer {layer}")
        attention = dense_attention(inputs.q, k, v, torch.arange(41))
        hidden = model.attention_output(layer, hidden, attention)
    assert len(found) == 3


def test_probabilities_give_the_attention(layers):
    for states in layers[2]:
        p = dense_probabilities(states)
        v = states.v.repeat_interleave(3, dim=1)  # six query heads, two KV heads
        got = torch.einsum("hrt,thd->rhd", p, v)
        expected = dense_attention(states.q, states.k, states.v, ROWS)
        assert_near(got, expected, 1e-5)
        assert (p[:, 0, 4:] == 0).all()  # row 0 is position 3
        assert_near(p.sum(-1), torch.ones(6, 4), 1e-5)


def test_autograd_can_use_them(layers):
    states = layers[2][1]
    weight = torch.ones(48, 5, requires_grad=True)
    (states.x @ weight).sum().backward()
    gain = torch.ones(8, requires_grad=True)
    (states.k * gain).sum().backward()
    assert weight.grad is not None and gain.grad is not None
