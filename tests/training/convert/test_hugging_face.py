"""To Hugging Face and back: the same logits, by an independent forward pass, and the same weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lowprec.commands import export_hf, import_hf
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert import hf_config
from megatron_lowprec.training.convert.hf_config import from_hf_config, hf_form, to_hf_config
from megatron_lowprec.training.convert.hf_weights import pad_rows
from megatron_lowprec.training.convert.store import read_weights
from megatron_lowprec.training.models import architectures
from megatron_lowprec.training.models.common.llama_like import dense, relative
from tests.training.conftest import Drive
from tests.training.convert.models import (
    DEEPSEEK,
    GPT,
    IDS,
    LLAMA,
    LLAMA3,
    MIXTRAL,
    QWEN2,
    QWEN3,
    YARN,
    arguments,
    our_logits,
)
from tests.training.convert.reference import logits
from tests.training.helpers import losses
from tests.weekly import also_weekly

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt2 untied": {**GPT, "untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama tied": {
        **LLAMA,
        "untie_embeddings_and_output_weights": None,
        "group_query_attention": None,
        "num_query_groups": None,
    },
    "llama 3.1": LLAMA3,
    "llama yarn": YARN,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "deepseek without a latent of queries, groups and dense layers": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "moe_layer_freq": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this module's models are, each trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(params=MODELS)
def trained(request: pytest.FixtureRequest, runs: Path, drive: Drive) -> str:
    """A checkpoint in fp32, of a vocabulary of 201 padded to 256."""
    folder = runs / request.param.replace(" ", "_")
    if not folder.exists():
        drive(arguments(MODELS[request.param], save=str(folder)))
    return str(folder)


def test_logits_are_ours_both_ways(trained: str) -> None:
    ours = our_logits(trained)
    assert export_hf.main(["--load", trained, "--out", "hf"]) == 0
    theirs = logits(Path("hf"), IDS)
    assert theirs.shape == (3, 32, 201)
    assert theirs.std() > 0.5, "a model that says nothing compares with anything"
    # experts differ by which tokens share a GEMM, GPT-2 by its sums of biases
    model = MODELS[Path(trained).name.replace("_", " ")]
    tolerance = 1e-5 if "position_embedding_type" in model and "num_experts" not in model else 1e-4
    torch.testing.assert_close(ours[..., :201], theirs, rtol=tolerance, atol=tolerance)
    assert import_hf.main(["--load", "hf", "--save", "back"]) == 0
    again = our_logits("back")
    assert again.shape == (3, 32, 201)
    assert torch.equal(again, ours[..., :201])
    assert import_hf.main(["--load", "hf", "--save", "padded", "--make-vocab-size-divisible-by", "128"]) == 0
    assert our_logits("padded").shape == (3, 32, 256)
    # Padding has no logit that a token of the vocabulary has not.
    assert torch.equal(our_logits("padded")[..., 201:], again[..., -1:].expand(3, 32, 55))


def test_weights_come_back_as_they_were(trained: str) -> None:
    export_hf.main(["--load", trained, "--out", "hf"])
    import_hf.main(["--load", "hf", "--save", "back"])
    before, after = (read_weights(next(Path(folder).glob("iter_*"))) for folder in (trained, "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        rows = tensor[:201] if name in ("embedding.word_embeddings.weight", "output_layer.weight") else tensor
        assert torch.equal(rows, after[name]), name


def test_a_bf16_model_under_a_recipe_keeps_its_bits(drive: Drive) -> None:
    drive(arguments(GPT, save="out", bf16=True, recipe="fp8_delayed", hidden_size=128, train_iters=2))
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    assert json.loads(Path("hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    weights = read_weights(Path("out/iter_0000002"))
    found = load_file("hf/model.safetensors")["transformer.wpe.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, weights["embedding.position_embeddings.weight"])
    assert export_hf.main(["--load", "out", "--out", "fp32", "--dtype", "float32"]) == 0
    assert load_file("fp32/model.safetensors")["transformer.wpe.weight"].dtype == torch.float32


def test_balancing_biases_stay_in_fp32(drive: Drive) -> None:
    drive(arguments(DEEPSEEK, save="out", bf16=True, train_iters=3, moe_router_bias_update_rate=1e-3))
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    weights, found = read_weights(Path("out/iter_0000003")), load_file("hf/model.safetensors")
    for layer in (1, 2):
        bias = found[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert bias.dtype == torch.float32
        assert bias.count_nonzero() > 0
        assert torch.equal(bias, weights[f"decoder.layers.{layer}.mlp.router.expert_bias"])
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_an_imported_model_trains_on(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(arguments(GPT, save="out"))
    export_hf.main(["--load", "out", "--out", "hf"])
    import_hf.main(["--load", "hf", "--save", "back"])
    flags = ["--config", "back/model.yaml", "--load", "back", "--mock-data", "--micro-batch-size", "2", "--lr", "0.001"]
    flags += ["--global-batch-size", "4", "--train-iters", "2", "--eval-iters", "0", "--save", "more"]
    with pytest.raises(UserError, match="add --load back --finetune"):
        drive(flags)
    drive([*flags, "--finetune", "--bf16", "--recipe", "fp8_delayed"])
    start = float.fromhex(losses(Path("more"))[0])
    drive(arguments(GPT, save="fresh", train_iters=1, no_save=True))
    assert start < float.fromhex(losses(Path("fresh"))[0]) - 0.1, "it begins where the model had come to"


STEPS = "4"
CONTINUED = {"llama 3.1": LLAMA3, "qwen2": QWEN2, "qwen3": QWEN3, "mistral": LLAMA}


@pytest.mark.parametrize("name", also_weekly(CONTINUED, ["qwen3"]))
def test_models_of_others_train_on_under_fp8(drive: Drive, name: str) -> None:
    """From Hugging Face's folder under two recipes, and back there."""
    drive(arguments(CONTINUED[name] | {"train_iters": 1}, save="out"))
    export_hf.main(["--load", "out", "--out", "hf"])
    if name == "mistral":  # a Llama to us
        about = json.loads(Path("hf/config.json").read_text())
        about |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
        Path("hf/config.json").write_text(json.dumps(about))
        torch.testing.assert_close(our_logits("out")[..., :201], logits(Path("hf"), IDS), rtol=1e-5, atol=1e-5)
    import_hf.main(["--load", "hf", "--save", "back"])
    flags = ["--config", "back/model.yaml", "--load", "back", "--finetune", "--bf16", "--mock-data", "--lr", "0.001"]
    flags += ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", STEPS, "--eval-iters", "0"]
    found = {}
    for recipe in ("bf16", "mxfp8", "fp8_delayed"):
        drive([*flags, "--recipe", recipe, "--save", recipe, *([] if recipe == "mxfp8" else ["--no-save"])])
        found[recipe] = [float.fromhex(loss) for loss in losses(Path(recipe))]
        assert len(found[recipe]) == int(STEPS)
        assert found[recipe] == pytest.approx(found["bf16"], abs=0.1)
    assert found["mxfp8"] != found["bf16"] != found["fp8_delayed"]
    assert export_hf.main(["--load", "mxfp8", "--out", "again"]) == 0
    written = json.loads(Path("again/config.json").read_text())["model_type"]
    assert written == {"llama 3.1": "llama", "mistral": "llama"}.get(name, name)


def test_the_tokenizer_comes_along(drive: Drive) -> None:
    vocabulary = SHIPPED / "data/tiny_bpe"
    files = {"vocab_file": vocabulary / "vocab.json", "merge_file": vocabulary / "merges.txt"}
    options = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": None, "train_iters": 1}
    drive(arguments(GPT, save="out", **options, **files))
    export_hf.main(["--load", "out", "--out", "hf"])
    from tokenizers import Tokenizer

    from megatron_lowprec.training.data.tokenizer import build_tokenizer

    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=str(files["vocab_file"]), merge_file=str(files["merge_file"]))
    theirs = Tokenizer.from_file("hf/tokenizer.json")
    text = "The Long Firm, 2002; a naïve café — ½."
    assert theirs.encode(text).ids == ours.tokenize(text)
    assert theirs.encode("<|endoftext|>").ids == [ours.eod]
    config = json.loads(Path("hf/config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (ours.eod, ours.vocab_size)
    import_hf.main(["--load", "hf", "--save", "back"])
    assert "hf/vocab.json" in Path("back/model.yaml").read_text()


def test_openai_s_names_and_constants_are_read(drive: Drive) -> None:
    drive(arguments(GPT, save="out"))
    export_hf.main(["--load", "out", "--out", "hf"])
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file("hf/model.safetensors").items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    shutil.copytree("hf", "old")
    save_file(bare, "old/model.safetensors")
    assert import_hf.main(["--load", "old", "--save", "back"]) == 0
    assert torch.equal(our_logits("back"), our_logits("out")[..., :201])


def test_files_with_an_index_are_read(drive: Drive) -> None:
    drive(arguments(LLAMA, save="out"))
    export_hf.main(["--load", "out", "--out", "hf"])
    Path("hf/model.safetensors").rename("whole.safetensors")
    tensors = load_file("whole.safetensors")
    names = sorted(tensors)
    places = {name: f"model-{1 + (i >= len(names) // 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, f"hf/{file}")
    Path("hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert import_hf.main(["--load", "hf", "--save", "back"]) == 0
    assert torch.equal(our_logits("back"), our_logits("out")[..., :201])
    for file in set(places.values()):  # as transformers leaves an index behind
        Path(f"hf/{file}").unlink()
    Path("whole.safetensors").rename("hf/model.safetensors")
    assert import_hf.main(["--load", "hf", "--save", "again"]) == 0
    assert torch.equal(our_logits("again"), our_logits("out")[..., :201])


@pytest.mark.parametrize("trained", ["gpt2", "gpt2 untied", "llama", "llama tied"], indirect=True)
def test_transformers_agrees(trained: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; reference.py stands in")
    export_hf.main(["--load", trained, "--out", "hf"])
    model = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    with torch.no_grad():
        theirs = model(IDS).logits.float()
    torch.testing.assert_close(our_logits(trained)[..., :201], theirs, rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_tokenizer(drive: Drive) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vocabulary = SHIPPED / "data/tiny_bpe"
    files = {"vocab_file": vocabulary / "vocab.json", "merge_file": vocabulary / "merges.txt"}
    drive(arguments(GPT, save="out", tokenizer_type="GPT2BPETokenizer", vocab_size=None, train_iters=1, **files))
    export_hf.main(["--load", "out", "--out", "hf"])
    from megatron_lowprec.training.data.tokenizer import build_tokenizer

    ours = build_tokenizer("GPT2BPETokenizer", **{name: str(path) for name, path in files.items()})
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    text = " The Long Firm, 2002; a naïve café — ½.\n"
    assert theirs(text)["input_ids"] == ours.tokenize(text)
    assert theirs.eos_token_id == ours.eod
    assert theirs.decode(ours.tokenize(text), clean_up_tokenization_spaces=False) == text


def test_a_dense_relative_of_llama_is_one_row(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one with biases and norms of queries and keys, which is no other model's: trained, exported and imported."""
    toy = dense(
        relative(
            "Toy",
            options={"add_qkv_bias": True, "qk_layernorm": True},
            variants={"use_sliding_window": (False,)},
            defaults={"intermediate_size": 96},
        )
    )
    assert toy.hugging_face is not None
    monkeypatch.setattr(architectures, "ARCHITECTURES", (toy, *architectures.ARCHITECTURES))
    for forms in (hf_config.WRITTEN, hf_config.READ):
        monkeypatch.setitem(forms, "toy", toy.hugging_face)
    drive(arguments({**LLAMA, "add_qkv_bias": True, "qk_layernorm": True, "train_iters": 2}, save="out"))
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    about = json.loads(Path("hf/config.json").read_text())
    assert (about["model_type"], about["architectures"]) == ("toy", ["ToyForCausalLM"])
    assert about["use_sliding_window"] is False
    assert "attention_bias" not in about
    del about["intermediate_size"]  # its default
    Path("hf/config.json").write_text(json.dumps(about))
    assert import_hf.main(["--load", "hf", "--save", "back"]) == 0
    assert torch.equal(our_logits("back"), our_logits("out")[..., :201])


MIXTRAL_OPTIONS = {name: value for name, value in MIXTRAL.items() if name in Config.__dataclass_fields__}
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 16,
    "seq_length": 32,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 4}, "--num-experts 4"),
        ({"squared_relu": True}, "--squared-relu"),
        ({"swiglu": True}, "--swiglu"),
        (
            {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True},
            "--disable-bias-linear False",
        ),
        ({"kv_channels": 32}, "--kv-channels 32"),
        ({**MIXTRAL_OPTIONS, "num_layers": 2, "moe_router_pre_softmax": True}, "--moe-router-pre-softmax True"),
        (
            {**MIXTRAL_OPTIONS, "num_layers": 2, "moe_router_load_balancing_type": "sinkhorn"},
            "--moe-router-load-balancing-type sinkhorn is not mixtral's",
        ),
        ({**MIXTRAL_OPTIONS, "num_layers": 2, "moe_layer_freq": "[0,1]"}, "--moe-layer-freq [0,1] is not mixtral's"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], words: str) -> None:
    assert hf_form(Config(**SIZES)).model_type == "gpt2"
    with pytest.raises(
        UserError, match="neither a GPT-2 nor a Qwen3 nor a Qwen2 nor a Llama nor a Mixtral nor a DeepSeek-V3"
    ) as error:
        hf_form(Config(**{**SIZES, **changes}))
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_config_json_survives(kind: str) -> None:
    options = GPT if kind == "gpt2" else LLAMA
    config = Config(
        num_layers=2,
        hidden_size=96,
        seq_length=32,
        max_position_embeddings=32,
        **{"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 24, "ffn_hidden_size": 384}
        | {name: value for name, value in options.items() if name in Config.__dataclass_fields__},
    )
    config = replace(config, train_iters=None, lr=None, lr_decay_style="linear", vocab_size=None)
    config = replace(config, hidden_dropout=0.0 if kind == "llama" else 0.1)
    about = to_hf_config(config, 201, 200, "float32")
    back = Config(**({"num_query_groups": 4, "kv_channels": 24} | from_hf_config(about)))
    assert back == config


def test_errors_are_one_line(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_hf.main(["--load", "nowhere", "--save", "back"]) == 2
    assert "no config.json there" in capsys.readouterr().err
    drive(arguments(GPT, save="out", train_iters=1))
    Path("full").mkdir()
    Path("full/file").write_text("")
    assert export_hf.main(["--load", "out", "--out", "full"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert export_hf.main(["--load", "elsewhere", "--out", "hf"]) == 2
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    tensors = load_file("hf/model.safetensors")
    for change, words in (
        ("transformer.h.1.ln_1.bias", "have no transformer.h.1.ln_1.bias"),
        ("more", "have no place: transformer.more"),
        ("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.weight has 1 NaN or Inf among"),
    ):
        shutil.rmtree("broken", ignore_errors=True)
        shutil.copytree("hf", "broken")
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        if "NaN" in words:
            changed[change][0, 0] = torch.nan
        elif change in tensors:
            del changed[change]
        else:
            changed[change] = torch.ones(1)
        save_file(changed, "broken/model.safetensors")
        assert import_hf.main(["--load", "broken", "--save", "back"]) == 2
        assert words in capsys.readouterr().err
    assert not Path("back").exists()
    Path("broken/model.safetensors").unlink()
    for index in ("{", "[]", "{}", '{"weight_map": {"a": "../a"}}', '{"weight_map": {"a": 1}}'):
        Path("broken/model.safetensors.index.json").write_text(index)
        assert import_hf.main(["--load", "broken", "--save", "back"]) == 2
        assert "model.safetensors.index.json" in capsys.readouterr().err
    assert import_hf.main(["--load", "hf", "--save", "out"]) == 2
    assert "has checkpoints already" in capsys.readouterr().err


def test_padding_repeats_the_last_row() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert pad_rows(rows, 5).tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]
    assert pad_rows(rows, 3) is rows
