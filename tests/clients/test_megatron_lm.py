"""Recipes in unmodified Megatron-LM by ``--spec``, on CPU processes; needs MEGATRON_LM, see ``megatron_lm.obtain``."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.clients.megatron_lm import MegatronLM, NotAvailableError, Run, obtain
from tests.docs.markdown import fences
from tests.environment import ROOT
from tests.launch import fork_ranks
from tests.weekly import also_weekly
from tools.bench.commands import megatron_lm as bench
from tools.bench.shapes import MODELS

pytestmark = pytest.mark.slow

SEQUENCE, VOCABULARY = 32, 127
MODEL = shlex.split(f"""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 10 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 64 --bf16
    --log-interval 1 --eval-interval 2 --eval-iters 1 --seed 1234 --hidden-dropout 0 --attention-dropout 0
    --no-gradient-accumulation-fusion --num-workers 0
""")
# What Megatron-LM needs on a machine without TransformerEngine and apex, and without a GPU.
STOCK = shlex.split("""
    --transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
    --distributed-backend gloo --no-create-attention-mask-in-dataloader --use-cpu-initialization
""")
ON_GPU = shlex.split("""
    --transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --deterministic-mode
    --num-layers 4 --hidden-size 256 --seq-length 128 --max-position-embeddings 128 --global-batch-size 8
    --train-iters 6
""")
EXPERTS = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --disable-bias-linear --moe-token-dispatcher-type alltoall
""")
QWEN = shlex.split("""
    --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --group-query-attention --num-query-groups 2
""")
PIPELINE = shlex.split("--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1")
OVERLAP = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
RECOMPUTE = shlex.split("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
TENSOR = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")


def spec(recipe: str) -> list[str]:
    return ["--spec", "megatron_lowprec.specs", recipe]


@pytest.fixture(scope="module")
def megatron_lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronLM]:
    folder = tmp_path_factory.mktemp("client")
    try:
        checkout = obtain(folder)
    except NotAvailableError as why:
        pytest.skip(str(why))
    logs = folder / "logs"
    logs.mkdir()
    client = MegatronLM(checkout, logs)
    yield client
    client.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Data of which all samples are equal: the driver and Megatron-LM take them in different orders."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("data") / "periodic"
    period = np.random.default_rng(0).integers(0, VOCABULARY - 1, SEQUENCE)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(50):
        builder.add_document(np.tile(period, 40), [40 * SEQUENCE])
    builder.finalize(f"{prefix}.idx")
    return ["--data-path", str(prefix), "--split", "90,5,5"]


def losses(client: MegatronLM, *arguments: str, ranks: int = 1, model: list[str] | None = None) -> list[float]:
    done = client.run(*(model or MODEL), *STOCK, *arguments, ranks=ranks)
    assert done.codes == [0] * ranks, done.output[-4000:]
    return done.losses


MODELS_OF_BF16 = {
    "dense": ([], 1),
    "experts": (EXPERTS, 1),
    "llama and norms of queries": (QWEN, 1),
    "pipeline": (PIPELINE, 2),
    "data parallel": (OVERLAP, 2),
    "tensor parallel": (TENSOR[:2], 2),
}


@pytest.mark.parametrize("name", also_weekly(MODELS_OF_BF16, ["tensor parallel"]))
def test_bf16_is_megatron_lm_bit_for_bit(megatron_lm: MegatronLM, name: str) -> None:
    """Parameters and losses; its own attention, which ``--attention-backend unfused`` selects, has other bits."""
    arguments, ranks = MODELS_OF_BF16[name]
    common = [*MODEL, *STOCK, "--mock-data", *arguments]
    stock = megatron_lm.run(*common, ranks=ranks)
    ours = megatron_lm.run(*common, *spec("bf16"), "--attention-backend", "unfused", ranks=ranks)
    assert stock.codes == ours.codes == [0] * ranks, stock.output[-2000:] + ours.output[-4000:]
    assert len(stock.losses) >= 4
    assert ours.losses == stock.losses
    assert ours.parameters == stock.parameters


RECIPES = ["bf16", "fp8_delayed", "mxfp8", "mxfp4_rht_sr", "nvfp4", "quartet2", "fp8_lm_o3"]


@pytest.mark.parametrize("recipe", also_weekly(RECIPES, ["fp8_delayed"]))
def test_losses_equal_the_drivers(megatron_lm: MegatronLM, data: list[str], recipe: str, tmp_path: Path) -> None:
    # unclipped: the driver adds the squares of a gradient norm in another order
    flags = [*data, "--train-iters", "6", "--clip-grad", "0"]
    flags += ["--use-distributed-optimizer"] if recipe.startswith("fp8_lm") else []
    found = losses(megatron_lm, *flags, *spec(recipe))
    fork_ranks(1, ["pretrain_gpt.py", *MODEL, *flags, "--recipe", recipe, "--no-save", "--save", "run"], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert found == [row["lm loss"] for row in rows if "lm loss" in row]
    assert len(found) == 6


@pytest.mark.weekly
def test_grouped_experts_have_the_losses_of_sequential_ones(megatron_lm: MegatronLM) -> None:
    arguments = ["--mock-data", *spec("mxfp8"), *EXPERTS]
    assert losses(megatron_lm, *arguments, "--moe-grouped-gemm") == losses(megatron_lm, *arguments)


@pytest.mark.weekly
def test_layouts_give_one_process_losses(megatron_lm: MegatronLM, data: list[str]) -> None:
    arguments = [*data, *spec("mxfp8"), "--global-batch-size", "8", "--train-iters", "2"]
    one = losses(megatron_lm, *arguments)
    parallel = losses(megatron_lm, *arguments, *TENSOR, ranks=2)
    # Megatron-core sums the ranks' outputs in bf16: the unquantized losses differ as much.
    assert parallel == pytest.approx([*one, *one], abs=0.01)
    assert losses(megatron_lm, *arguments, *OVERLAP, ranks=2) == pytest.approx([*one, *one], abs=1e-4)


@pytest.mark.weekly
def test_recomputation_repeats_the_draws(megatron_lm: MegatronLM) -> None:
    recipe = [*spec("mxfp4_rht_sr"), "--mock-data"]
    assert losses(megatron_lm, *recipe, *RECOMPUTE) == losses(megatron_lm, *recipe)


def test_cuda_graphs_have_the_losses_of_eager_layers(megatron_lm: MegatronLM) -> None:
    """With dropout, an evaluation in between and DDP's hooks. On a CPU, recordings that run again stand for graphs."""
    graphs = compare_graphs(megatron_lm, *STOCK, *QWEN, *OVERLAP, *spec("fp8_delayed"))
    assert "CUDA graphs: 2 layers captured, 8 graphs" in graphs.output


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr"])
def test_replays_on_a_gpu_have_the_losses_of_eager_layers(megatron_lm: MegatronLM, recipe: str) -> None:
    graphs = compare_graphs(megatron_lm, *ON_GPU, *spec(recipe))
    assert "CUDA graphs: 4 layers captured, 16 graphs" in graphs.output


def compare_graphs(megatron_lm: MegatronLM, *arguments: str) -> Run:
    """The run with graphs, whose losses and gradient norms equal those of the run without, bit for bit."""
    drops = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    common = [*MODEL, *arguments, *drops, "--mock-data"]
    eager = megatron_lm.run(*common)
    graphs = megatron_lm.run(*common, "--cuda-graph-impl", "local")
    assert eager.codes == graphs.codes == [0], eager.output[-2000:] + graphs.output[-4000:]
    assert len(eager.losses) >= 3
    assert (graphs.losses, graphs.grad_norms) == (eager.losses, eager.grad_norms)
    return graphs


def test_the_state_of_a_recipe_resumes(megatron_lm: MegatronLM, tmp_path: Path) -> None:
    """Optimizer state, stored gradients and FP8 weights, over two ranks: the undisturbed losses, bit for bit."""
    common = ["--mock-data", *spec("fp8_lm_o3"), *OVERLAP, "--dist-ckpt-optim-fully-reshardable"]
    whole = losses(megatron_lm, *common, "--save", str(tmp_path), "--save-interval", "2", ranks=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = losses(megatron_lm, *common, "--load", str(tmp_path), ranks=2)
    assert rest[:2] == whole[2:4]


@pytest.mark.parametrize("form", also_weekly(["torch_dist", "torch"], ["torch_dist"]))
def test_amax_histories_are_in_megatron_lm_s_checkpoints(megatron_lm: MegatronLM, form: str, tmp_path: Path) -> None:
    """A resume under delayed scaling; from and to runs without histories at the default strictness."""
    save = ["--mock-data", "--ckpt-format", form, "--save", str(tmp_path), "--save-interval", "2"]
    load = ["--mock-data", "--ckpt-format", form, "--load", str(tmp_path)]
    whole = losses(megatron_lm, *save, *spec("fp8_delayed"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert losses(megatron_lm, *load, *spec("fp8_delayed")) == whole[2:]
    others = {
        "other recipe": losses(megatron_lm, *load, *spec("mxfp4_rht_sr")),
        "stock": losses(megatron_lm, *load),
    }
    if form == "torch_dist":
        others["two ranks"] = losses(megatron_lm, *load, *spec("fp8_delayed"), *TENSOR, ranks=2)[:2]
    for name, found in others.items():
        assert found != whole[2:], name
        assert found == pytest.approx(whole[2:], abs=0.02), name
    stock = losses(megatron_lm, *save)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert losses(megatron_lm, *load, *spec("fp8_delayed")) == pytest.approx(stock[2:], abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (spec("mxfp4_rht_s"), "there is no recipe 'mxfp4_rht_s': did you mean mxfp4_rht_sr"),
        (spec("fp8_lm"), "fp8_lm quantizes optimizer state, gradients or weights, which needs --use-distributed-opt"),
        ([*spec("mxfp8"), "--fp8-format", "hybrid"], "TransformerConfig.fp8 is 'hybrid'"),
        ([*spec("mxfp8"), "--first-last-layers-bf16"], "--first-last-layers-bf16 has no effect under --spec"),
        ([*spec("mxfp8"), "--no-fp8-wgrad"], "--no-fp8-wgrad has no effect under --spec"),
        ([*spec("fp8_delayed"), "--fp8-amax-history-len", "7"], "--fp8-amax-history-len 7 has no effect under --spec"),
        (spec("fp8_delayed --fp8-sequence-parallel-gather"), "does nothing without --sequence-parallel"),
    ],
)
def test_errors_are_named(megatron_lm: MegatronLM, arguments: list[str], words: str) -> None:
    done = megatron_lm.run(*MODEL, *STOCK, "--mock-data", *arguments)
    assert done.codes != [0]
    assert words in done.output


def test_a_missing_flag_is_named(megatron_lm: MegatronLM) -> None:
    model = [argument for argument in MODEL if argument != "--no-gradient-accumulation-fusion"]
    done = megatron_lm.run(*model, *STOCK, "--mock-data", *spec("mxfp8"))
    assert done.codes != [0]
    assert "pass --no-gradient-accumulation-fusion" in done.output


def run_small(megatron_lm: MegatronLM, arguments: Sequence[str]) -> Run:
    """A command for GPUs on a model for two CPU processes: of the same flags the last counts.

    Flags of evaluation stay out, so that the command needs its own.
    """
    kept = {"--eval-interval", "--eval-iters"}
    small = [word for at, word in enumerate(MODEL) if word not in kept and MODEL[at - 1] not in kept]
    done = megatron_lm.run(*arguments, *small, *STOCK, ranks=2)
    assert done.codes == [0, 0], done.output[-4000:]
    assert len(done.losses) == 8
    return done


def test_the_documented_command_runs(megatron_lm: MegatronLM) -> None:
    (command,) = [fence.body for fence in fences(ROOT / "docs/guide/megatron-lm.md") if "--spec" in fence.body]
    launcher, number, ranks, script, *arguments = shlex.split(command.replace("\\\n", " "))
    assert [launcher, number, ranks, script] == ["torchrun", "--nproc-per-node", "8", "Megatron-LM/pretrain_gpt.py"]
    assert "recipe mxfp4_rht_sr: " in run_small(megatron_lm, arguments).output


@pytest.mark.weekly
def test_the_measured_flags_run(megatron_lm: MegatronLM, tmp_path: Path) -> None:
    args = argparse.Namespace(micro_batch=None, warm_up=10, iterations=20)
    client = bench.Client("Megatron-LM", "", tmp_path, None)
    flags = bench.flags_of(MODELS["345m"], client, "spec-fp8_delayed-graphs", args, tmp_path)
    output = run_small(megatron_lm, flags).output
    assert "recipe fp8_delayed: " in output
    assert "CUDA graphs: 2 layers captured" in output


def test_a_file_and_overrides(megatron_lm: MegatronLM, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nbase: mxfp8\nsummary: MXFP8 of mine\nkeep_bf16: {last_layers: 1}\n")
    short = ["--mock-data", "--train-iters", "2"]
    whole = losses(megatron_lm, *short, *spec("mxfp8"))
    part = losses(megatron_lm, *short, *spec("mxfp8 keep_bf16.last_layers=1"))
    assert part != whole
    assert losses(megatron_lm, *short, *spec(str(file))) == part
