"""Modules that a model reaches by several paths."""

import pytest
from torch import nn

from megatron_lowprec import UserError
from megatron_lowprec.linear.convert import plan


class Shared(nn.Module):
    """One linear layer under two names, and another one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(64, 64))
        self.add_module(second, getattr(self, first))
        self.other = nn.Linear(64, 64)


@pytest.mark.parametrize(("name", "reason"), [("lm_head", "output head"), ("router", "router"), ("lora_A", "adapter")])
def test_a_layer_stays_if_any_of_its_paths_does(name: str, reason: str) -> None:
    for names in (("proj", name), (name, "proj")):
        found = plan(Shared(*names), "fp8_current")
        assert list(found.converted) == ["other"]
        assert {path: each.reason for path, each in found.excluded.items()} == {names[0]: reason}


def test_globs_and_filters_see_all_paths() -> None:
    for kept in ("enc", "dec", "d*"):
        found = plan(Shared("enc", "dec"), "fp8_current", keep_bf16=[kept])
        assert list(found.converted) == ["other"]
        assert found.excluded["enc"].reason == "by keep_bf16"
    for path in ("enc", "dec"):
        found = plan(Shared("enc", "dec"), "fp8_current", filter=lambda asked, _, path=path: asked != path)
        assert found.excluded["enc"].reason == "by filter"
    with pytest.raises(UserError, match="keep_bf16 has 'decoder'"):
        plan(Shared("enc", "dec"), "fp8_current", keep_bf16=["decoder"])


def test_the_first_path_names_a_shared_layer() -> None:
    found = plan(Shared("enc", "dec"), "fp8_current")
    assert list(found.converted) == ["enc", "other"]
    assert found.converted["enc"].module == "enc"
