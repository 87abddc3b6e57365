import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoverlap.matmul import Attention, Matmul, Product

GRID = tuple(
    (m, k, n, 0.1 * (1 + i + 2 * j + 3 * p))
    for i, m in enumerate((16, 256))
    for j, k in enumerate((64, 1024))
    for p, n in enumerate((64, 512))
)


def test_the_longer_of_arithmetic_and_memory_and_a_fixed_part():
    matmul = Matmul(1e9, fixed_s=1e-3, memory_bytes_per_s=1e6)
    assert matmul.seconds(100, 1000, 1000) == pytest.approx(1e-3 + (100_000 + 1_000_000 + 100_000) * 4 / 1e6)
    assert matmul.seconds(100, 1000, 1000, itemsize=2) == pytest.approx(1e-3 + 1_200_000 * 2 / 1e6)
    assert Matmul(1e9, fixed_s=1e-3).seconds(100, 1000, 1000) == pytest.approx(1e-3 + 0.2)
    assert matmul.seconds(0, 1000, 1000) == 1e-3


def test_efficiency_is_met_at_the_points_and_interpolated_in_logarithms():
    matmul = Matmul(1e9, efficiency=GRID)
    for m, k, n, share in GRID:
        assert matmul.share(m, k, n) == pytest.approx(share)
    assert matmul.share(64, 64, 64) == pytest.approx((GRID[0][3] + GRID[4][3]) / 2)  # 64 is halfway from 16 to 256
    assert matmul.share(1, 1, 1) == pytest.approx(GRID[0][3])
    assert matmul.share(10**6, 10**6, 10**6) == pytest.approx(GRID[-1][3])
    assert Matmul(1e9, efficiency=((128, 128, 128, 0.5),)).share(3, 5, 7) == 0.5
    assert Matmul(1e9).share(3, 5, 7) == 1.0


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(1, 4096)] * 3))
def test_a_share_lies_between_those_of_the_grid(shape):
    assert GRID[0][3] - 1e-9 <= Matmul(1e9, efficiency=GRID).share(*shape) <= GRID[-1][3] + 1e-9


def test_lists_are_taken_and_frozen():
    matmul = Matmul(1e9, efficiency=[list(point) for point in GRID])  # pyright: ignore[reportArgumentType]
    assert matmul == Matmul(1e9, efficiency=GRID)
    assert hash(matmul) == hash(Matmul(1e9, efficiency=GRID))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s must be a number above 0"),
        ({"fixed_s": -1.0}, "fixed_s must be"),
        ({"memory_bytes_per_s": math.nan}, "memory_bytes_per_s"),
        ({"activation_s": -1e-9}, "activation_s must be"),
        ({"attention": (1.0,)}, r"attention is \(forward, backward\), not \(1.0,\)"),
        ({"attention": (1.0, 0.0)}, "attention must be a number above 0"),
        ({"efficiency": ((1, 2, 3),)}, r"a point of efficiency is \(m, k, n, share\)"),
        ({"efficiency": ((1, 2, 3, 0.0),)}, "a share of efficiency must be a number above 0"),
        ({"efficiency": GRID[:-1]}, "one point for each combination of its sizes, 2 x 2 x 2, not 7"),
        ({"efficiency": GRID[:1] * 2}, "1 x 1 x 1, not 2"),
    ],
)
def test_numbers_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Matmul(**{"flops_per_s": 1e9, **arguments})


def test_a_product_takes_its_rows_as_m_or_sums_over_them():
    matmul = Matmul(1e9, memory_bytes_per_s=1e7)
    assert Product(matmul, 30, 40).seconds(20) == matmul.seconds(20, 30, 40)
    assert Product(matmul, 30, 40, itemsize=2, summed=True).seconds(20) == matmul.seconds(30, 20, 40, 2)


def test_attention_is_its_matmuls_and_some():
    matmul = Matmul(1e9, attention=(1.5, 2.0))
    pairs = 20 * 30 * 40
    assert Attention(matmul, 30, 40).seconds(20) == pytest.approx(1.5 * 2 * 2 * pairs / 1e9)
    assert Attention(matmul, 30, 40, backward=True).seconds(20) == pytest.approx(2.0 * 5 * 2 * pairs / 1e9)


def test_a_causal_mask_spares_whole_blocks_of_keys():
    """Of 1024 keys in blocks of 512 three quarters are met by 512 queries or more at a time, fewer by fewer."""
    whole, blocks = Matmul(1e9), Matmul(1e9, keys_at_once=512)
    full_s = Attention(whole, 64, 1024).seconds(512)
    assert Attention(whole, 64, 1024, causal=True).seconds(512) == pytest.approx(full_s / 2)
    assert Attention(blocks, 64, 1024, causal=True).seconds(512) == pytest.approx(full_s * 0.75)
    assert Attention(blocks, 64, 1024, causal=True).seconds(256) == pytest.approx(full_s / 2 * 0.625)
    assert Attention(blocks, 64, 100, causal=True).seconds(100) == Attention(blocks, 64, 100).seconds(100)
