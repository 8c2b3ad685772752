"""Guards: a range that two requests own; units that are lost when neighbours are freed; a request
that is refused although it fits, or half-served."""

import random

import pytest
import torch

from minihisparse.extents import ExtentPool

CPU = torch.device("cpu")


def test_first_fit_and_joining():
    pool = ExtentPool(10, 4, CPU)
    assert pool.allocate(0, 3) and pool.allocate(1, 3) and pool.allocate(2, 3)
    assert pool.first.tolist() == [0, 3, 6, 0]
    pool.release(1)
    assert pool.num_free == 4
    assert not pool.allocate(3, 4)  # enough in all, but not in one piece
    assert pool.owners == {0, 2} and pool.num_free == 4
    assert pool.allocate(1, 2)
    assert pool.first.tolist() == [0, 3, 6, 0] and pool.extent_of(1) == (3, 5)
    for row in (0, 2, 1):
        pool.release(row)
        pool.check_integrity()
    assert pool.allocate(3, 10) and pool.num_free == 0
    assert pool.extent_of(3) == (0, 10) and pool.extent_of(0) == (0, 0)


def test_an_owner_and_a_stranger():
    pool = ExtentPool(4, 2, CPU)
    assert pool.allocate(0, 1)
    with pytest.raises(ValueError, match="request row 0 owns a range already"):
        pool.allocate(0, 1)
    with pytest.raises(ValueError, match="request row 1 owns no range"):
        pool.release(1)


def test_random_walk():
    rng = random.Random(0)
    pool, owned = ExtentPool(50, 8, CPU), {}
    for _ in range(2000):
        row = rng.randrange(8)
        if row in owned:
            pool.release(row)
            del owned[row]
        else:
            size = rng.randrange(0, 20)
            taken = {unit for units in owned.values() for unit in units}
            free = [unit not in taken for unit in range(50)]
            fits = any(all(free[i : i + size]) for i in range(50 - size + 1))
            assert pool.allocate(row, size) == fits
            if fits:
                start, end = pool.extent_of(row)
                assert end - start == size and all(free[start:end])
                owned[row] = range(start, end)
        pool.check_integrity()
        assert pool.num_free == 50 - sum(map(len, owned.values()))


@pytest.mark.parametrize("fault", ["lost", "twice", "first"])
def test_the_check_finds_faults(fault):
    pool = ExtentPool(10, 2, CPU)
    pool.allocate(0, 4)
    if fault == "lost":
        pool._free = [(5, 10)]
    elif fault == "twice":
        pool._owned[1] = (2, 4)
    else:
        pool.first[0] = 1
    with pytest.raises(AssertionError, match={"first": "first is"}.get(fault, "are lost or owned")):
        pool.check_integrity()
