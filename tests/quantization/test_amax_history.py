"""Delayed scaling's window: what enters, what stays, what leaves, and when."""

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from megatron_lowprec.kernels.amax_history.reference import always_roll_history_
from megatron_lowprec.quantization.amax_history import AmaxHistory, cells_of, update_together
from megatron_lowprec.quantization.quantizer import delayed_encode_scale
from megatron_lowprec.recipe.registry import FP8_DELAYED
from megatron_lowprec.recipe.schema import HistorySpec


def run(history: AmaxHistory, amaxes: list[float], slot: int = 0) -> list[float]:
    """The amax in effect after each step."""
    found = []
    for amax in amaxes:
        history.update_amax(slot, torch.tensor(amax))
        history.update()
        found.append(history.in_effect[slot].item())
    return found


def one(length: int, rule: str) -> AmaxHistory:
    history = AmaxHistory(HistorySpec(length, rule))  # type: ignore[arg-type]
    assert history.add_tensor() == 0
    return history


def test_nothing_is_in_effect_before_the_first_step() -> None:
    history = one(4, "max")
    assert history.in_effect.tolist() == [0.0]
    assert delayed_encode_scale(history.in_effect[0], FP8_DELAYED).tolist() == [[1.0]]
    history.update_amax(0, torch.tensor(2.0))
    assert history.in_effect.tolist() == [0.0]  # the running step does not count before it has ended


def test_maximum_leaves_after_length_steps() -> None:
    assert run(one(3, "max"), [8.0, 1.0, 2.0, 1.0, 1.0, 1.0]) == [8.0, 8.0, 8.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("rule", ["max", "most_recent", "held"])
def test_upcoming_scales_are_in_effect_after_the_step(rule: str) -> None:
    history = one(3, rule)
    for amax in (8.0, 1.0, 0.0, 2.0, math.inf, 1.0, 1.0, 4.0):
        history.update_amax(0, torch.tensor(amax))
        before, upcoming = history.in_effect.clone(), history.upcoming()
        assert torch.equal(history.in_effect, before)
        history.update()
        assert torch.equal(history.in_effect, upcoming)


def test_a_held_amax_counts_until_the_next_of_its_turn() -> None:
    assert run(one(3, "held"), [8.0, 1.0, 9.0, 2.0, 1.0, 1.0, 4.0]) == [8.0, 8.0, 8.0, 2.0, 2.0, 2.0, 4.0]
    assert run(one(1, "held"), [8.0, 1.0]) == [8.0, 1.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_amax_that_is_not_finite_is_not_held(bad: float) -> None:
    assert run(one(3, "held"), [8.0, 1.0, 1.0, bad, 2.0, 1.0]) == [8.0, 8.0, 8.0, 8.0, 2.0, 2.0]


def test_most_recent_forgets_at_once() -> None:
    assert run(one(3, "most_recent"), [8.0, 1.0, 2.0]) == [8.0, 1.0, 2.0]


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_most_recent_keeps_the_old_over_zero_inf_and_nan(bad: float) -> None:
    assert run(one(3, "most_recent"), [8.0, bad, 2.0]) == [8.0, 8.0, 2.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inf_in_a_max_window_freezes_until_it_leaves(bad: float) -> None:
    # after step 2 the window holds it for 3 steps; then 16, 4, 4 are seen
    assert run(one(3, "max"), [8.0, bad, 16.0, 4.0, 4.0, 4.0]) == [8.0, 8.0, 8.0, 8.0, 16.0, 4.0]


@pytest.mark.parametrize(("rule", "in_effect"), [("max", 8.0), ("most_recent", 1.0)])
def test_a_tensor_that_is_not_recorded_keeps_its_window(rule: str, in_effect: float) -> None:
    """An expert without tokens, a layer that did not run: as TransformerEngine's fused update, also beside others."""
    history = one(4, rule)
    run(history, [8.0, 2.0, 2.0])
    other = history.add_tensor()
    assert run(history, [5.0] * 4, other) == [5.0] * 4
    assert history.window[:, 0].tolist() == [2.0, 2.0, 8.0, 0.0]
    assert run(history, [1.0]) == [in_effect]
    assert history.window.t().tolist() == [[1.0, 2.0, 2.0, 8.0], [5.0] * 4]


def test_a_reference_of_the_update_in_python_rolls_zeros() -> None:
    """Only for comparisons with TransformerEngine's own."""
    newest, window, in_effect = torch.tensor([0.0]), torch.tensor([[2.0], [8.0]]), torch.tensor([8.0])
    always_roll_history_(newest, window, in_effect, True)
    assert (window.flatten().tolist(), in_effect.item()) == ([0.0, 2.0], 2.0)


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_a_bad_first_step_leaves_the_scale_at_one(bad: float) -> None:
    history = one(2, "most_recent")
    run(history, [bad])
    assert delayed_encode_scale(history.in_effect[0], FP8_DELAYED).item() == 1.0


def test_microbatches_of_a_step_are_maximized_and_do_not_reach_the_next() -> None:
    history = one(4, "most_recent")
    for amax in (1.0, 5.0, 2.0):
        history.update_amax(0, torch.tensor([[amax]]))  # as block_amax gives it
    history.update()
    assert history.in_effect.item() == 5.0
    assert run(history, [2.0]) == [2.0]


def test_nan_in_any_microbatch_is_not_lost() -> None:
    for order in ([math.nan, 1.0], [1.0, math.nan]):
        history = one(4, "most_recent")
        for amax in order:
            history.update_amax(0, torch.tensor(amax))
        assert history.newest.tolist() == [math.inf]


def test_tensors_do_not_mix() -> None:
    history = one(2, "max")
    assert run(history, [4.0]) == [4.0]
    assert history.add_tensor() == 1  # also after steps were taken
    history.update_amax(1, torch.tensor(7.0))
    history.update()
    assert history.in_effect.tolist() == [4.0, 7.0]
    assert history.window.tolist() == [[4.0, 7.0], [0.0, 0.0]]


def test_reduction_takes_part_before_the_window() -> None:
    history = one(2, "max")
    history.update_amax(0, torch.tensor(3.0))
    history.update(lambda newest: torch.maximum(newest, torch.tensor([10.0])))
    assert history.in_effect.item() == 10.0
    assert history.window[:, 0].tolist() == [10.0, 0.0]


@pytest.mark.parametrize("rule", ["max", "most_recent"])
def test_state_continues_to_the_bit(rule: str) -> None:
    amaxes = [3.0, 9.0, math.inf, 0.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    whole = one(3, rule)
    want = run(whole, amaxes)
    for cut in range(len(amaxes)):
        first, second = one(3, rule), AmaxHistory(HistorySpec(3, rule))  # type: ignore[arg-type]
        run(first, amaxes[:cut])
        slot = [second.add_tensor() for _ in range(3)][1]  # another slot than the one saved
        second.load_state(slot, first.state(0))
        assert run(second, amaxes[cut:], slot) == want[cut:], cut
        assert torch.equal(second.window[:, slot], whole.window[:, 0])


def test_a_loaded_state_replaces_what_was_recorded() -> None:
    """And None empties a history; of other tensors nothing changes."""
    history = AmaxHistory(HistorySpec(2, "max"))
    for slot in range(3):
        assert history.add_tensor() == slot
        run(history, [3.0], slot)
        history.update_amax(slot, torch.tensor(99.0))  # of a step that is then abandoned
    history.load_state(0, torch.tensor([7.0, 7.0, 5.0]))
    history.load_state(1, None)
    assert [history.is_empty(slot) for slot in range(3)] == [False, True, False]
    history.update()
    assert history.in_effect.tolist() == [7.0, 0.0, 99.0]
    assert history.window[:, 0].tolist() == [7.0, 5.0]
    assert history.window[:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("copied", [deepcopy, lambda history: pickle.loads(pickle.dumps(history))])
def test_kernels_write_to_the_history_of_a_copy(copied: Callable[[AmaxHistory], AmaxHistory]) -> None:
    """``cells`` are views, which a plain pickle would store as tensors of their own."""
    history = one(2, "max")
    history.cells(0)
    found = copied(history)
    in_effect, newest = found.cells(0)
    newest.fill_(4.0)
    found.update()
    assert (in_effect.item(), found.in_effect.item(), history.in_effect.item()) == (4.0, 4.0, 0.0)


def test_state_is_a_copy() -> None:
    history = one(3, "max")
    run(history, [3.0])
    state = history.state(0)
    assert state.tolist() == [3.0, 3.0, 0.0, 0.0]  # in effect, then the window, newest first
    run(history, [9.0])
    assert state.tolist() == [3.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize(("length", "window"), [(2, [5.0, 4.0]), (6, [5.0, 4.0, 3.0, 2.0, 0.0, 0.0])])
def test_another_length_keeps_the_newest(length: int, window: list[float]) -> None:
    saved = one(4, "max")
    run(saved, [1.0, 2.0, 3.0, 4.0, 5.0])
    loaded = one(length, "max")
    run(loaded, [99.0] * length)  # what was there before must go
    loaded.load_state(0, saved.state(0))
    assert loaded.window[:, 0].tolist() == window
    assert loaded.in_effect.item() == 5.0


@pytest.mark.parametrize(("margin", "factor"), [(0, 1.0), (1, 0.5), (3, 0.125)])
def test_scale_is_maximum_over_amax_less_the_margin(margin: int, factor: float) -> None:
    scale = delayed_encode_scale(torch.tensor(7.0), replace(FP8_DELAYED, margin=margin))
    assert scale.tolist() == [[64.0 * factor]]  # 448 / 7


def test_a_tensor_that_is_larger_from_now_on() -> None:
    history = AmaxHistory(HistorySpec(2, "max"))
    for slot in range(2):
        assert history.add_tensor() == slot
        run(history, [3.0], slot)
    history.rescale(1, 4.0)
    assert history.in_effect.tolist() == [3.0, 12.0]
    assert history.window.tolist() == [[3.0, 12.0], [0.0, 0.0]]


def test_histories_that_are_updated_together() -> None:
    """Each as by itself, whatever its rule and length; amaxes that are not finite are dropped."""
    together, one_by_one = (
        [AmaxHistory(HistorySpec(length, rule)) for length, rule in ((3, "max"), (3, "max"), (2, "max"), (3, "held"))]
        for _ in range(2)
    )
    for step in range(5):
        for number, pair in enumerate(zip(together, one_by_one, strict=True)):
            for history in pair:
                for slot in range(number % 2 + 1):
                    if step == 0:
                        history.add_tensor()
                    amax = math.inf if (step, number) == (2, 1) else float((7 * step + 3 * number + slot) % 5)
                    history.update_amax(slot, torch.tensor(amax))
        update_together(together)
        for history in one_by_one:
            history.drop_not_finite()
            history.update()
        for a, b in zip(together, one_by_one, strict=True):
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("newest", "window", "in_effect"))
            assert a.is_empty(0) == b.is_empty(0)


def test_cells_of_tensors_are_one_view_at_equal_distances() -> None:
    first, second = (AmaxHistory(HistorySpec(2, "max")) for _ in range(2))
    for history in (first, second):
        history.add_tensors(7)
    for slots, step in (((2, 3, 4), 1), ((1, 3, 5), 2), ((6,), 1)):
        for view, cells in zip(
            cells_of([(first, slot) for slot in slots]), (first.in_effect, first.newest), strict=True
        ):
            assert (view.shape, view.stride()) == ((len(slots),), (step,))
            assert view.data_ptr() == cells[slots[0] :].data_ptr()
    for histories in ([(first, 0), (second, 1)], [(first, 2), (first, 1)], [(first, 1), (first, 1)]):
        found = cells_of(histories)
        assert [each[1].data_ptr() for each in found] == [
            each.data_ptr() for each in histories[1][0].cells(histories[1][1])
        ]
        assert [each[0].shape for each in found] == [(1,), (1,)]
