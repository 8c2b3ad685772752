"""What several test files share: comparisons that show where two tensors differ, and inputs."""

import torch
from torch import Tensor

from minihisparse.model import AttentionInputs


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: NaN equals NaN here, and 0.0 differs from -0.0."""
    return tensor.contiguous().view(torch.uint8)


def difference(actual: Tensor, expected: Tensor) -> str:
    """The largest and mean difference and the first five pairs that differ, for a message."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"got {actual.dtype} {tuple(actual.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    delta = (actual.double() - expected.double()).abs()
    unlike = (bits(actual[..., None]) != bits(expected[..., None])).any(dim=-1)
    lines = [
        f"{int(unlike.sum())} of {actual.numel()} differ: max {delta.max()}, mean {delta.mean()}"
    ]
    for index in unlike.nonzero()[:5].tolist():
        at = tuple(index)
        lines.append(f"  {index}: got {actual[at].item()}, expected {expected[at].item()}")
    return "\n".join(lines)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """The same dtype, shape and bytes."""
    same = actual.dtype == expected.dtype and actual.shape == expected.shape
    same = same and torch.equal(bits(actual), bits(expected))
    assert same, f"{what}: {difference(actual, expected)}"


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """No element further than `tolerance` from `expected` (any dtype); NaN is never near."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} {tuple(expected.shape)}"
    delta = (actual.double() - expected.double()).abs()
    near = bool((delta <= tolerance).all())
    assert near, f"{what}: tolerance {tolerance}; {difference(actual, expected.to(actual.dtype))}"


def inputs_of(
    k: Tensor | None = None, q: Tensor | None = None, x: Tensor | None = None
) -> AttentionInputs:
    """What a selector gets of T tokens: k [T, Hkv, D], q [T, Hq, D], x [T, hidden]; V is 0."""
    if k is None:
        return AttentionInputs(x, q, None)
    records = torch.stack([k, torch.zeros_like(k)], dim=1).flatten(1)
    return AttentionInputs(x, k.new_empty(0, 1, k.shape[2]) if q is None else q, records)
