"""Each figure of README, of the comparison and of the overview of recipes is that of one cell of a results page."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.docs.figures import RESULTS, Figure, quoted, same, source
from tests.docs.markdown import ROOT, name_of, prose

README, COMPARISON, RECIPES = ROOT / "README.md", RESULTS / "comparison.md", ROOT / "docs/recipes/README.md"


def half_width(values: Sequence[float]) -> float:
    low, high = values
    return (high - low) / 2


def percent_longer(values: Sequence[float]) -> float:
    (ratio,) = values
    return 100 * (ratio - 1)


def largest(values: Sequence[float]) -> float:
    return max(map(abs, values))


def graphs(text: str, model: str, recipe: str) -> Figure:
    return Figure(text, "native-fp8.md", "Layers as CUDA graphs", "over bf16", ((model, recipe),))


def eight(text: str, column: str, variant: str = "fp8_current") -> Figure:
    return Figure(text, "llama3-8b.md", "Llama 3 8B on H200", column, ((variant,),))


def compiled(text: str, variant: str) -> Figure:
    return Figure(text, "plain-torch.md", "Layers of Llama 3 8B", "over bf16", ((variant,),))


def emulated_fp4(text: str, model: str, combine: Callable[[Sequence[float]], float] = max) -> Figure:
    return Figure(text, "emulated-mx.md", "NVFP4", "over bf16", ((model, "mxfp4_rht_sr"),), combine)


def small(text: str, column: str, *recipes: str, **more: object) -> Figure:
    rows = tuple((recipe,) for recipe in recipes)
    return Figure(text, "recipes-25m.md", "Recipes at 25M parameters", column, rows, **more)  # type: ignore[arg-type]


def operands(text: str, column: str, recipe: str, **more: object) -> Figure:
    return Figure(text, "mxfp8-operands.md", "3M parameters, four epochs", column, ((recipe,),), **more)  # type: ignore[arg-type]


def rivals(text: str, recipe: str) -> Figure:
    return Figure(text, "fp4-rivals.md", "NVFP4 and its rivals", NATS, ((recipe,),))


def roundings(text: str, column: str, combine: Callable[[Sequence[float]], float] = max) -> Figure:
    return Figure(text, *ROUNDINGS, column, (("mxfp4_rht32_rounding",),), combine)


def experts(text: str, recipe: str, column: str) -> Figure:
    return Figure(text, "experts.md", "Experts on H200", column, ((recipe, "32768 tokens"),))


def megatron(text: str, model: str, row: str, column: str = "0.19.0") -> Figure:
    return Figure(text, "megatron-lm.md", "Layers as CUDA graphs, on one H200", column, ((model, row),))


def lone(text: str, page: str, row: str, column: str) -> Figure:
    return Figure(text, page, "Linear layers", column, ((row,),))


M345, B13 = "345M, 16x2048", "1.3B, 8x2048"
NATS, PERCENT, OF_NATS, OF_PERCENT = (
    "gap to bf16, nats",
    "gap, % of perplexity",
    "95% interval, nats",
    "95% interval, % of perplexity",
)
GROUPED, PEER = "grouped", "TransformerEngine"
INTERVAL = "95% interval"
ROUNDINGS = ("stochastic-rounding.md", "Does stochastic rounding pay?")
LAYOUTS = ("layout-parity.md", "Layout parity", "two and four H200s, NCCL")
FP8 = ("fp8_delayed", "fp8_blockwise", "mxfp8")
KILLS = tuple(
    (f"kill -9 of {what}{how}",)
    for what in ("one rank", "torchrun and all ranks")
    for how in ("", ", asynchronous saves")
)
IN_FP32 = tuple(
    (model,)
    for model in (
        "gpt_tiny, export and harness in fp32",
        "gpt_tiny_llama, fp32",
        "GPT-2's vocabulary, fp32",
        "the same, 16 articles",
    )
)

FIGURES = {
    README: [
        eight("takes **{}** of the time of bf16", "over bf16"),
        eight("graphs, {} tokens/s per GPU", "tokens/s per GPU"),
        eight("TransformerEngine, without graphs, {} (two", "over bf16", "TransformerEngine tensorwise"),
        compiled("`convert` take **{}** of compiled bf16's", "fp8_current"),
        compiled("step, torchao's {} (", "torchao tensorwise"),
        emulated_fp4("under `mxfp4_rht_sr` takes **{}** times", B13),
        Figure("**{}** GiB under `fp8_lm_o2`", "fp8-lm.md", "Memory", "measured", (("fp8_lm_o2",),)),
        Figure("`fp8_lm_o2`, {} under bf16", "fp8-lm.md", "Memory", "measured", (("bf16",),)),
        small("`mxfp4_rht_sr` ends **{}** nats above", NATS, "mxfp4_rht_sr"),
        small("plain `mxfp4` {};", NATS, "mxfp4"),
        small("and `mxfp8` {} to", NATS, *FP8, combine=min),
        small("and `mxfp8` 0.006 to {} (", NATS, *FP8, combine=max),
        small("0.006 to 0.007 (±{})", OF_NATS, "mxfp8", combine=half_width),
        operands("`mxfp8` ends {} nats", NATS, "mxfp8"),
        operands("place only: **{}** for the input", NATS, "forward_input"),
        operands("{} for the backward pass (", NATS, "backward"),
        operands("for the backward pass (±{})", OF_NATS, "backward", combine=half_width),
        roundings("with headroom, ends **{}** nats before", "measured"),
        roundings("stochastic rounding ({} to", INTERVAL, min),
        roundings("rounding (0.0019 to {})", INTERVAL, max),
        rivals("`nvfp4` ends {} nats above bf16, **0", "nvfp4"),
        rivals("bf16, **{}** with a forward", "nvfp4_bf16_tail"),
        Figure("| **{}** comparisons of codes", *LAYOUTS, (("operands: codes and scales, bit for bit",),)),
        Figure("kill -9 at **{}** moments", "fault-injection.md", "Fault injection, 2026-11-22", "moments", KILLS, sum),
        Figure(
            "differs by **{}** % or less",
            "lm-eval.md",
            "WikiText by tools/evaluate.py and by lm-evaluation-harness",
            "difference",
            IN_FP32,
            largest,
        ),
    ],
    COMPARISON: [
        eight("in Megatron-LM | {} | 8303.7 |", "ms", "TransformerEngine tensorwise"),
        eight("| 9082.7 | {} |", "ms"),
        eight("| the same | {} | 11695.0 |", "ms", "TransformerEngine bf16"),
        eight("| 11982.5 | {} |", "ms", "bf16"),
        compiled("| torchao 0.18 | {} |", "torchao tensorwise"),
        compiled("| 0.784 | {} |", "fp8_current"),
        Figure("| the same | {} | 0.853 |", "plain-torch.md", "Small models", "over bf16", (("torchao tensorwise",),)),
        Figure("| 0.879 | {} |", "plain-torch.md", "Small models", "over bf16", (("fp8_current",),)),
        megatron("TransformerEngine 2.20.2 in Megatron-LM | {} | 151.2", "345M", "TransformerEngine, fp8_delayed"),
        megatron("in Megatron-LM | 216.2 | {} |", "345M", "driver, fp8_delayed"),
        megatron(
            "| the same, under `--spec` in Megatron-LM | ms | the same | 216.2 | {} |", "345M", "--spec, fp8_delayed"
        ),
        megatron("| the same | {} | 30.7 |", "345M", "TransformerEngine, fp8_delayed", "reserved"),
        megatron("| 48.4 | {} |", "345M", "driver, fp8_delayed", "reserved"),
        megatron("| the same | {} | 202.6", "1.3B", "TransformerEngine, fp8_delayed"),
        megatron("| 255.8 | {} |", "1.3B", "driver, fp8_delayed"),
        *(
            Figure(text, "native-fp8.md", "TransformerEngine in the same run", "delayed", ((row,),))
            for text, row in (
                ("TransformerEngine's layers | {} |", "1.3B, TransformerEngine"),
                ("| 239.2 | {} |", "1.3B, this project"),
            )
        ),
        *(
            experts(text, recipe, column)
            for recipe, theirs, ours in (
                ("fp8_delayed", "| {} | 16.3 |", "| 19.5 | {} |"),
                ("fp8_current", "| {} | 17.1 |", "| 28.0 | {} |"),
                ("fp8_blockwise", "| {} | 18.4 |", "| 21.3 | {} |"),
                ("bf16", "| {} | 18.1 |", "| 18.9 | {} |"),
            )
            for text, column in ((theirs, PEER), (ours, GROUPED))
        ),
        *(
            lone(text, "emulated-mx.md", linear, column)
            for linear, theirs, ours in (
                ("345M fc1", "| {} | 1.59 |", "| 5.5 | {} |"),
                ("1.3B fc1", "| {} | 1.08 |", "| 3.0 | {} |"),
                ("6.7B fc1", "| {} | 1.00 |", "| 1.95 | {} |"),
            )
            for text, column in ((theirs, "published emulation"), (ours, "mxfp4_rht_sr"))
        ),
        lone("torchao, compiled | {} |", "native-fp8.md", "torchao row-wise", "1.3B fc1"),
        lone("| 1.03 | {} |", "native-fp8.md", "fp8_rowwise", "1.3B fc1"),
        emulated_fp4("`mxfp4_rht_sr` takes {} (345M)", M345),
        emulated_fp4("(345M) and {} (1.3B) times", B13),
        lone("takes down to {} of this project's time", "native-fp8.md", "fp8_delayed, cached", "1.3B fc1"),
    ],
    RECIPES: [
        *(
            graphs(text, model, recipe)
            for recipe, first, second in (
                ("fp8_current", "no state; [{} (345M)", "1.16 (345M) to {} (1.3B)"),
                ("fp8_delayed", "before the cast; {} (345M)", "1.22 (345M) to {} (1.3B)"),
                ("fp8_blockwise", "only its own block; {} (345M)", "1.06 (345M) to {} (1.3B)"),
            )
            for text, model in ((first, M345), (second, B13))
        ),
        Figure(
            "[a step takes {}% longer",
            "emulated-mx.md",
            "Whole step",
            "time over bf16's",
            ((B13, "mxfp8"),),
            percent_longer,
        ),
        emulated_fp4("backward, [{}% (345M)", M345, percent_longer),
        emulated_fp4("(345M) and {}% (1.3B) longer", B13, percent_longer),
        small("it ends {}% of perplexity behind bf16", PERCENT, "mxfp8"),
        small("behind bf16, ±{}]", OF_PERCENT, "mxfp8", combine=half_width),
        operands("four epochs of them {}%]", PERCENT, "mxfp8"),
        small("`mxfp4_rht_sr` ends {}% of perplexity", PERCENT, "mxfp4_rht_sr"),
        Figure("697M tokens {}%]", *ROUNDINGS, PERCENT, (("mxfp4_rht32_sr",),)),
    ],
}


@pytest.mark.parametrize(
    ("page", "figure"),
    [(page, figure) for page, figures in FIGURES.items() for figure in figures],
    ids=lambda each: name_of(each) if isinstance(each, Path) else each.text,
)
def test_a_figure_is_that_of_its_cell(page: Path, figure: Figure) -> None:
    assert same(quoted(page, figure), source(figure)), f"{figure.text}: {figure.page} has {source(figure)}"


@pytest.mark.parametrize("page", FIGURES, ids=name_of)
def test_every_figure_has_its_cell(page: Path) -> None:
    """Fractions, percents and what is bold; in README those of tables and lists, the rest are versions."""
    lines = [line for line in prose(page).splitlines() if page != README or line.startswith(("| ", "- "))]
    text = re.sub(r"\]\([^)]*\)|arXiv [\d.]+|(?:TransformerEngine|torchao) [\d.]+", "]", "\n".join(lines))
    kinds = r"\*\*([−+]?\d[\d.,]*)\*\*", r"(?<![\w.])([−+]?\d+\.\d+)(?![\w.]|\*)", r"(?<![\w.])([−+]?\d+)(?= ?%)"
    found = {number for kind in kinds for number in re.findall(kind, text)}
    assert found >= {quoted(page, FIGURES[page][0])}
    assert found - {quoted(page, figure) for figure in FIGURES[page]} == set()


def test_each_reason_has_one_bold_figure_and_links_its_page() -> None:
    rows = [
        line for line in README.read_text(encoding="utf-8").splitlines() if "](docs/results/" in line and "**" in line
    ]
    rows = [row for row in rows if row.startswith("| ")]
    assert len(rows) == 11
    linked = {row: re.findall(r"\]\(docs/results/([^)#]+)", row) for row in rows}
    for figure in FIGURES[README]:
        (row,) = (row for row in rows if figure.text.replace("{}", quoted(README, figure)) in row)
        assert linked[row] == [figure.page]
    assert all(len(re.findall(r"\*\*[^*]+\*\*", row)) == 1 for row in rows)


def test_a_figure_that_only_stands_elsewhere_on_the_page_is_refused() -> None:
    """0.853 is a cell of another table of the page, of smaller models."""
    figure = compiled("", "fp8_current")
    text = (RESULTS / figure.page).read_text(encoding="utf-8")
    assert " 0.853 " in text
    assert not same("0.853", source(figure))
    assert [same(each, 0.0238) for each in ("0.024", "0.0238", "0.023", "0.02")] == [True, True, False, True]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize(("model", "label", "billions"), [(M345, "345M", 33), (B13, "1.3B", 42)])
def test_gpu_hours_of_full_runs_follow_from_measured_rates(model: str, label: str, billions: int, recipe: str) -> None:
    def hours(rates: Sequence[float]) -> float:
        return billions * 1e9 / rates[0] / 3600

    page = ROOT / "docs/guide/sweeps.md"
    (line,) = re.findall(rf"^- {billions}B tokens at {label}: (.*)\.$", prose(page), re.M)
    (figure,) = re.findall(rf"([\d.]+) (?:in|under emulated) `?{recipe}`?(?:,|$)", line)
    assert same(figure, source(Figure("", "emulated-mx.md", "Whole step", "tokens/s", ((model, recipe),), hours)))
