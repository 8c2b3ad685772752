"""NSA's compression and gates, as a student that learns what dense attention reads and gives.

The three gated branches of minihisparse/nsa.py, beside a frozen model. Per layer, on its own, the
loss is the sum of
    error      of the attention output, relative to the dense one's size: what the gates, and the
               compressed values, are for
    selection  the KL divergence of the compressed keys' attention, mean over heads, from the share
               of dense attention that lies in each block; blocks that are read in any case are left
               out of both: what they draw would drown the rest, and copying is lost
The selected blocks are those of the present scores, and have no gradient. It begins as selection by
mean-pooled keys, with almost all the weight on the selected branch.

Shapes: T positions, R of them as queries, N complete blocks, P blocks in all.
Cost: 2 * (2 * Hkv * (hidden + block_size + D * D) + 3 * Hq * (hidden + 1)) bytes per layer in bf16:
2.6 MB for 30 layers of SmolLM2-135M. A step holds a few tensors of [Hq, R, T] float32 of one layer,
151 MB each for 512 rows and 8,192 tokens.
Does not know: batches, optimizers, measures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minihisparse.addon import Addon
from minihisparse.attention import Branches, gated_sum
from minihisparse.model_config import ModelConfig
from minihisparse.nsa import compress, gates, tensor_name, weight_shapes, weighted
from minihisparse.weights_scripts.distil_decode import masked_attention
from minihisparse.weights_scripts.distil_masks import top_k_mask
from minihisparse.weights_scripts.distil_model import LayerStates, dense_probabilities

SETTINGS = {
    "block_size": 32,
    "window": 64,
    "num_first_blocks": 1,
    "num_last_blocks": 2,
    "top_k": 256,
}
FIRST_GATE_BIAS = (-3.0, 3.0, -3.0)  # compressed, selected, window
SELECTION_WEIGHT = 3.0  # the error counts 1


class Reading(NamedTuple):
    """What some queries of one layer make of its blocks."""

    scores: Tensor  # [Hq, R, N] float32, of the compressed keys; not masked
    values: Tensor  # [N, Hkv, D] float32
    complete: Tensor  # [R, N] bool, whole blocks up to the query
    gates: Tensor  # [R, Hq, 3] float32

    @property
    def shares(self) -> Tensor:
        """The softmax over complete blocks, [Hq, R, N]; zero in a row that has none."""
        return self.scores.masked_fill(~self.complete, -1e30).softmax(dim=2) * self.complete

    def compressed(self, shares: Tensor) -> Tensor:
        """The output of the branch, [R, Hq, D]."""
        return _outputs(shares, self.values)


class Compression(nn.Module):
    """One layer's weights, named as in the add-on."""

    def __init__(self, tensors: dict[str, Tensor], settings: dict) -> None:
        """tensors: by the names of `weight_shapes`."""
        super().__init__()
        self.settings = settings
        self.names = tuple(tensors)
        self.weights = nn.ParameterList(tensors.values())

    def tensors(self, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
        """Its weights by name. scale: a factor on the matrices that act on x."""
        factors = {"pool.weight": scale, "gate.weight": scale}
        named = zip(self.names, self.weights, strict=True)
        return {name: tensor * factors.get(name, 1.0) for name, tensor in named}

    def read(self, states: LayerStates, scale: Tensor | float = 1.0) -> Reading:
        """Rounded to x's dtype where the engine rounds (minihisparse/nsa.py)."""
        size, dtype = self.settings["block_size"], states.x.dtype
        num_blocks, num_kv_heads = len(states.x) // size, states.k.shape[1]
        x = states.x[: num_blocks * size]
        vectors = torch.cat([states.k, states.v], dim=1)[: len(x)]  # [T, 2 * Hkv, D]
        w = self.tensors(scale)
        logits = F.linear(x, w["pool.weight"].to(dtype)).float()
        added = weighted(logits + w["place"].float().repeat(num_blocks, 1), vectors)
        blocks = compress(added.unflatten(0, (-1, size)).sum(dim=1), w["proj.weight"].float())
        keys, values = blocks.to(dtype).float().split(num_kv_heads, dim=1)  # [N, Hkv, D] each
        q = states.q.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        scores = (q * q.shape[3] ** -0.5).flatten(1, 2) @ keys.permute(1, 2, 0)
        end = (torch.arange(num_blocks, device=x.device) + 1) * size
        return Reading(
            scores.view(states.q.shape[1], len(states.rows), num_blocks),
            values,
            end <= states.rows[:, None] + 1,
            gates(states.x[states.rows], w["gate.weight"].to(dtype), w["gate.bias"].to(dtype)),
        )


def forced_blocks(states: LayerStates, settings: dict) -> Tensor:
    """[R, P] bool: the first and the newest blocks, selected whatever they score."""
    size = settings["block_size"]
    block = torch.arange(-(-len(states.x) // size), device=states.rows.device)
    newest = (states.rows // size)[:, None]
    last = (block > newest - settings["num_last_blocks"]) & (block <= newest)
    return (block < settings["num_first_blocks"]) | last


def selected_mask(states: LayerStates, scores: Tensor, settings: dict) -> Tensor:
    """[R, T] bool: the positions of the best blocks; scores [R, N] float32."""
    size, top_k = settings["block_size"], settings["top_k"]
    forced = forced_blocks(states, settings)
    scores = F.pad(scores, (0, forced.shape[1] - scores.shape[1])).masked_fill(forced, torch.inf)
    allowed = torch.arange(forced.shape[1], device=scores.device) <= states.rows[:, None] // size
    best = top_k_mask(scores, allowed, top_k // size)
    return best.repeat_interleave(size, dim=1)[:, : len(states.x)] & states.causal


def window_mask(states: LayerStates, settings: dict) -> Tensor:
    """[R, T] bool: the newest positions."""
    position = torch.arange(len(states.x), device=states.rows.device)
    return (position > states.rows[:, None] - settings["window"]) & states.causal


class NsaStudent(nn.Module):
    """The compression of all layers, in training.

    input_scale: 1 / rms of each layer's inputs in the first batch. The weights that are trained act
    on inputs of rms 1, so that one learning rate suits all layers; `export` folds it in.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **changes: float,
    ) -> None:
        """changes: of SETTINGS. max_tokens, seed: not needed: nothing here is random."""
        super().__init__()
        self.anchors = tuple(range(config.num_hidden_layers))
        self.settings = SETTINGS | changes
        self.layers = nn.ModuleList(
            Compression(_first_tensors(config, self.settings), self.settings) for _ in self.anchors
        )
        self.register_buffer("input_scale", torch.zeros(len(self.anchors)))
        self.to(device)
        self._has_scales = False

    def load_state_dict(self, *args, **kwargs):
        self._has_scales = True
        return super().load_state_dict(*args, **kwargs)

    def loss(self, states: LayerStates) -> Tensor:
        """The layer's loss, mean over rows. Layers must come in order."""
        layer = states.layer
        if not self._has_scales:
            self.input_scale[layer] = states.x.float().pow(2).mean().rsqrt()
            self._has_scales = layer + 1 == len(self.anchors)
        scale = self.input_scale[layer].clone()  # autograd keeps it; the next layer's is written
        reading = self.layers[layer].read(states, scale)
        dense = dense_probabilities(states)  # [Hq, R, T]
        shares = reading.shares
        error = self._error(states, reading, shares, dense)
        left_out = forced_blocks(states, self.settings)[:, : shares.shape[2]] | ~reading.complete
        target = _sum_of_blocks(dense.mean(dim=0), self.settings["block_size"])
        target = target[:, : shares.shape[2]].masked_fill(left_out, 0)
        # Finite, so that 0 * it is 0, and a row where nothing is left counts nothing.
        logs = shares.mean(dim=0).clamp(min=1e-20).log().masked_fill(left_out, -1e30)
        return error + SELECTION_WEIGHT * _divergence(target, logs).mean()

    def _error(
        self, states: LayerStates, reading: Reading, shares: Tensor, dense: Tensor
    ) -> Tensor:
        v = states.v.float()
        expected = _outputs(dense, v)

        def attend(mask: Tensor) -> Tensor:  # a softmax over fewer positions: the same, scaled
            part = dense * mask
            return _outputs(part / part.sum(dim=2, keepdim=True).clamp(min=1e-30), v)

        selected = selected_mask(states, shares.detach().sum(dim=0), self.settings)
        outputs = [reading.compressed(shares), attend(selected)]
        outputs.append(attend(window_mask(states, self.settings)))
        output = gated_sum(outputs, reading.gates)
        return (output - expected).pow(2).mean() / expected.pow(2).mean()

    def export(self) -> dict[str, Tensor]:
        """The tensors of the add-on file, bf16 on the CPU."""
        return {
            tensor_name(layer, name): tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for layer, scale in zip(self.anchors, self.input_scale, strict=True)
            for name, tensor in self.layers[layer].tensors(scale).items()
        }


class NsaSelection:
    """A trained NSA for distil_decode.py: which positions are read, and the attention over them."""

    def __init__(self, addon: Addon, device: torch.device) -> None:
        self.settings = addon.settings
        prefix = tensor_name(0, "")
        names = [name.removeprefix(prefix) for name in addon.tensors if name.startswith(prefix)]
        self.layers = [
            Compression(
                {name: addon.tensors[tensor_name(layer, name)] for name in names}, self.settings
            ).to(device)
            for layer in range(addon.num_layers)
        ]
        self._branches: Branches | None = None  # of the last call

    @torch.no_grad()
    def __call__(self, states: LayerStates) -> Tensor:
        """[R, T] bool: what one of the two branches over positions reads."""
        reading = self.layers[states.layer].read(states)
        shares = reading.shares
        selected = selected_mask(states, shares.sum(dim=0), self.settings)
        window = window_mask(states, self.settings)
        compressed = reading.compressed(shares)
        self._branches = Branches(compressed, selected, window, reading.gates)
        return selected | window

    def attend(self, states: LayerStates, mask: Tensor) -> Tensor:
        """[R, Hq, D] float32, of the states and the mask of the last call."""
        compressed, selected, window, gate = self._branches
        outputs = [compressed, *(masked_attention(states, read) for read in (selected, window))]
        return gated_sum(outputs, gate)


def nsa_selection(addon: Addon, num_positions: int, device: torch.device) -> NsaSelection:
    """What distil_masks.selection_of asks for."""
    return NsaSelection(addon, device)


def _outputs(weights: Tensor, values: Tensor) -> Tensor:
    """weights [Hq, R, N], values [N, Hkv, D] -> [R, Hq, D]; heads of a KV group are stacked."""
    num_heads, num_rows, num_values = weights.shape
    stacked = weights.reshape(values.shape[1], -1, num_values)
    return (stacked @ values.transpose(0, 1)).view(num_heads, num_rows, -1).transpose(0, 1)


def _sum_of_blocks(probabilities: Tensor, size: int) -> Tensor:
    """[R, T] -> [R, P]."""
    missing = -probabilities.shape[1] % size
    return F.pad(probabilities, (0, missing)).unflatten(1, (-1, size)).sum(dim=2)


def _divergence(target: Tensor, scores: Tensor) -> Tensor:
    """sum_n p log(p / mass / softmax(scores)), where p sums to mass: [R, N] -> [R]."""
    mass = target.sum(dim=-1)
    entropy = torch.special.entr(target).sum(dim=-1) + torch.xlogy(mass, mass)
    cross = mass * scores.logsumexp(dim=-1) - (target * scores).sum(dim=-1)
    return cross - entropy


def _first_tensors(config: ModelConfig, settings: dict) -> dict[str, Tensor]:
    """Mean pooling, and the selected branch almost alone."""
    shapes = weight_shapes(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
        settings["block_size"],
    )
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["proj.weight"] += torch.eye(config.head_dim)
    tensors["gate.bias"] += torch.tensor(FIRST_GATE_BIAS).repeat(config.num_attention_heads)
    return tensors
