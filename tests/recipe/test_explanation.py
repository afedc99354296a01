"""--explain-recipe: every layer, GEMM and operand of the model as it runs."""

from itertools import dropwhile, takewhile

import pytest

from megatron_lowprec import GemmSpec, QuantSpec, get_recipe, recipes
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.recipe.explain import explain
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.recipe.sites import sites_of


@pytest.mark.parametrize("name", [name for name in recipes() if not get_recipe(name).phases])
def test_explanation_has_every_layer_gemm_and_operand(name: str) -> None:
    recipe, sites = get_recipe(name), sites_of(4)
    lines = explain(recipe, sites, 4, "cpu").splitlines()
    assert lines[0] == f"recipe {name}: {recipe.summary}"
    covered: set[tuple[int, str]] = set()
    for start, line in enumerate(lines):
        if not line.startswith("layer"):
            continue
        which, _, rest = line.partition(": ")
        ranges = [part.split("-") for part in which.partition(" ")[2].split(", ")]
        numbers = {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
        linear, sizes = rest.split(" [")[0], rest.split("[")[1].split("]")[0]
        here = [s for s in sites if s.name == linear and s.layer_number in numbers]
        assert {f"{s.in_features} -> {s.out_features}" for s in here} == {sizes}
        covered |= {(s.layer_number, s.name) for s in here}
        is_kept = {not recipe.at(s.layer(4)).quantized for s in here}
        assert is_kept == {"kept in the compute dtype" in line}
        if is_kept == {True}:
            continue
        after = dropwhile(lambda other: other.startswith("layer"), lines[start:])
        text = "\n".join(takewhile(lambda other: other.startswith("  "), after))
        for gemm, operands in GEMM_OPERANDS.items():
            spec: GemmSpec = getattr(recipe, gemm)
            about = text[text.index(f"  {gemm}  ") :].split(
                "\n  " + {"fprop": "dgrad", "dgrad": "wgrad"}.get(gemm, "?")
            )[0]
            assert ("emulated" if spec.quantized else "not quantized") in about
            for operand in operands if spec.quantized else ():
                quant: QuantSpec | None = getattr(spec, operand)
                row = next(entry for entry in about.splitlines() if entry.strip().startswith(operand))
                wanted = (
                    ("compute dtype",) if quant is None else (quant.format.upper(), quant.granularity, quant.scale_rule)
                )
                assert all(word in row for word in wanted)
                if quant is not None:
                    assert quant.rounding.replace("_", " ") in row
            if spec.hadamard is not None:
                assert f"Hadamard {spec.hadamard.block} ({spec.hadamard.signs} signs)" in about
            if any((s := getattr(spec, o)) is not None and s.headroom != 1 for o in operands):
                assert "accumulator x 16/9" in about
    assert covered == {(s.layer_number, s.name) for s in sites}


def test_explanation_of_layers_that_are_not_consecutive() -> None:
    """Experts in every other layer: a range would name layers that have none."""
    sites = [LinearSite(n, "mlp.experts.linear_fc1", 64, 64, "column") for n in (2, 4)]
    sites.append(LinearSite(3, "mlp.linear_fc1", 64, 64, "column"))
    lines = [line for line in explain(get_recipe("mxfp8"), sites, 4, "cpu").splitlines() if "experts" in line]
    assert not any(line.startswith("layers 2-4:") for line in lines)


def test_explanation_shows_equal_layers_once_and_others_apart() -> None:
    lines = explain(get_recipe("mxfp8"), sites_of(4), 4, "cpu").splitlines()
    assert sum(line.startswith("  fprop") for line in lines) == 1
    lines = explain(get_recipe("mxfp8"), sites_of(4), 4, "cpu", ["layers.2.mlp.linear_fc1.dgrad"]).splitlines()
    assert sum(line.startswith("  fprop") for line in lines) == 2
    apart = next(n for n, line in enumerate(lines) if line.startswith("layer 2: mlp.linear_fc1"))
    assert "  dgrad  not quantized" in lines[apart:]
    assert "layers 1, 3-4: mlp.linear_fc1 [512 -> 2048]" in lines


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8_delayed", "emulated (no GPU here; hopper_fp8 on sm89 and later)"),
        ("fp8_blockwise", "emulated (no GPU here; hopper_fp8 on sm90)"),
        ("mxfp8", "emulated (no GPU here; blackwell_mx on sm100, sm103, sm120, unverified)"),
    ],
)
def test_explanation_without_a_gpu_names_those_that_run_natively(name: str, said: str) -> None:
    assert f"  fprop  {said}, " in explain(get_recipe(name), sites_of(1, 256), 1, "cpu")
    assert "no GPU here" not in explain(get_recipe(name), sites_of(1, 256), 1, "sm90")


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_explanation_is_of_the_model_as_it_runs(arch: str) -> None:
    recipe, sites = get_recipe("fp8_current"), sites_of(1, 256, 1040)
    native = "hopper_fp8 on sm89 and later" if arch == "cpu" else "fprop  hopper_fp8"
    said = explain(recipe, sites, 1, arch)
    assert native in said
    assert "no multiple" not in said
    assert "this one is float32" in explain(recipe, sites, 1, arch, dtype="float32")
    assert native not in explain(recipe, sites, 1, arch, dtype="float32")
    assert "fprop  emulated (asked)" in explain(recipe, sites, 1, arch, emulate=True)
    assert native not in explain(recipe, sites, 1, arch, emulate=True)
    said = explain(recipe, sites, 1, arch, tensor_ranks=2)  # linear_fc1 has 520 output features on a rank
    assert native in said
    assert "out_features 520 is no multiple of 16" in said
    assert "in_features 520 is no multiple of 16" in said
