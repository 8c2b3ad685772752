"""DSA's lightning indexer, as a student that learns what dense attention reads.

    I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]);   q, k, w are linear in the layer's normed input

It learns the mean over heads of the dense softmax, layer by layer: the loss is the KL divergence
from that to softmax(I), with the first `num_sinks` and the newest `num_recent` positions left out
of both, because the selection holds them anyway: what they draw would drown the rest. RoPE turns
half of each head only: the other half looks for content, wherever it stands.

With sharing, anchors have an indexer; it learns the mean over all layers that use its selection.

Upstream names: those of DeepSeek-V3.2's checkpoint (`indexer.wq`, `wk`, `k_norm`, `weights_proj`).
Shapes: T positions, R of them as queries; H index heads of d numbers.
Cost: 2 * (H * d + d + H) * hidden bytes per anchor in bf16: 11.2 MB for 30 layers of 576, H = 4,
d = 64. A training step keeps H * R * T float32 of one layer at a time for the backward pass, 67 MB
for 512 rows and 8,192 tokens, and a few times that while it calculates.
References: DeepSeek-V3.2-Exp's report.
Does not know: batches, optimizers, evaluation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minihisparse.indexer import NORM_EPS, rotate
from minihisparse.model_config import ModelConfig
from minihisparse.rope import rope_angles
from minihisparse.weights_scripts.distil_model import LayerStates, dense_probabilities

SETTINGS = {
    "index_n_heads": 4,
    "index_head_dim": 64,
    "rope_dim": 32,
    "rope_theta": 1e5,
    "num_sinks": 4,
    "num_recent": 16,
    "top_k": 256,
}
TENSORS = ("wq.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def tensor_name(layer: int, name: str) -> str:
    """The name in an add-on file of one of an anchor's TENSORS."""
    return f"model.layers.{layer}.self_attn.indexer.{name}"


def forced(states: LayerStates, settings: dict) -> Tensor:
    """[R, T] bool: sinks and recent positions, selected whatever they score."""
    position = torch.arange(len(states.x), device=states.rows.device)
    row = states.rows[:, None]
    recent = position > row - settings["num_recent"]
    return ((position < settings["num_sinks"]) | recent) & (position <= row)


class Indexer(nn.Module):
    """The indexer of one anchor: weights, and I of some rows."""

    def __init__(self, tensors: dict[str, Tensor], settings: dict) -> None:
        """tensors: by the names of TENSORS."""
        super().__init__()
        self.settings = settings
        wq, wk, gain, bias, weights_proj = (nn.Parameter(tensors[name]) for name in TENSORS)
        self.wq, self.wk, self.weights_proj = wq, wk, weights_proj  # [H * d | d | H, hidden]
        self.k_norm_weight, self.k_norm_bias = gain, bias  # [d]

    @classmethod
    def random(cls, hidden_size: int, settings: dict, generator: torch.Generator) -> Indexer:
        heads, dim = settings["index_n_heads"], settings["index_head_dim"]

        def matrix(rows: int) -> Tensor:
            return torch.randn(rows, hidden_size, generator=generator) * hidden_size**-0.5

        values = matrix(heads * dim), matrix(dim), torch.ones(dim), torch.zeros(dim), matrix(heads)
        return cls(dict(zip(TENSORS, values, strict=True)), settings)

    def scores(
        self, x: Tensor, rows: Tensor, angles: Tensor, scale: Tensor | float = 1.0
    ) -> Tensor:
        """I [R, T] float32 of the queries at `rows`, not masked.

        x [T, hidden] normed inputs; angles: `rope_angles` for rope_dim; scale: a factor on the
        three matrices. Rounded to x's dtype where the engine rounds (minihisparse/indexer.py).
        """
        s = self.settings
        wq, wk, weights_proj = (
            (w * scale).to(x.dtype) for w in (self.wq, self.wk, self.weights_proj)
        )
        gain, bias = self.k_norm_weight.float(), self.k_norm_bias.float()
        k = F.layer_norm(F.linear(x, wk).float(), gain.shape, gain, bias, NORM_EPS)
        k = rotate(k[:, None], angles[: len(x)])[:, 0].to(x.dtype).float()  # [T, d]
        x = x[rows]
        q = F.linear(x, wq).unflatten(1, (-1, s["index_head_dim"])).float()
        q = rotate(q, angles[rows]).to(x.dtype).float()  # [R, H, d]
        w = F.linear(x, weights_proj).float()
        w = w * (s["index_n_heads"] * s["index_head_dim"]) ** -0.5  # [R, H]
        matches = torch.relu((q.flatten(0, 1) @ k.t()).unflatten(0, w.shape))  # [R, H, T]
        return (matches * w[:, :, None]).sum(dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """Its weights under the names of TENSORS."""
        values = self.wq, self.wk, self.k_norm_weight, self.k_norm_bias, self.weights_proj
        return dict(zip(TENSORS, values, strict=True))


class DsaStudent(nn.Module):
    """The indexers of all anchors, in training.

    anchors: layers with an indexer, ascending, 0 first; a layer uses the last anchor up to it.
    input_scale: 1 / rms of each anchor's inputs in the first batch. The weights that are trained
    act on inputs of rms 1, so that one learning rate suits all layers; `export` folds it in.
    """

    def __init__(
        self,
        config: ModelConfig,
        anchors: tuple[int, ...],
        max_tokens: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **changes: float,
    ) -> None:
        """changes: of SETTINGS. max_tokens: longest text. seed: of the weights to begin with."""
        super().__init__()
        self.anchors = anchors
        self.num_layers = config.num_hidden_layers
        self.settings = SETTINGS | changes
        generator = torch.Generator().manual_seed(seed)
        self.indexers = nn.ModuleList(
            Indexer.random(config.hidden_size, self.settings, generator) for _ in anchors
        )
        self.register_buffer("input_scale", torch.zeros(len(anchors)))
        self.to(device)
        angles = rope_angles(max_tokens, self.settings["rope_dim"], self.settings["rope_theta"])
        self._angles = angles.to(device)
        self._has_scales = False
        self._anchor: LayerStates | None = None  # of the group that is being gone through
        self._target: Tensor | None = None  # [R, T], sum over the group's layers so far
        self._count = 0

    def load_state_dict(self, *args, **kwargs):
        self._has_scales = True
        return super().load_state_dict(*args, **kwargs)

    def loss(self, states: LayerStates) -> Tensor | None:
        """The KL divergence of one group of layers, mean over rows; None within a group.

        A row's divergence counts as much as the share of attention that is to be found there.
        Layers must come in order.
        """
        layer = states.layer
        target = dense_probabilities(states).mean(dim=0)  # [R, T]
        if layer in self.anchors:
            self._anchor, self._target, self._count = states, target, 1
        else:
            self._target += target
            self._count += 1
        if layer + 1 in self.anchors or layer + 1 == self.num_layers:
            return self._divergence(self._anchor, self._target / self._count)
        return None

    def _divergence(self, states: LayerStates, target: Tensor) -> Tensor:
        index = self.anchors.index(states.layer)
        if not self._has_scales:
            self.input_scale[index] = states.x.float().pow(2).mean().rsqrt()
            self._has_scales = index + 1 == len(self.anchors)
        scale = self.input_scale[index].clone()  # autograd keeps it; the next anchor's is written
        scores = self.indexers[index].scores(states.x, states.rows, self._angles, scale)
        left_out = ~states.causal | forced(states, self.settings)
        target = target.masked_fill(left_out, 0)
        # Finite, so that 0 * it is 0, and a row where nothing is left counts nothing.
        scores = scores.masked_fill(left_out, -1e30)
        mass = target.sum(dim=-1)
        # sum_s p log(p / mass) - p log softmax(I), where p sums to mass
        entropy = torch.special.entr(target).sum(dim=-1) + torch.xlogy(mass, mass)
        cross = mass * scores.logsumexp(dim=-1) - (target * scores).sum(dim=-1)
        return (cross - entropy).mean()

    def export(self) -> dict[str, Tensor]:
        """The tensors of the add-on file, bf16 on the CPU."""
        tensors = {}
        for layer, scale, indexer in zip(
            self.anchors, self.input_scale, self.indexers, strict=True
        ):
            for name, tensor in indexer.tensors().items():
                factor = 1.0 if name.startswith("k_norm") else scale
                tensors[tensor_name(layer, name)] = (
                    (tensor.detach() * factor).to("cpu", torch.bfloat16).contiguous()
                )
        return tensors
