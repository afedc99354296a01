"""Generate the tables of docs/ that are derived from recipes or from files of results, between their markers.

    python tools/doc_tables.py            # update the pages
    python tools/doc_tables.py --check    # list the pages that would change; exit code 1 if there are any

A table is between ``<!-- table: KIND ARGUMENTS -->`` and ``<!-- end of table -->``. Kinds:

    recipes                        every registered recipe and every file of configs/recipes, with its page
    operands RECIPE                number format, scale and rounding of each operand of each GEMM
    differences BASE RECIPE ...    the fields in which recipes differ from BASE
    execution RECIPE ...           native or emulated on each kind of device, for sizes that native GEMMs support
    patches                        what mcore/patches.py binds again in Megatron-core
    megatron_flags                 the answer to each flag of Megatron-LM's releases
    options GROUP                  the options of a class, as they are declared
    transformer_engine             how each recipe runs in TransformerEngine, or why not
    experiment FILE TABLE COLUMN ...  a table of tools/numerics.py, by the JSON file's keys; all columns without names
    bench FILE COLUMN ...          rows of tools.bench; COLUMN is KEY for all, KEY=PATTERN for those rows alone
    quality FILE                   the main table of tools/report.py on an archive of runs, of all groups
    ladder FILE ...                the table of gaps by model and budget of archives' runs
    claims FILE ... N ...          what archives' runs measure of claims, and the verdicts: of these groups, or of all
    outputs FILE                   its table of the errors of GEMM outputs
    norms FILE ... N               the table of the gradient norms of the N-th group of archives' runs
    last_fifth FILE                training loss and gradient norm beside bf16's, in the last fifth of each run
    validations FILE               each run's validation losses less those of bf16's run of the same seed
    texts FILE                     losses of an archive's checkpoints by text, less those of bf16's checkpoints
    growth FILE ITERATION ...      gradient norm and training loss of an archive's runs, over 200 iterations to each
    weights FILE TENSOR ITERATION ...  rms of a tensor in each layer, of runs whose sizes tools/weight_norms.py has read
    steps FILE ...                 steps of ``tools.bench step`` over bf16's, with the quantizers' kernels
    backward FILE                  the backward pass of ``tools.bench overhead`` over bf16's
    linears FILE RECIPE ...        kernels of ``tools.bench linear`` over bf16's
    quantizers FILE COUNTS SIZE    ``tools.bench quantize`` beside the time that bytes and instructions predict
    scores FILE                    losses of checkpoints under several recipes, by text
    published FILE GROUP ...       gaps to bf16 of a published ladder's groups, by size and budget
    rounding FILE GROUP            gaps to bf16 of a published ladder's group with nearest and with stochastic rounding

A RECIPE is a registered name or a YAML file. The page of a recipe is the one whose tables name it.
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from megatron_lowprec.errors import Parser
from megatron_lowprec.linear.backends.table import UNVERIFIED, choose
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.explain import describe_levels
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import KeepBf16, Phase, Recipe, Rule
from megatron_lowprec.recipe.registry import recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, QuantSpec
from megatron_lowprec.report.amounts import DASH, amount, signed
from megatron_lowprec.report.archives.container import read
from megatron_lowprec.report.build import Report, build
from megatron_lowprec.report.claims import CLAIMS, load_claims
from megatron_lowprec.report.operand_tables import of_outputs
from megatron_lowprec.report.published.ladder import gap_ladder, read_ladder
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.report.tables import Table, all_groups, gradient_norms, quality
from megatron_lowprec.report.tables import claims as claims_table
from megatron_lowprec.shipped import find, names_in
from megatron_lowprec.sweep.jobs import EVALUATION
from megatron_lowprec.te.factory import own_flags, why_no_factory
from megatron_lowprec.te.translation import KINDS, builtin_kind, by_place_or_time, why_not
from megatron_lowprec.text_tables import markdown_table
from megatron_lowprec.training.config.arguments import build_parser, choices_of_flags, flag
from megatron_lowprec.training.config.fp8_flags import FP8_FLAGS, fp8_reason
from megatron_lowprec.training.config.megatron_flags import Answer, answer, answers, megatron_flags
from megatron_lowprec.training.config.options import GROUPS, OPTIONS, Config, options_in
from megatron_lowprec.training.options.declaration import Part
from tools.plot_growth import windows

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
DEVICES = {
    "cpu": "CPU",
    "sm80": "Ampere, sm80",
    "sm89": "Ada, sm89",
    "sm90": "Hopper, sm90",
    "sm100": "Blackwell, sm100",
}
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<what>[^>]*?) -->\n)(?P<table>.*?)(?P<end><!-- end of table -->)", re.S)
_CONTRACTED = {"fprop": "input features", "dgrad": "output features", "wgrad": "tokens"}
_INSTRUCTIONS_A_SECOND = 0.75 * 132 * 4 * 32 * 1.7e9  # of H200's threads: 75% of the issue slots at 1.7 GHz
_WIDE = 4096  # a size that every native GEMM supports


def pages() -> list[Path]:
    """The pages that may contain tables."""
    return sorted(DOCS.rglob("*.md"))


def tables_of(text: str) -> list[list[str]]:
    """Kind and arguments of each table of a page."""
    return [match["what"].split() for match in _TABLE.finditer(text)]


def named_recipes() -> list[str]:
    """Registered names, then the YAML files."""
    return [*recipes(), *(f"configs/recipes/{name}.yaml" for name in names_in("configs/recipes"))]


def page_of(name: str) -> list[Path]:
    """The pages whose tables describe a recipe."""
    described = ("operands", "differences")
    return [
        page
        for page in pages()
        if any(what[0] in described and name in what[1:] for what in tables_of(page.read_text(encoding="utf-8")))
    ]


def rewritten(page: Path) -> str:
    """The page's text with up-to-date tables."""
    text = page.read_text(encoding="utf-8")

    def table(match: re.Match[str]) -> str:
        kind, *names = match["what"].split()
        return match["begin"] + _markdown([*_KINDS[kind](page, *names)]) + match["end"]

    return _TABLE.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    args = parser.parse_args(argv)
    stale = [page for page in pages() if page.read_text(encoding="utf-8") != rewritten(page)]
    for page in stale:
        print(("out of date: " if args.check else "wrote ") + str(page.relative_to(REPOSITORY)))
        if not args.check:
            page.write_text(rewritten(page), encoding="utf-8")
    return int(args.check and bool(stale))


Row = Sequence[str]
_STATE = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "master": "main weight"}
_ABSENT = ("compute dtype", "", "", "")


def _markdown(rows: Sequence[Row]) -> str:
    head, *body = rows
    return "".join(f"{line}\n" for line in markdown_table(head, body))


def _recipe(name: str) -> Recipe:
    return load_recipe(name)


def _recipes(page: Path) -> Iterator[Row]:
    yield "recipe", "summary", "source", "page"
    for name in named_recipes():
        recipe = _recipe(name)
        links = [f"[{found.stem}]({found.relative_to(page.parent)})" for found in page_of(name)]
        yield f"`{name}`", recipe.summary, recipe.source, ", ".join(links)


def _operands(page: Path, name: str) -> Iterator[Row]:
    yield "GEMM", "contracts", "operand", "format", "granularity", "scale", "rounding", "transform"
    for gemm, spec in _recipe(name).gemms.items():
        for operand in GEMM_OPERANDS[gemm]:
            yield gemm, _CONTRACTED[gemm], operand, *_numerics(getattr(spec, operand)), _transform(spec)


def _numerics(quant: QuantSpec | None) -> Row:
    if quant is None:
        return _ABSENT
    scale = f"{quant.scale_format} `{quant.scale_rule}`"
    if quant.amax_floor:
        scale += f", amax at least {quant.amax_floor:g}"
    if quant.scale.rounding == "stochastic":
        scale += ", stochastic"
    scale = ", ".join((scale, *describe_levels(quant)))
    if quant.scaling == "delayed":
        often = f" {quant.history_update}es" if quant.history_update == "microbatch" else ""
        scale += f", delayed: {quant.history_rule} of {quant.history}{often}, margin {quant.margin}"
    rounding = f"`{quant.rounding}`"
    if quant.rounding == "stochastic":
        rounding += f", {quant.random_bits} bits"
    if quant.headroom != 1.0:
        rounding += f", headroom {quant.headroom:g}"
    if quant.source == "fprop":
        rounding += ", from fprop's values"
    return quant.format.upper(), quant.granularity, scale, rounding


def _transform(gemm: GemmSpec) -> str:
    if gemm.hadamard is None:
        return ""
    rounded = ", rounded to the tensor's dtype" if gemm.hadamard.output == "operand" else ""
    return f"Hadamard {gemm.hadamard.block}, {gemm.hadamard.signs} signs{rounded}"


def _state(page: Path, name: str) -> Iterator[Row]:
    yield "what", "field", "format"
    recipe = _recipe(name)
    for part, form in recipe.optimizer.formats.items():
        yield _STATE[part], f"`optimizer.{part}`", form.upper()
    yield "rounding of the state", "`optimizer.rounding`", recipe.optimizer.rounding
    yield "gradients between data-parallel ranks", "`gradients.format`", recipe.gradients.format.upper()
    yield "their partial sums", "`gradients.sum`", recipe.gradients.sum
    yield "their factor mu", "`gradients.mu`", recipe.gradients.mu
    yield "gradients between microbatches", "`gradients.accumulation`", recipe.gradients.accumulation


def _differences(page: Path, base: str, *others: str) -> Iterator[Row]:
    yield "recipe", "field", f"in `{base}`", "here"
    for name in others:
        changes = _changes(_recipe(base), _recipe(name))
        for values in dict.fromkeys(changes.values()):
            yield f"`{name}`", ", ".join(f"`{key}`" for key in changes if changes[key] == values), *values


def _changes(base: Recipe, other: Recipe) -> dict[str, tuple[str, str]]:
    """Every field that decides numerics and differs -> what it is there and here."""
    pairs: dict[str, tuple[str, str]] = {}
    for gemm, operands in GEMM_OPERANDS.items():
        there, here = base.gemms[gemm], other.gemms[gemm]
        for operand in operands:
            before, after = _numerics(getattr(there, operand)), _numerics(getattr(here, operand))
            # an operand that is there on only one side is one difference, not four
            if _ABSENT in (before, after):
                pairs[f"{gemm}.{operand}"] = _in_a_line(before), _in_a_line(after)
                continue
            for field, pair in zip(("format", "granularity", "scale", "rounding"), zip(before, after), strict=True):
                pairs[f"{gemm}.{operand}.{field}"] = pair
        pairs[f"{gemm}.hadamard"] = _transform(there) or "none", _transform(here) or "none"
        pairs[f"{gemm}.fast_accumulation"] = str(there.fast_accumulation).lower(), str(here.fast_accumulation).lower()
    for name in ("rules", "phases"):
        first, second = ("; ".join(_change(recipe, each) for each in getattr(recipe, name)) for recipe in (base, other))
        pairs[name] = first or "none", second or "none"
    for keep in fields(KeepBf16):
        values = getattr(base.keep_bf16, keep.name), getattr(other.keep_bf16, keep.name)
        pairs[f"keep_bf16.{keep.name}"] = str(values[0]), str(values[1])
    for part in ("optimizer", "gradients", "activations"):
        there_is, here_is = (asdict(getattr(recipe, part)) for recipe in (base, other))
        pairs |= {f"{part}.{name}": (there_is[name], here_is[name]) for name in there_is}
    pairs["fp8_weights"] = str(base.fp8_weights).lower(), str(other.fp8_weights).lower()
    return {key: (before, after) for key, (before, after) in pairs.items() if before != after}


def _change(recipe: Recipe, change: Rule | Phase) -> str:
    """A rule or a phase: where or when it applies, and what its GEMMs change of the recipe's."""
    words = []
    for gemm, spec in change.gemms.items():
        before = recipe.gemms[gemm]
        named = [(operand, getattr(before, operand), getattr(spec, operand)) for operand in GEMM_OPERANDS[gemm]]
        found = [f"{gemm}.{operand} {_in_a_line(_numerics(here))}" for operand, there, here in named if there != here]
        found += [f"{gemm} {_transform(spec) or 'without transform'}"] if spec.hadamard != before.hadamard else []
        words += found if spec.quantized else [f"{gemm} bf16"]
    if words == [f"{gemm} bf16" for gemm in GEMM_OPERANDS]:
        words = ["bf16"]
    fields_of = {name: value for name, value in vars(change).items() if name.startswith("from_") and value is not None}
    when = ", ".join(f"`{name}` {value:g}" for name, value in fields_of.items())
    return f"{when or str(change).strip('{}')}: {', '.join(words)}"


def _in_a_line(parts: Row) -> str:
    return ", ".join(part for part in parts if part)


def _execution(page: Path, *names: str) -> Iterator[Row]:
    yield "recipe", "GEMM", *DEVICES.values(), "why emulated"
    for name in names:
        gemms = _recipe(name).gemms
        runs = {gemm: tuple(_runs(gemm, spec, arch) for arch in DEVICES) for gemm, spec in gemms.items()}
        for on_devices, alike in groupby(runs, key=lambda gemm: runs[gemm]):
            reasons = dict.fromkeys(reason for _, reason in on_devices if reason)
            yield f"`{name}`", ", ".join(alike), *(how for how, _ in on_devices), "; ".join(reasons)


def _runs(name: str, gemm: GemmSpec, arch: str) -> tuple[str, str]:
    """How a GEMM runs on a device, and why not natively."""
    if not gemm.quantized:
        return "compute dtype", ""
    backend = choose(name, gemm, Target(arch, _WIDE, _WIDE))
    reasons = (reason.removesuffix(f" on {arch}") for _, reason in backend.passed_over)
    if backend.backend in UNVERIFIED:
        return "checked at start", ""
    return ("native", "") if backend.multiplies_codes else ("emulated", "; ".join(reasons))


def _transformer_engine(page: Path) -> Iterator[Row]:
    yield "recipe", "`te_recipe`", "quantizer factory", "Megatron-LM's own flags", "why not"
    rows = {name: _in_transformer_engine(_recipe(name)) for name in named_recipes()}
    for row in dict.fromkeys(rows.values()):
        yield ", ".join(f"`{Path(name).stem}`" for name in rows if rows[name] == row), *row


def _in_transformer_engine(recipe: Recipe) -> tuple[str, str, str, str]:
    reason = why_not(recipe)
    if reason is not None:
        return "no", "no", "no", reason
    if not recipe.quantized:
        return "not needed", "not needed", "none needed", ""
    flags, kind = own_flags(recipe), builtin_kind(recipe)
    recipe_class = "CustomRecipe" if kind is None else KINDS[kind].recipe_class
    missing = why_no_factory(recipe)
    return (
        f"`{recipe_class}`" if by_place_or_time(recipe) is None else "no",
        "yes" if missing is None else "no",
        "no" if flags is None else f"`{flags}`",
        missing or "",
    )


def _patches(page: Path) -> Iterator[Row]:
    from megatron_lowprec.mcore.patches import PATCHES

    yield "replaced name", "change", "by", "needed in Megatron-core"
    for patch in PATCHES.values():
        names = (target.partition("(")[0].replace(":", ".").split(".")[-2:] for target in patch.targets)
        yield ", ".join(dict.fromkeys(f"`{'.'.join(name)}`" for name in names)), patch.change, patch.by, patch.seen


def _megatron_flags(page: Path) -> Iterator[Row]:
    yield "flag", "releases", "answer", "meaning or reason"
    ours = choices_of_flags(build_parser())
    for name, theirs in megatron_flags().items():
        option = name[2:].replace("-", "_")
        values = {key.partition("=")[2]: found for key, found in answers().items() if key.startswith(f"{name}=")}
        if option in FP8_FLAGS:
            reason = fp8_reason(option)
            kind, text = ("read as", "fields of the recipe") if reason is None else ("refused", reason)
        elif name in ours:
            kind, text = "built", ", ".join(f"`{choice}`" for choice in ours[name] or ())
        else:
            found = answer(name)
            assert found is not None, f"{name} has no answer in megatron_answers.yaml"
            kind, text = found.kind, _text(found)
        others = (f"{'others' if key == '*' else f'`{key}`'}: {_text(each)}" for key, each in values.items())
        yield f"`{name}`", " ".join(theirs.releases), kind, "; ".join(part for part in (text, *others) if part)


def _options(page: Path, group: str) -> Iterator[Row]:
    yield "option", "default", "meaning", "another value when a run resumes"
    (found,) = (each for each in GROUPS if each.__name__ == group)
    for name in options_in(*Part, groups=(found,)):
        option, default = OPTIONS[name], getattr(Config(), name)
        bounds = {"at least": option.least, "at most": option.most}
        limits = [f"{word} {limit:g}" for word, limit in bounds.items() if limit is not None]
        shown = "" if default is None or default == [] else f"`{str(default).lower() if default is False else default}`"
        assert option.part is not None
        resume = "refused without --no-load-optim" if option.optimizer_state else option.part.value
        if not option.hidden:
            yield f"`{flag(name)}`", shown, "; ".join([option.help, *limits]), resume


def _text(found: Answer) -> str:
    return f"`{found.text}`" if found.kind == "read as" else found.text


def _rounding(page: Path, name: str, group: str) -> Iterator[Row]:
    yield "parameters", "tokens a parameter", "nearest, nats", "stochastic, nats", "nearest less stochastic, nats"
    runs = read_ladder(find(name))
    for parameters in sorted({run.parameters for run in runs if run.group == group}):
        nearest, stochastic = (
            gap_ladder(runs, parameters, group=group, bstochastic=each) for each in ("False", "True")
        )
        for (ratio, left), (other, right) in zip(nearest, stochastic, strict=True):
            assert ratio == other, f"{group}: runs of {ratio} and {other} tokens a parameter have no partner"
            yield amount(parameters), f"{ratio:.0f}", *(signed(each, 4) for each in (left, right, left - right))


def _published(page: Path, name: str, *groups: str) -> Iterator[Row]:
    runs = read_ladder(find(name))
    found: dict[tuple[int, str, int], list[float]] = {}
    for run in runs:
        budget = 25 * 2 ** round(math.log2(run.tokens_per_parameter / 25))  # theirs are within 4% of it
        found.setdefault((run.parameters, run.group, budget), []).append(run.gap)
    budgets = sorted({budget for _, group, budget in found if group in groups})
    yield "parameters", "group", *(f"gap at {budget} tokens a parameter, nats" for budget in budgets)
    for parameters in sorted({run.parameters for run in runs}):
        for group in groups:
            gaps = [found.get((parameters, group, budget), []) for budget in budgets]
            if any(gaps):
                yield amount(parameters), group, *(_range(each) for each in gaps)


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(signed(end, 4) for end in (min(values), max(values)))) if values else DASH


def _experiment(page: Path, name: str, table: str, *keys: str) -> Iterator[Row]:
    found = json.loads((page.parent / name).read_text(encoding="utf-8"))["tables"][table]
    columns = {column["key"]: column for column in found["columns"]}
    chosen = [columns[key] for key in keys or columns]
    yield [column["heading"].replace("\n", " ") for column in chosen]
    for row in found["rows"]:
        values = [(row.get(column["key"]), column["form"]) for column in chosen]
        yield ["" if value is None else format(value, form) for value, form in values]


_BENCH: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "variant": ("", lambda row: str(row["variant"]).partition(",")[0]),
    "mode": ("", lambda row: str(row["variant"]).partition(", ")[2] or "eager"),
    "kind": ("", lambda row: str(row["kind"])),
    "ms": ("ms", lambda row: f"{row['ms']:.1f}{_apart(row)}"),
    "range": ("range", lambda row: f"{row['low']:.1f} to {row['high']:.1f}"),
    "over_bf16": ("over bf16", lambda row: f"{row['over_bf16']:.3f}"),
    "kernel_ms": ("kernels", lambda row: f"{row['kernel_ms']:.1f}"),
    "host_ms": ("host", lambda row: f"{row['host_ms']:.0f}"),
    "share": ("share", lambda row: f"{row['share']:.0%}"),
    "floor_ms": ("floor", lambda row: "" if row.get("floor_ms") is None else f"{row['floor_ms']:.0f}"),
}
_NEAR = 0.05  # rounds that are said to differ


def _apart(row: dict[str, Any]) -> str:
    return f" (rounds {row['noise']:.0%} apart)" if row.get("noise", 0.0) > _NEAR else ""


def _bench(page: Path, name: str, *columns: str) -> Iterator[Row]:
    """Milliseconds; a range is from the 20th to the 80th percentile."""
    content = json.loads((page.parent / name).read_text(encoding="utf-8"))
    rows = [row for table in content["tables"] for row in table["rows"] if not row.get("failed")]
    shown = [column for column in columns if "=" not in column]
    for key, pattern in (column.split("=") for column in columns if "=" in column):
        rows = [row for row in rows if fnmatchcase(str(row[key]), pattern)]
    yield [_BENCH[key][0] for key in shown]
    yield from ([_BENCH[key][1](row) for key in shown] for row in rows)


def _quality(page: Path, name: str) -> Iterator[Row]:
    report = _report(page.parent / name)
    confidence = report.claims.rules.confidence
    if len(report.groups) > 1:
        return _rows(all_groups(report.groups, report.fits, confidence))
    (group,) = report.groups
    return _rows(quality(group, report.fits[group.name], confidence))


def _ladder(page: Path, *names: str) -> Iterator[Row]:
    table = _report(*(page.parent / name for name in names)).gap_table()
    assert table is not None, f"{' '.join(names)}: no model has two budgets"
    return _rows(table)


def _claims(page: Path, *words: str) -> Iterator[Row]:
    names = [word for word in words if not word.isdecimal()]
    report = _report(*(page.parent / name for name in names))
    groups = [report.groups[int(word) - 1] for word in words if word.isdecimal()] or report.groups
    verdicts = [verdict for group in groups for verdict in report.verdicts if verdict.group is group]
    table = claims_table(verdicts, report.claims.rules.confidence)
    assert table is not None, f"{' '.join(names)}: no run has the recipes of a claim"
    return _rows(table)


def _outputs(page: Path, name: str) -> Iterator[Row]:
    report = _report(page.parent / name)
    (group,) = report.groups
    table = of_outputs(report.snapshots[group.name])
    assert table is not None, f"{name}: no run has recorded outputs"
    return _rows(table)


def _norms(page: Path, *words: str) -> Iterator[Row]:
    *names, number = words
    table = gradient_norms(_report(*(page.parent / name for name in names)).groups[int(number) - 1])
    assert table is not None, f"{' '.join(names)}: no run has recorded gradient norms"
    return _rows(table)


def _last_fifth(page: Path, name: str) -> Iterator[Row]:
    (group,) = _report(page.parent / name).groups
    assert not group.repeated(), f"{name}: a seed is repeated"
    losses = group.training_losses(0.8, 1.0)
    norms = {(run.label, run.block): run.norms_by_fifth[-1] for run in group.runs}
    seeds = [run.block for run in group.of(group.reference)]
    columns = ("training loss less bf16's, nats", "gradient norm over bf16's")
    yield "recipe", *(f"{column}, seed {seed}" for column in columns for seed in seeds)
    for label in group.compared:
        pairs = [((label, seed), (group.reference, seed)) for seed in seeds]
        yield (
            label,
            *(signed(losses[ours] - losses[theirs], 4) for ours, theirs in pairs),
            *(f"{norms[ours] / norms[theirs]:.3f}" for ours, theirs in pairs),
        )


def _validations(page: Path, name: str) -> Iterator[Row]:
    (group,) = _report(page.parent / name).groups
    curves = {(run.label, run.block): run.curve.validation for run in group.runs if run.curve}
    iterations = curves[group.labels[0], group.runs[0].block][0]
    yield "recipe", "seed", *(f"less bf16's, nats, iteration {at:,}" for at in iterations)
    for label in group.compared:
        for run in group.of(label):
            differences = curves[label, run.block][1] - curves[group.reference, run.block][1]
            yield label, str(run.seed), *(signed(each, 4) for each in differences)


def _texts(page: Path, name: str) -> Iterator[Row]:
    texts = read(page.parent / name).texts
    scores: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = {}  # nats a token and bits a byte, by seed
    for path in (path for path in texts if Path(path).name == EVALUATION):
        seed = yaml.safe_load(texts[f"{Path(path).parent}/config.yaml"])["options"]["seed"]
        for each in json.loads(texts[path])["evaluations"]:
            by_name = {Path(file).name.partition(".")[0]: score for file, score in each["data"].items()}
            for text, score in (by_name | {"WikiText": each["wikitext"]}).items():
                found = scores.setdefault((text, each["trained_under"], each["recipe"]), {})
                found[seed] = score["loss"], score["bits_per_byte"]
    order = list(dict.fromkeys(text for text, *_ in scores))
    yield (
        *("text", "trained under", "scored under", "seeds", "loss, nats", "bits a byte"),
        *("less bf16's, nats", "smallest", "largest", "less bf16's, bits a byte"),
    )
    for (text, trained, evaluated), found in sorted(scores.items(), key=lambda each: order.index(each[0][0])):
        bf16 = scores[text, "bf16", "bf16"]
        loss, bits = (mean(each[at] for each in found.values()) for at in (0, 1))
        gaps, of_bits = ([each[at] - bf16[seed][at] for seed, each in found.items()] for at in (0, 1))
        beside = signed(mean(gaps), 4), signed(min(gaps), 4), signed(max(gaps), 4), signed(mean(of_bits), 4)
        yield text, trained, evaluated, str(len(found)), f"{loss:.4f}", f"{bits:.4f}", *beside


def _growth(page: Path, name: str, *iterations: str) -> Iterator[Row]:
    yield (
        "run",
        *(f"gradient norm, {int(at):,}" for at in iterations),
        f"training loss, nats, {int(iterations[-1]):,}",
    )
    for run, found in windows(page.parent / name).items():
        last = found.losses[int(iterations[-1])]
        yield run, *(f"{found.norms[int(at)]:.2f}" for at in iterations), f"{last:.3f}"


def _weights(page: Path, name: str, tensor: str, *iterations: str) -> Iterator[Row]:
    content = json.loads((page.parent / name).read_text(encoding="utf-8"))
    layers = range(1, len(next(iter(next(iter(content.values())).values()))[tensor]["rms"]) + 1)
    yield "run", *(f"layer {layer}, {int(at):,}" for layer in layers for at in iterations)
    for run, found in content.items():
        rows = [found[at][tensor]["rms"] if at in found else None for at in iterations]
        yield run, *("–" if row is None else f"{row[layer - 1]:.3f}" for layer in layers for row in rows)


def _scores(page: Path, name: str) -> Iterator[Row]:
    content = json.loads((page.parent / name).read_text(encoding="utf-8"))
    scores = content["scores"]
    bf16 = {(s["trained"], s["seed"], s["text"]): s["loss"] for s in scores if s["evaluated"] == "bf16"}
    yield (
        *("trained under", "scored under", "text", "checkpoints", "loss, nats", "bits a byte"),
        *("less bf16's score, nats", "smallest", "largest"),
    )
    named = sorted({(s["trained"], s["text"], s["evaluated"]) for s in scores}, key=lambda each: each[:2])
    order = list(dict.fromkeys(s["evaluated"] for s in scores))
    for trained, text, evaluated in sorted(named, key=lambda each: (each[0], each[1], order.index(each[2]))):
        chosen = [s for s in scores if (s["trained"], s["evaluated"], s["text"]) == (trained, evaluated, text)]
        losses = [s["loss"] for s in chosen]
        differences = [s["loss"] - bf16[key] for s in chosen if (key := (trained, s["seed"], text)) in bf16]
        bits = sum(losses) / len(losses) * chosen[0]["tokens"] / content["bytes"][text] / math.log(2)
        beside = [sum(differences) / len(differences), min(differences), max(differences)] if differences else []
        yield (
            *(trained, evaluated, text, str(len(chosen)), f"{sum(losses) / len(losses):.4f}", f"{bits:.4f}"),
            *([signed(value, 4) for value in beside] or ["–"] * 3),
        )


def _steps(page: Path, *names: str) -> Iterator[Row]:
    yield "model, batch", "recipe", "step, ms", "over bf16", "kernels, ms", "quantizers of these", "amaxes", "peak GiB"
    for name in names:
        for row in json.loads((page.parent / name).read_text(encoding="utf-8"))["tables"][0]["rows"]:
            spent = {kernel["name"]: kernel["ms"] for kernel in row["runs"][0]["kernels"]}
            quantizers = [spent.get(kernel) for kernel in ("_mx_kernel", "_operand_amaxes_kernel")]
            yield (
                *(f"{row['model'].upper()}, {row['batch']}", row["recipe"], f"{row['ms']:.1f}"),
                *(f"{row['over_bf16']:.3f}", f"{row['kernel_ms']:.1f}"),
                *("" if found is None else f"{found:.1f}" for found in quantizers),
                f"{row['peak_gib']:.1f}",
            )


def _backward(page: Path, name: str) -> Iterator[Row]:
    yield "shapes", "recipe", "backward, ms", "over bf16", "share of RHT", "share of SR"
    for row in json.loads((page.parent / name).read_text(encoding="utf-8"))["tables"][1]["rows"]:
        shares = ("" if row[part] is None else f"{row[part]:.1%}" for part in ("rht", "sr"))
        yield row["model"], row["recipe"], f"{row['ms']:.2f}", f"{row['over_bf16']:.3f}", *shares


def _linears(page: Path, name: str, *names: str) -> Iterator[Row]:
    rows = json.loads((page.parent / name).read_text(encoding="utf-8"))["tables"][0]["rows"]
    found = {(row["linear"], row["recipe"]): row for row in rows}
    yield "linear", "bf16, ms", *(f"{each}, over bf16" for each in names)
    for linear in dict.fromkeys(row["linear"] for row in rows):
        over = (found[linear, each]["graph_over_bf16"] for each in names)
        yield linear, f"{found[linear, 'bf16']['graph_ms']:.3f}", *(f"{each:.2f}" for each in over)


def _quantizers(page: Path, name: str, counts: str, size: str) -> Iterator[Row]:
    content = json.loads((page.parent / name).read_text(encoding="utf-8"))
    fewest: dict[tuple[str, ...], float] = {}
    for row in json.loads((page.parent / counts).read_text(encoding="utf-8"))["rows"]:
        variant = row["format"], row["kind"], row["direction"]
        fewest[variant] = min(row["total"], fewest.get(variant, math.inf))
    yield (
        *("format", "rounding, transform", "direction", "bytes an entry", "instructions an entry", "time, us"),
        *("of the large copy", "of a copy of the size", "predicted", "limited by"),
    )
    for row in content["tables"][0]["rows"]:
        if row["size"] == size:
            variant = row["format"], row["kind"], row["direction"]
            entries = math.prod(map(int, size.split("x")))
            moved = row["moved_bytes"] / entries
            read = 2 if row["format"] == "nvfp4" else 0  # by the pass for the amax
            rate = row["tb_s"] * 1e12 / row["of_same_copy"]
            ways = [(*variant[:2], way) for way in ("rows", "columns")]  # two kernels, or one for a shared output
            counted = fewest.get(variant) or sum(fewest.get(way, 0.0) for way in ways)
            bytes_take, instructions_take = (moved - read) / rate, counted / _INSTRUCTIONS_A_SECOND
            predicted = moved / rate / (read / rate + max(bytes_take, instructions_take))
            yield (
                *(*variant, f"{moved:.0f}", f"{counted:.1f}", f"{1e3 * row['ms']:.0f}"),
                *(f"{share:.0%}" for share in (row["of_large_copy"], row["of_same_copy"], predicted)),
                "bytes" if bytes_take >= instructions_take else "instructions",
            )


@cache
def _report(*archives: Path) -> Report:
    claims = load_claims(CLAIMS)
    with tempfile.TemporaryDirectory() as scratch:
        runs, notes = find_runs([str(archive) for archive in archives], claims.rules.diverged_rise, Path(scratch))
        return build(runs, notes, claims, "bf16", archives[0].name)


def _rows(table: Table) -> Iterator[Row]:
    yield [column.replace("\n", ", ") for column in table.columns]
    yield from table.rows


_KINDS: dict[str, Callable[..., Iterator[Row]]] = {
    "recipes": _recipes,
    "operands": _operands,
    "state": _state,
    "differences": _differences,
    "execution": _execution,
    "options": _options,
    "patches": _patches,
    "megatron_flags": _megatron_flags,
    "transformer_engine": _transformer_engine,
    "published": _published,
    "rounding": _rounding,
    "quality": _quality,
    "claims": _claims,
    "ladder": _ladder,
    "outputs": _outputs,
    "norms": _norms,
    "last_fifth": _last_fifth,
    "validations": _validations,
    "texts": _texts,
    "growth": _growth,
    "weights": _weights,
    "steps": _steps,
    "backward": _backward,
    "linears": _linears,
    "quantizers": _quantizers,
    "scores": _scores,
    "experiment": _experiment,
    "bench": _bench,
}


if __name__ == "__main__":
    sys.exit(main())
