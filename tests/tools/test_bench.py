"""tools.bench: its table of shapes, its refusals, and the arithmetic of its clocks and traces."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowprec.text_tables import Column, render
from tests.tools.bench_process import CPU, environment  # noqa: F401 - for main in this process
from tools.bench import kernels, shapes
from tools.bench.__main__ import main
from tools.bench.measure import Bench, Timing, combined, cycle_inputs, rate


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("345m", {"qkv": (1024, 3072), "proj": (1024, 1024), "fc1": (1024, 4096), "fc2": (4096, 1024)}),
        ("6.7b", {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 16384), "fc2": (16384, 4096)}),
        # Llama 2: gate and up projection are one linear, and 70B shares keys and values between 8 heads
        ("7b", {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 22016), "fc2": (11008, 4096)}),
        ("70b", {"qkv": (8192, 10240), "proj": (8192, 8192), "fc1": (8192, 57344), "fc2": (28672, 8192)}),
    ],
)
def test_shapes_of_the_published_models(model: str, sizes: dict[str, tuple[int, int]]) -> None:
    found = {linear.name: (linear.in_features, linear.out_features) for linear in shapes.MODELS[model].linears}
    assert found == sizes


def test_configs_of_the_table_have_the_same_sizes() -> None:
    from megatron_lowprec.training.config.arguments import parse
    from megatron_lowprec.training.config.resolve import resolve_model
    from megatron_lowprec.training.models.sizes import linear_sites

    for model in shapes.MODELS.values():
        if model.config is not None and model.name != "smoke":
            config, _, _ = parse(["--config", model.config])
            sites = linear_sites(resolve_model(config))[:4]
            expected = [(linear.in_features, linear.out_features) for linear in model.linears]
            assert [(site.in_features, site.out_features) for site in sites] == expected, model.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["linear", "--shapes", "13b"], "13b: not in the table"),
        (["linear", "--recipes", "mxfp5"], "mxfp4"),
        (["linear", "--linears", "fc3"], "qkv, proj, fc1, fc2"),
        (["linear", "--tokens", "0"], "--tokens 0"),
        (["quantize", "--kinds", "rht"], "rht64"),
        (["quantize", "--sizes", "8192by4096"], "ROWSxCOLUMNS"),
        (["quantize", "--sizes", "128x100"], "multiple of 64"),
        (["step", "--shapes", "70b"], "no config"),
        (["step", "--cuda-graphs"], "--cuda-graphs with --device cpu and --warm-up 5"),
        (["ops", "--ops", "softmax"], "norm, bias, gelu"),
    ],
)
def test_errors_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_failed_row_has_no_number() -> None:
    columns = (Column("name", "name"), Column("ms", "ms", ".2f"))
    text = render([{"name": "a", "ms": 1.0}, {"name": "b", "ms": 2.0, "failed": "bits differ"}, {"name": "c"}], columns)
    assert text.splitlines() == ["name    ms", "----  ----", "a     1.00", "b  FAILED: bits differ", "c        -"]


def test_rate_counts_bytes_and_milliseconds() -> None:
    assert rate(4 * 10**12, 1000.0) == pytest.approx(4.0)


def test_rounds_are_joined_by_their_median() -> None:
    joined = combined([Timing(3.0, 2.5, 3.5), Timing(1.0, 0.5, 9.0), Timing(2.0, 1.9, 2.1)])
    assert (joined.ms, joined.low, joined.high) == (2.0, 0.5, 9.0)
    assert joined.noise == pytest.approx(1.0)


def test_alternatives_are_measured_cycle_inputs() -> None:
    order: list[str] = []
    Bench(CPU).compare({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert runs == ["a", "b", "a", "b"]


def test_input_sets_are_cycled() -> None:
    seen: list[int] = []
    call = cycle_inputs([1, 2, 3], seen.append)
    for _ in range(4):
        call()
    assert seen == [1, 2, 3, 1]


def test_communication_that_other_kernels_hide() -> None:
    def event(name: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start * 3000, end=end * 3000))

    nccl = [event("ncclDevKernel_SendRecv", 2, 6), event("ncclDevKernel_AllGather", 5, 7)]
    others = [event("gemm", 0, 3), event("cast", 1, 4), event("copy", 6, 9)]
    # of 2 to 7, 2 to 4 and 6 to 7 are hidden
    assert kernels.communication_of([*nccl, *others]) == {"ms": 5.0, "exposed_ms": 2.0}


def test_kernels_and_gaps_of_a_step() -> None:
    def event(name: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end), self_device_time_total=end - start
        )

    # three steps of 3 ms, with a gap of 1.5 ms in each but the last
    events = [event("gemm", 1000 * at, 1000 * at + 1500) for at in (0, 3, 6)]
    events += [event("cast", 7500, 9000)]
    gemm, cast = kernels.kernels_of(events)
    assert gemm == {"name": "gemm", "times": 1.0, "ms": 1.5}
    assert cast == {"name": "cast", "times": 1 / 3, "ms": 0.5}
    idle = kernels.idle_of(events)
    assert (idle["ms"], idle["gaps"]) == (1.0, 2 / 3)
    assert idle["longest"][0] == {"ms": 1.5, "after": "gemm", "before": "gemm"}
