"""The order of data is a function of seed and position: not of a run's length, a resume, or the number of ranks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.data.blend import parse_blend
from megatron_lowprec.training.data.sampler import Blend, Epochs, Phases, Positions


class Numbers:
    """A dataset of its own indices, offset."""

    def __init__(self, length: int, offset: int = 0) -> None:
        self.length, self.offset = length, offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return self.offset + index


def test_every_epoch_holds_every_sample_once_in_another_order() -> None:
    epochs = Epochs(Numbers(50), seed=1)
    first, second = [epochs[i] for i in range(50)], [epochs[i] for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [Epochs(Numbers(50), seed=2)[i] for i in range(50)] != first


def test_positions_can_be_visited_in_any_order() -> None:
    epochs = Epochs(Numbers(10), seed=1)
    forward = [epochs[i] for i in range(40)]
    assert [epochs[i] for i in reversed(range(40))] == forward[::-1]


def test_blend_is_a_prefix_of_a_longer_one_and_keeps_the_weights() -> None:
    def blend() -> Blend:
        return Blend([Epochs(Numbers(10), 1), Epochs(Numbers(1000, 10_000), 1)], [3.0, 7.0])

    short, long = blend(), blend()
    long[9999]
    begin = [short.locate(i) for i in range(1000)]
    assert begin == [long.locate(i) for i in range(1000)]
    parts = np.array([part for part, _ in begin])
    behind = np.abs(np.cumsum(parts == 0) - 0.3 * np.arange(1, 1001))
    assert behind.max() <= 1.0
    for part in (0, 1):
        assert [place for p, place in begin if p == part] == list(range(int((parts == part).sum())))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_the_samples_of_one_rank(size: int) -> None:
    per_rank = [list(islice(Positions(24, 2, rank, size), 8 // size)) for rank in range(size)]
    microbatches = [position for step in zip(*per_rank, strict=True) for rank in step for position in rank]
    assert microbatches == list(range(24, 24 + 16))


@pytest.mark.parametrize(
    ("items", "blend"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.3", "a", "7", "b"], [("a", 0.3), ("b", 7.0)]),
    ],
)
def test_blends_parse(items: list[str], blend: list[tuple[str, float | None]]) -> None:
    assert parse_blend(items) == blend


@pytest.mark.parametrize("items", [["0.3", "a", "b"], ["a", "0.3"], ["0", "a"], ["-1", "a"], ["0.3"]])
def test_blends_that_make_no_sense(items: list[str]) -> None:
    with pytest.raises(UserError, match="data paths"):
        parse_blend(items)


def test_a_blend_that_begins_later_goes_on_where_another_left() -> None:
    def parts() -> list[Epochs]:
        return [Epochs(Numbers(10), 1), Epochs(Numbers(1000, 10_000), 1)]

    whole = Blend(parts(), [1.0, 1.0])
    taken = whole.taken(40)
    assert sum(taken) == 40
    assert taken == [sum(whole.locate(i)[0] == part for i in range(40)) for part in (0, 1)]
    rest = Blend(parts(), [1.0, 1.0], taken)
    assert sorted(rest[i] for i in range(200)) == sorted(whole[i] for i in range(40, 240))
    assert Blend(parts()[:1], [1.0]).taken(7) == [7]
    assert whole.taken(0) == [0, 0]


def test_one_dataset_needs_no_table() -> None:
    assert Blend([Epochs(Numbers(10), 1)], [1.0]).locate(10**12) == (0, 10**12)


def test_phases_change_at_a_sample() -> None:
    first, second = Blend([Epochs(Numbers(10), 1)], [1.0]), Blend([Epochs(Numbers(10, 100), 1)], [1.0])
    phases = Phases(first, second, 6)
    assert [phases[i] for i in range(12)] == [first[i] for i in range(6)] + [second[i] for i in range(6)]
