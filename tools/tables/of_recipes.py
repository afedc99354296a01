"""Tables of recipes, options and Megatron-core, from the code:

    recipes                        every registered recipe and every file of configs/recipes, with its page
    operands RECIPE                number format, scale and rounding of each operand of each GEMM
    state RECIPE                   formats of the optimizer's state and of gradients
    differences BASE RECIPE ...    the fields in which recipes differ from BASE
    execution RECIPE ...           native or emulated on each kind of device, for sizes that native GEMMs support
    options GROUP                  the options of a class, as they are declared
    patches                        what mcore/patches.py binds again in Megatron-core
    megatron_flags                 the answer to each flag of Megatron-LM's releases
    transformer_engine             how each recipe runs in TransformerEngine, or why not

A RECIPE is a registered name or a YAML file. The page of a recipe is the one whose tables name it.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from megatron_lowprec.linear.backends.table import UNVERIFIED, choose, unverified
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.explain import describe_levels
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import KeepBf16, Phase, Recipe, Rule
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, QuantSpec
from megatron_lowprec.te.factory import own_flags, why_no_factory
from megatron_lowprec.te.translation import KINDS, builtin_kind, by_place_or_time, why_not
from megatron_lowprec.training.config.arguments import build_parser, choices_of_flags, flag
from megatron_lowprec.training.config.fp8_flags import FP8_FLAGS, fp8_reason
from megatron_lowprec.training.config.megatron_flags import Answer, answer, answers, megatron_flags
from megatron_lowprec.training.config.options import GROUPS, OPTIONS, Config, options_in
from megatron_lowprec.training.options.declaration import Part
from tools.tables.pages import Row, named_recipes, page_of

DEVICES = {
    "cpu": "CPU",
    "sm80": "Ampere, sm80",
    "sm89": "Ada, sm89",
    "sm90": "Hopper, sm90",
    "sm100": "Blackwell, sm100",
}
_CONTRACTED = {"fprop": "input features", "dgrad": "output features", "wgrad": "tokens"}
_WIDE = 4096  # a size that every native GEMM supports
_STATE = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "master": "main weight"}
_ABSENT = ("compute dtype", "", "", "")


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
    if unverified([backend.backend], arch):
        return "native, not run yet", ""
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
        shown = "" if default is None or default == [] else f"`{str(default).lower() if default is False else default}`"
        assert option.part is not None
        resume = "refused without --no-load-optim" if option.optimizer_state else option.part.value
        if not option.hidden:
            yield f"`{flag(name)}`", shown, option.meaning, resume


def _text(found: Answer) -> str:
    return f"`{found.text}`" if found.kind == "read as" else found.text


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    "recipes": _recipes,
    "operands": _operands,
    "state": _state,
    "differences": _differences,
    "execution": _execution,
    "options": _options,
    "patches": _patches,
    "megatron_flags": _megatron_flags,
    "transformer_engine": _transformer_engine,
}
