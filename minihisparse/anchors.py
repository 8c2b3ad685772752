"""Which layers share a selection: an anchor selects, the shared layers after it read the same.

Upstream names: anchor and shared layers; `index_topk_freq` and `index_topk_pattern`, the two ways
in which a model's config declares them.

    anchor_of    per layer its anchor: (0, 0, 2, 2) are two groups of two; an anchor is its own

A group is an anchor and the layers up to the next one. Only a model that was trained so, or an
add-on, may declare it: layers that select for themselves pick other positions. (arXiv 2608.07009
tried to predict them, and it did not pay.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def anchor_of_layers(anchors: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Per layer the anchor whose selection it uses.

    anchors: the layers that select, ascending, the first one 0.
    Raises ValueError for anchors that leave a layer without one.
    """
    anchors = list(anchors)
    if not anchors or anchors[0] != 0:
        raise ValueError(
            f"anchors {anchors}: layer 0 is none, so the layers before the first anchor have "
            "nobody's selection to share"
        )
    if any(type(layer) is not int for layer in anchors) or anchors != sorted(set(anchors)):
        raise ValueError(f"anchors {anchors}: must be layer numbers that ascend")
    if anchors[-1] >= num_layers:
        raise ValueError(f"anchors {anchors}: the model's layers are 0..{num_layers - 1}")
    anchor_of, anchor = [], 0
    for layer in range(num_layers):
        anchor = layer if layer in anchors else anchor
        anchor_of.append(anchor)
    return tuple(anchor_of)


def anchors_of_every(index_topk_freq: int, num_layers: int) -> list[int]:
    """Every index_topk_freq-th layer, from 0 on. Raises ValueError: less than 1."""
    if index_topk_freq < 1:
        raise ValueError(f"index_topk_freq {index_topk_freq} is less than 1")
    return list(range(0, num_layers, index_topk_freq))


def anchors_of_pattern(index_topk_pattern: str, num_layers: int) -> list[int]:
    """A letter per layer: F selects (full), S shares. Raises ValueError: letters or length."""
    if len(index_topk_pattern) != num_layers:
        raise ValueError(
            f"index_topk_pattern {index_topk_pattern!r} has {len(index_topk_pattern)} letters, "
            f"the model {num_layers} layers; it needs one for each"
        )
    if set(index_topk_pattern) - set("FS"):
        raise ValueError(f"index_topk_pattern {index_topk_pattern!r}: letters are F and S")
    return [layer for layer, letter in enumerate(index_topk_pattern) if letter == "F"]


def check_anchors(anchor_of: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Per layer its anchor; None: every layer is one. Raises ValueError if a group is none.

    A group is an anchor and the layers after it, up to the next anchor.
    """
    if anchor_of is None:
        return tuple(range(num_layers))
    anchors = tuple(anchor_of)
    if len(anchors) != num_layers:
        raise ValueError(f"anchor_of has {len(anchors)} entries for {num_layers} layers")
    for layer, anchor in enumerate(anchors):
        if not 0 <= anchor <= layer:
            raise ValueError(
                f"layer {layer} cannot share the selection of layer {anchor}: "
                "its anchor must come before it"
            )
        if anchors[anchor] != anchor:
            raise ValueError(
                f"layer {layer}: layer {anchor} is no anchor, it shares the selection "
                f"of layer {anchors[anchor]}"
            )
        if anchor not in (layer, anchors[layer - 1]):
            raise ValueError(
                f"layer {layer} cannot share the selection of layer {anchor}: "
                f"layer {anchors[layer - 1]}, the last anchor before it, lies between"
            )
    return anchors


def check_shared(layer: int, anchor: int, positions: Tensor, of_anchor: Tensor) -> None:
    """Checks that a shared layer would have selected what its anchor did, [R, K] int32 each.

    Waits for the device: for checked mode. Raises ValueError that names layer, request and the
    first position that differs.
    """
    differs = (positions != of_anchor).nonzero()
    if len(differs):
        request, index = differs[0].tolist()
        raise ValueError(
            f"layer {layer}, row {request}: position {int(positions[request, index])} is selected "
            f"at index {index}, where its anchor, layer {anchor}, has "
            f"{int(of_anchor[request, index])}"
        )
