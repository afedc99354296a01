"""tools/weight_norms.py: sizes of the weights that the export has, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_lowprec.commands import export_hf
from tests.tools.conftest import MODEL
from tests.training.conftest import Drive
from tests.training.helpers import argv
from tools import weight_norms


def test_sizes_are_those_of_the_exported_weights(drive: Drive) -> None:
    drive(
        argv(**{**MODEL, "train_iters": 4, "save_interval": 2}, save="run", use_distributed_optimizer=True, bf16=True)
    )
    assert weight_norms.main(["--load", "run", "--out", "norms.json"]) == 0
    found = json.loads(Path("norms.json").read_text())
    assert list(found) == ["2", "4"]
    assert export_hf.main(["--load", "run", "--out", "hf", "--dtype", "float32"]) == 0
    exported = load_file("hf/model.safetensors")
    names = {"mlp.linear_fc2.weight": "h.1.mlp.c_proj.weight", "mlp.linear_fc1.layer_norm_weight": "h.1.ln_2.weight"}
    for ours, theirs in names.items():
        (weight,) = (tensor.double() for name, tensor in exported.items() if name.endswith(theirs))
        sizes = found["4"][f"decoder.layers.{ours}"]
        # The export has the model's bf16 weights, the checkpoint's main weights are fp32.
        assert sizes["rms"][1] == pytest.approx(float(weight.square().mean().sqrt()), rel=2**-8)
        assert sizes["max"][1] == pytest.approx(float(weight.abs().max()), rel=2**-8)
        assert len(sizes["rms"]) == 2
        assert 0 < sizes["update"][1] < 10
    assert found["2"] != found["4"]


def test_layers_that_differ_have_one_value_each(drive: Drive) -> None:
    """Their tensors have the layer's number in the name, and no layer axis."""
    experts = {"num_experts": 2, "moe_layer_freq": "[0,1]", "disable_bias_linear": True}
    drive(argv(**{**MODEL, "train_iters": 1}, **experts, save="run", bf16=True))
    assert weight_norms.main(["--load", "run", "--out", "norms.json"]) == 0
    found = json.loads(Path("norms.json").read_text())["1"]
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.self_attention.linear_qkv.weight"} <= set(found)
    assert {len(values) for sizes in found.values() for values in sizes.values()} == {1}


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert weight_norms.main(["--load", str(tmp_path), "--out", str(tmp_path / "norms.json")]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
