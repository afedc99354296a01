"""Checkpoints as stock Megatron-LM writes them, from Megatron-core's own layers: the same logits in this driver."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.commands import import_megatron
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.convert import stock, stock_fields
from megatron_lowprec.training.convert.names import canonical
from megatron_lowprec.training.distributed import startup
from tests.training.conftest import Drive
from tests.training.convert.models import GPT, IDS, LLAMA3, arguments, our_logits

MODELS: dict[str, dict[str, Any]] = {"gpt": {**GPT, "num_layers": 4}, "llama": {**LLAMA3, "num_layers": 4}}
ROWS = 256
Weights = dict[str, torch.Tensor]


def stock_model(changes: dict[str, Any], out: Path) -> tuple[Namespace, Weights, torch.Tensor]:
    """Megatron-LM's args, Megatron-core's own model with weights drawn wide, and its logits; a torch_dist of it."""
    config = resolve_run(resolve_model(parse(arguments(changes))[0]), 1, gpus=False)
    startup.initialize(config, startup.prepare_environment())
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_lowprec.training.model import transformer_config

    model = GPTModel(
        transformer_config(config),
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=ROWS,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        positions = torch.arange(IDS.shape[1]).expand_as(IDS)
        mask = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).triu(1)[None, None]
        logits = model(IDS, positions, mask).float()
    # Defaults of Megatron-LM that the driver names otherwise, and much that it has not.
    args = Namespace(**asdict(config))
    args.add_bias_linear, args.padded_vocab_size, args.iteration = not config.disable_bias_linear, ROWS, 7
    args.bias_gelu_fusion, args.apply_layernorm_1p, args.qk_layernorm = True, False, False
    folder = out / "iter_0000007"
    folder.mkdir(parents=True)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    dist_checkpointing.save(state | {"model": model.sharded_state_dict()}, str(folder))
    (out / "latest_checkpointed_iteration.txt").write_text("7")
    weights = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    startup.finalize()
    return args, weights, logits


def write_ranks(out: Path, args: Namespace, ranks: dict[str, dict[str, Any]]) -> None:
    """Files of the format torch: a rank's folder -> its models."""
    for name, models in ranks.items():
        folder = out / "iter_0000007" / name
        folder.mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "optimizer": {}, **models}, folder / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text("7")


def with_te_names(weights: Weights) -> Weights:
    """As TransformerEngine's layers name them, with their extra states."""
    renamed: Weights = {}
    for name, tensor in weights.items():
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        renamed[name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")] = tensor
    return renamed | {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(3, dtype=torch.uint8)}


COLUMN = ("qkv.weight", "qkv.bias", "linear_fc1.weight", "linear_fc1.bias", "word_embeddings", "output_layer")


def shard(args: Namespace, weights: Weights, rank: int, size: int) -> Weights:
    """One tensor-parallel rank's part, written out by hand."""
    cut: Weights = {}
    for name, tensor in weights.items():
        if args.swiglu and "linear_fc1.weight" in name:
            cut[name] = torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
        elif any(part in name for part in COLUMN):
            cut[name] = tensor.chunk(size)[rank]
        elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            cut[name] = tensor.chunk(size, dim=1)[rank]
        else:
            cut[name] = tensor
    return {name: tensor.clone() for name, tensor in cut.items()}


def layers_of(weights: Weights, first: int, count: int, begins: bool, ends: bool) -> Weights:
    """A pipeline stage's part: its layers counted from 0."""
    found: Weights = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        if parts[1] == "layers":
            number = int(parts[2]) - first
            if 0 <= number < count:
                found[".".join([*parts[:2], str(number), *parts[3:]])] = tensor
        elif (parts[0] == "embedding" and begins) or (parts[0] != "embedding" and ends):
            found[name] = tensor
    if ends and not begins and "output_layer.weight" not in found:
        found["output_layer.weight"] = weights["embedding.word_embeddings.weight"]  # the tied copy
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_megatron_s(name: str, drive: Drive) -> None:
    args, weights, logits = stock_model(MODELS[name], Path("dist"))
    assert logits.std() > 0.5
    write_ranks(Path("local"), args, {"mp_rank_00": {"model": weights}})
    write_ranks(Path("te"), args, {"mp_rank_00": {"model": with_te_names(weights)}})
    write_ranks(Path("tp2"), args, {f"mp_rank_{r:02}": {"model": shard(args, weights, r, 2)} for r in range(2)})
    te = with_te_names(weights)
    stages = {
        f"mp_rank_{rank:02}_{stage:03}": {"model": shard(args, part, rank, 2)}
        for stage, part in enumerate([layers_of(te, 0, 2, True, False), layers_of(te, 2, 2, False, True)])
        for rank in range(2)
    }
    write_ranks(Path("tp2pp2"), args, stages)
    # Interleaved: stage 0 has layers 0 and 2, stage 1 has 1 and 3.
    interleaved = {
        f"mp_rank_00_{s:03}": {
            f"model{v}": layers_of(weights, 2 * v + s, 1, s == v == 0, s == v == 1) for v in range(2)
        }
        for s in range(2)
    }
    write_ranks(Path("vpp2"), args, interleaved)
    for folder in ("dist", "local", "te", "tp2", "tp2pp2", "vpp2"):
        assert import_megatron.main(["--load", folder, "--save", f"ours/{folder}", "--vocab-size", "200"]) == 0
        ours = our_logits(f"ours/{folder}")
        # Attention is another product of torch here than there.
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


def test_chunks_are_ordered_by_number(tmp_path: Path) -> None:
    """Two stages of 12 chunks of one layer: layer 2 v + s is chunk v of stage s."""
    layers = [{"decoder.layers.0.mlp.linear_fc2.weight": torch.tensor([[float(i)]])} for i in range(24)]
    stages = {f"mp_rank_00_{s:03}": {f"model{v}": layers[2 * v + s] for v in range(12)} for s in range(2)}
    write_ranks(tmp_path, Namespace(), stages)
    found = stock.read(str(tmp_path)).weights
    assert [found[f"decoder.layers.{i}.mlp.linear_fc2.weight"].item() for i in range(24)] == list(range(24))


@pytest.mark.parametrize("name", ["mp_rank_00_{:03}", "mp_rank_00_000_{:03}"])
def test_files_of_expert_ranks_are_refused(tmp_path: Path, name: str) -> None:
    """Without a pipeline their names are those of its stages."""
    weights = {"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(1, 1)}
    ranks = {name.format(rank): {"model": weights} for rank in range(2)}
    write_ranks(tmp_path, Namespace(expert_model_parallel_size=2), ranks)
    with pytest.raises(UserError, match="experts in files of ranks; convert it to torch_dist"):
        stock.read(str(tmp_path))


def test_norms_stored_less_one(drive: Drive) -> None:
    args, weights, logits = stock_model(MODELS["gpt"], Path("dist"))
    norms = [name for name in weights if "norm" in name and name.endswith("weight")]
    less = weights | {name: weights[name] - 1 for name in norms}
    args.apply_layernorm_1p = True
    write_ranks(Path("less"), args, {"mp_rank_00": {"model": less}})
    assert import_megatron.main(["--load", "less/iter_0000007", "--save", "ours", "--vocab-size", "200"]) == 0
    torch.testing.assert_close(our_logits("ours"), logits, rtol=1e-4, atol=1e-4)
    del args.apply_layernorm_1p
    args.layernorm_zero_centered_gamma = True  # its name from release 0.16 on
    write_ranks(Path("newer"), args, {"mp_rank_00": {"model": less}})
    again, before = stock.read("newer").weights, stock.read("less").weights
    assert all(torch.equal(again[name], before[name]) for name in norms)


def test_stacked_and_numbered_layers_convert_alike() -> None:
    stacked = torch.arange(12.0).view(2, 3, 2)
    numbered = {f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight": stacked[i] for i in range(2)}
    for found in (canonical({"decoder.layers.mlp.linear_fc1.layer_norm_weight": stacked}), canonical(numbered)):
        assert found.keys() == {f"decoder.layers.{i}.pre_mlp_layernorm.weight" for i in range(2)}
        assert torch.equal(found["decoder.layers.1.pre_mlp_layernorm.weight"], stacked[1])
    experts = canonical({"decoder.layers.mlp.experts.experts.linear_fc1.weight": stacked})
    assert torch.equal(experts["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"], stacked[1, 2])


ARGS: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias_gelu_fusion": False}, "exact GELU"),
        ({"rotary_seq_len_interpolation_factor": 2}, "--rotary-seq-len-interpolation-factor 2"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type yarn"),
        ({"yaml_cfg": "model.yaml"}, "--yaml-cfg model.yaml"),  # its model is not in the args
        ({"spec": ["forks.layers", "spec"]}, "--spec forks.layers spec"),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "--moe-router-load-balancing-type sinkhorn"),
        ({"moe_router_load_balancing_type": ["quantile_balancing"]}, "type quantile_balancing"),
        ({"num_experts": 4, "moe_router_score_function": "sqrtsoftplus"}, "--moe-router-score-function sqrtsoftplus"),
    ],
)
def test_other_layers_are_refused(change: dict[str, Any], words: str) -> None:
    assert stock.options(Namespace(**ARGS))["disable_bias_linear"] is False
    with pytest.raises(UserError, match=words):
        stock.options(Namespace(**ARGS | change))


def test_every_field_of_megatron_core_is_classified() -> None:
    """Each is represented, refused off its default or harmless; a table's default is Megatron-core's."""
    from megatron.core.transformer import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    tables = (stock_fields.REPRESENTED, stock_fields.HARMLESS, stock_fields.REFUSED.keys())
    assert [name for name in fields if sum(name in table for table in tables) != 1] == []
    known = {name: allowed for name, allowed in stock_fields.REFUSED.items() if name in fields}
    assert {name: fields[name].default for name in known} == known


@pytest.mark.parametrize("name", stock_fields.REFUSED)
def test_a_field_that_no_layer_here_has_is_refused_off_its_default(name: str) -> None:
    allowed = stock_fields.REFUSED[name]
    stock.options(Namespace(**ARGS, **{name: allowed}))
    for other in (0.5, [1, 0], "another"):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} .*, which these layers do not have"):
            stock.options(Namespace(**ARGS, **{name: other}))


def test_a_field_of_a_newer_release_is_refused_off_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import transformer

    newer = make_dataclass(
        "TransformerConfig",
        [("logit_cap", float, field(default=0.0)), ("caps", list, field(default_factory=list))],
        bases=(transformer.TransformerConfig,),
    )
    monkeypatch.setattr(transformer, "TransformerConfig", newer)
    assert stock.options(Namespace(**ARGS)) == stock.options(Namespace(**ARGS, logit_cap=0.0, caps=[]))
    with pytest.raises(UserError, match=r"--logit-cap 30\.0"):
        stock.options(Namespace(**ARGS, logit_cap=30.0))


def test_names_of_every_release_are_read() -> None:
    """From 0.16 on the args of Megatron-LM have the names of Megatron-core's fields."""
    assert stock.options(Namespace(**ARGS, norm_epsilon=1e-6))["norm_epsilon"] == 1e-6
    assert stock.options(Namespace(**ARGS, layernorm_epsilon=1e-6))["norm_epsilon"] == 1e-6
    experts = {"num_experts": 4, "moe_layer_freq": [0, 1], "disable_bias_linear": True}
    config = resolve_model(Config(**stock.options(Namespace(**ARGS, **experts))))
    assert config.moe_layer_freq == "[0,1]"


def test_errors_are_one_line(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--save", "ours", "--vocab-size", "200"]
    assert import_megatron.main(["--load", "nowhere", *flags]) == 2
    assert "no checkpoint of Megatron-LM there" in capsys.readouterr().err
    assert import_megatron.main(["--load", "nowhere", "--save", "ours"]) == 2
    assert "which tokenizer? found none: give either --vocab-file and --merge-file, or" in capsys.readouterr().err
    args, weights, _ = stock_model(MODELS["gpt"], Path("dist"))
    write_ranks(Path("one"), args, {"mp_rank_01": {"model": weights}})
    assert import_megatron.main(["--load", "one", *flags]) == 2
    assert "some are missing" in capsys.readouterr().err
    write_ranks(Path("small"), args, {"mp_rank_00": {"model": weights}})
    assert import_megatron.main(["--load", "small", "--save", "ours", "--vocab-size", "300"]) == 2
    assert "has 301 ids, and the rows of the checkpoint's embedding are 256" in capsys.readouterr().err
    damaged = {name: tensor.clone() for name, tensor in weights.items()}
    damaged["decoder.layers.1.mlp.linear_fc2.bias"][3] = torch.inf
    write_ranks(Path("damaged"), args, {"mp_rank_00": {"model": damaged}})
    assert import_megatron.main(["--load", "damaged", *flags]) == 2
    assert "decoder.layers.1.mlp.linear_fc2.bias has 1 NaN or Inf" in capsys.readouterr().err
    args.hidden_size = args.ffn_hidden_size = 32
    write_ranks(Path("other"), args, {"mp_rank_00": {"model": weights}})
    assert import_megatron.main(["--load", "other", *flags]) == 2
    assert "weights of another size" in capsys.readouterr().err


FILES = {"--vocab-file": "vocab.json", "--merge-file": "merges.txt", "--tokenizer-model": "model"}


@pytest.mark.parametrize(
    "names",
    [
        ("--vocab-file",),
        ("--merge-file", "--vocab-size"),
        ("--vocab-file", "--merge-file", "--tokenizer-model"),
        ("--vocab-file", "--tokenizer-model", "--vocab-size"),
    ],
)
def test_flags_of_several_tokenizers_or_of_a_part_are_refused(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in names for word in (name, FILES.get(name, "200"))]
    assert import_megatron.main(["--load", "nowhere", "--save", "ours", *words]) == 2
    found = capsys.readouterr().err.partition("which tokenizer? found ")[2].partition(": give either")[0]
    assert sorted(found.split(", ")) == sorted(names)


def test_a_vocabulary_size_is_checked_against_the_files(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    stock_model({**MODELS["gpt"], "num_layers": 2}, Path("dist"))
    tiny = SHIPPED / "data/tiny_bpe"
    files = ["--vocab-file", str(tiny / "vocab.json"), "--merge-file", str(tiny / "merges.txt")]
    common = ["--load", "dist", "--save", "ours", *files, "--vocab-size"]
    assert import_megatron.main([*common, "200"]) == 2
    assert "--vocab-size 200 was asked, but the GPT2BPETokenizer's files hold 512 ids" in capsys.readouterr().err
    missing = ["--vocab-file", "nowhere.json", "--merge-file", "nowhere.txt", "--vocab-size", "200"]
    assert import_megatron.main(["--load", "dist", "--save", "ours", *missing]) == 2
    assert "--vocab-file nowhere.json: no such file" in capsys.readouterr().err
    assert import_megatron.main([*common, "512"]) == 2
    assert "has 512 ids, and the rows of the checkpoint's embedding are 256" in capsys.readouterr().err
    assert import_megatron.main(["--load", "dist", "--save", "sa ve", "--vocab-size", "200"]) == 0
    assert "train with: --config 'sa ve/model.yaml' --load 'sa ve' --finetune, " in capsys.readouterr().out
