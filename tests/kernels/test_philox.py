"""The generator against its published vectors, a scalar twin, and frozen draws; then its statistics."""

import itertools
import math

import pytest
import torch

from megatron_lowprec.kernels.philox.reference import ROUNDS, ShardSlice, draw_bits, philox
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep, stream_key

MASK = 0xFFFFFFFF

# draws of rows 7 and 8, columns 16 to 27, by the scalar twin below
FROZEN = [
    [26540, 39459, 16377, 55661, 14901, 50746, 34980, 50800, 33654, 37906, 166, 38825],
    [34020, 31577, 47350, 1520, 6583, 17520, 10925, 19917, 15291, 19692, 11953, 11135],
]
# two little-endian words of blake2b-64 over "1234/rounding/3/mlp.linear_fc1/-1/wgrad/input/0", and over
# "1234/sign/3/mlp.linear_fc1/-1/wgrad//2"
FROZEN_KEY = (988476681, 1559956909)
FROZEN_SIGN_KEY = (2667397697, 3914669713)

# kat_vectors of Random123 (the authors' library), philox4x32 with 10 rounds: counter, key, words
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),  # the digits of pi
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar_philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    """Salmon et al., SC 2011, section 3.3, on Python's integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(rounds):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & MASK, (p >> 32) ^ d ^ m, p & MASK
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    return a, b, c, d


def scalar_draw(key: tuple[int, int], rng_step: tuple[int, int], row: int, column: int) -> int:
    """The layout that the stream is fixed to: 16 bits of entry (row, column)."""
    word = scalar_philox((column // 8, row, *rng_step), key, 7)[column % 8 // 2]
    return (word >> 16) if column % 2 else word & 0xFFFF


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert scalar_philox(counter, key, 10) == words
    got = philox(tuple(torch.tensor([c]) for c in counter), key, rounds=10)  # type: ignore[arg-type]
    assert tuple(word.item() for word in got) == words


def test_seven_rounds_as_the_scalar_twin(generator: torch.Generator) -> None:
    assert ROUNDS == 7
    counters = torch.randint(0, 1 << 32, (4, 200), generator=generator)
    # the corners where int64 products wrap and the high half is negative
    counters[:, :16] = torch.tensor(list(itertools.product((0, MASK), repeat=4))).t()
    for key in ((0, 0), (MASK, MASK), (0x12345678, 0x9ABCDEF0)):
        words = torch.stack(philox(tuple(counters), key))  # type: ignore[arg-type]
        for i in range(counters.shape[1]):
            assert tuple(words[:, i].tolist()) == scalar_philox(tuple(counters[:, i].tolist()), key, 7)


def test_words_broadcast() -> None:
    rows, groups = torch.arange(3).view(3, 1), torch.arange(5).view(1, 5)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert all(word.shape == (3, 5) for word in philox((groups, rows, zero, zero), (1, 2)))


def test_layout_of_the_stream_is_frozen() -> None:
    """Written down once: a change here changes every stochastic bit of every recipe."""
    got = draw_bits((0xDEADBEEF, 0x01234567), (3, 5), 2, 12, row_span=ShardSlice(7), column_span=ShardSlice(16))
    assert got.tolist() == FROZEN
    want = [[scalar_draw((0xDEADBEEF, 0x01234567), (3, 5), row, column) for column in range(16, 28)] for row in (7, 8)]
    assert want == FROZEN


def test_keys_are_frozen() -> None:
    assert stream_key(1234, "rounding", layer=3, linear="mlp.linear_fc1", gemm="wgrad", operand="input") == FROZEN_KEY
    assert (
        stream_key(1234, "sign", layer=3, linear="mlp.linear_fc1", gemm="wgrad", data_parallel_rank=2)
        == FROZEN_SIGN_KEY
    )


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 33])
def test_any_width(columns: int) -> None:
    got = draw_bits((1, 2), (0, 0), 3, columns)
    assert got.tolist() == [[scalar_draw((1, 2), (0, 0), r, c) for c in range(columns)] for r in range(3)]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_entries(shape: tuple[int, int]) -> None:
    assert draw_bits((1, 2), (0, 0), *shape).shape == shape


def test_shards_are_slices_of_the_whole() -> None:
    whole = draw_bits((11, 22), (4, 1), 24, 64)
    for r, c in ((0, 0), (5, 8), (23, 56), (12, 32)):
        shard = draw_bits((11, 22), (4, 1), 24 - r, 64 - c, row_span=ShardSlice(r), column_span=ShardSlice(c))
        assert torch.equal(shard, whole[r:, c:])
    with pytest.raises(ValueError, match="multiples of 8, got ShardSlice\\(start=4"):
        draw_bits((11, 22), (4, 1), 2, 8, column_span=ShardSlice(4))


def test_stream_chunks_and_shards_are_slices_of_the_whole() -> None:
    stream = RandomStream((11, 22), RngStep(4, 1))
    whole = stream.uniform(64, 16, torch.device("cpu"))(slice(0, 24))
    shard = RandomStream((11, 22), RngStep(4, 1), row_span=ShardSlice(6), column_span=ShardSlice(24))
    assert torch.equal(shard.uniform(40, 16, torch.device("cpu"))(slice(2, 9)), whole[8:15, 24:])


def test_random_bits_are_the_top_ones() -> None:
    stream = RandomStream((11, 22))
    bits = draw_bits((11, 22), (0, 0), 4, 16)
    got = stream.uniform(16, 4, torch.device("cpu"))(slice(0, 4))
    assert torch.equal(got, ((bits >> 12).float() + 0.5) / 16)


# ---- statistics: fixed seeds, so a failure is a fact and no bad luck; bounds are 5 sigma of a fair source
WHERE = {"layer": 1, "linear": "mlp.linear_fc1", "gemm": "dgrad", "operand": "weight"}
VARIANTS = {
    "seed": stream_key(2, "rounding", **WHERE),
    "layer": stream_key(1, "rounding", **(WHERE | {"layer": 2})),
    "linear": stream_key(1, "rounding", **(WHERE | {"linear": "mlp.linear_fc2"})),
    "gemm": stream_key(1, "rounding", **(WHERE | {"gemm": "wgrad"})),
    "operand": stream_key(1, "rounding", **(WHERE | {"operand": "grad_output"})),
    "expert": stream_key(1, "rounding", **WHERE, expert=0),
    "data_parallel_rank": stream_key(1, "rounding", **WHERE, data_parallel_rank=1),
    "purpose": stream_key(1, "sign", **WHERE),
}
BASE = stream_key(1, "rounding", **WHERE)
N = 131_072


def draws(key: tuple[int, int], rng_step: tuple[int, int] = (0, 0), **spans: ShardSlice) -> torch.Tensor:
    return draw_bits(key, rng_step, 256, N // 256, **spans).double().flatten()


def correlation_z(a: torch.Tensor, b: torch.Tensor) -> float:
    """Sample correlation in units of its standard deviation 1 / sqrt(N) under independence."""
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1]) * math.sqrt(a.numel())


@pytest.mark.parametrize("key", [BASE, (0, 0), (1, 0), VARIANTS["purpose"]])
def test_draws_are_uniform(key: tuple[int, int]) -> None:
    x = draws(key)
    # 256 cells by the high and by the low byte: chi-square of 255 degrees, mean 255, sd sqrt(2 * 255)
    for cells in (x.long() >> 8, x.long() & 255):
        counts = torch.bincount(cells, minlength=256).double()
        chi2 = float(((counts - N / 256) ** 2 / (N / 256)).sum())
        assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    # every one of the 16 bits is balanced: sd of a mean of N coins is 1 / (2 sqrt(N))
    for bit in range(16):
        assert abs(float((x.long() >> bit & 1).double().mean()) - 0.5) < 5 / (2 * math.sqrt(N)), bit


@pytest.mark.parametrize("what", VARIANTS)
def test_other_keys_are_independent(what: str) -> None:
    assert VARIANTS[what] != BASE
    assert abs(correlation_z(draws(BASE), draws(VARIANTS[what]))) < 5


@pytest.mark.parametrize("rng_step", [(1, 0), (0, 1), (1 << 16, 0), (0, 1 << 16)])
def test_other_moments_are_independent(rng_step: tuple[int, int]) -> None:
    assert abs(correlation_z(draws(BASE), draws(BASE, rng_step))) < 5


def test_step_and_microbatch_do_not_collide() -> None:
    rng_steps = list(itertools.product(range(8), repeat=2))
    found = torch.stack([draw_bits(BASE, rng_step, 4, 32).flatten() for rng_step in rng_steps])
    assert found.unique(dim=0).shape[0] == len(rng_steps)


def test_neighbours_within_a_tensor_are_independent() -> None:
    x = draws(BASE).view(256, -1)
    for lag in (1, 2, 7, 8, 9):
        assert abs(correlation_z(x[:, :-lag].flatten(), x[:, lag:].flatten())) < 5, f"columns {lag} apart"
        assert abs(correlation_z(x[:-lag].flatten(), x[lag:].flatten())) < 5, f"rows {lag} apart"
    assert abs(correlation_z(draws(BASE), draws(BASE).view(256, -1).roll(1, 0).flip(1).flatten())) < 5


def test_low_and_high_halves_are_independent() -> None:
    x = draws(BASE).view(-1, 2)
    assert abs(correlation_z(x[:, 0], x[:, 1])) < 5


def test_signs_are_balanced_and_differ_by_moment() -> None:
    key = stream_key(1, "sign", layer=1, linear="mlp.linear_fc1", gemm="dgrad")
    stream = RandomStream(key)
    drawn = torch.stack([stream.at(RngStep(step, 0)).signs(64, torch.device("cpu")) for step in range(2048)])
    assert drawn.dtype == torch.float32
    assert drawn.abs().unique().tolist() == [1.0]
    assert drawn.unique(dim=0).shape[0] == 2048  # 64 fair coins repeat with chance 2048^2 / 2^65
    assert abs(float(drawn.mean())) < 5 / math.sqrt(drawn.numel())
    # at each of the 64 places: sd of a mean of 2048 signs
    assert float(drawn.mean(dim=0).abs().max()) < 5 / math.sqrt(2048)
    gram = drawn.t() @ drawn / math.sqrt(2048)
    assert float((gram - torch.diag(gram.diag())).abs().max()) < 5  # 2016 pairs: 5 sigma has chance 1e-3


def test_signs_are_pure() -> None:
    stream = RandomStream((5, 6), RngStep(2, 3))
    assert torch.equal(stream.signs(64, torch.device("cpu")), stream.signs(64, torch.device("cpu")))
    # 32 signs are the first of 64: counters go by column
    assert torch.equal(stream.signs(32, torch.device("cpu")), stream.signs(64, torch.device("cpu"))[:32])
    # a shard's offsets do not touch the signs, which ranks must share
    shard = RandomStream((5, 6), RngStep(2, 3), row_span=ShardSlice(128), column_span=ShardSlice(64))
    assert torch.equal(shard.signs(64, torch.device("cpu")), stream.signs(64, torch.device("cpu")))


def test_the_recipe_layer_has_the_values_of_a_call() -> None:
    """``recipe`` may not import kernels, so it repeats the number."""
    from megatron_lowprec.kernels.philox.reference import VALUES_PER_CALL
    from megatron_lowprec.recipe.coverage import VALUES_PER_DRAW

    assert VALUES_PER_DRAW == VALUES_PER_CALL
