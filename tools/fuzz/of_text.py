"""Readers of files that people write."""

from __future__ import annotations

import lzma
import os
import subprocess
from functools import partial
from pathlib import Path

import yaml

from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.shipped import SHIPPED
from tools.fuzz.run import FuzzedReader, copy, write

_SWEEP = """\
summary: one line
options: {eval-iters: 0, train-iters: 4}
models: [gpt_tiny]
recipes: [bf16, {label: mine, recipe: mxfp4, recipe_override: [dgrad.hadamard.block=64]}]
overrides: {low: {lr: 1.0e-3}}
seeds: [1234]
resources: {gpus_per_job: 1, jobs_at_once: 2}
slurm: {time: "04:00:00", comment: two words}
sizes: {small: {seeds: [1]}}
"""
_PRECISION = """\
configs:
  plain: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  mxfp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}
matchers:
  one: {config: plain, type: glob, pattern: "*.linear_qkv", enabled: true}
  two: {config: mxfp8, type: glob, pattern: "*fc1*", enabled: true}
"""


def of_text() -> list[FuzzedReader]:
    def config() -> None:
        from megatron_lowprec.recipe.parsing import load_recipe
        from megatron_lowprec.training.config.arguments import parse
        from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run

        parsed, given, _ = parse(["--config", "f.yaml"])
        resolved = resolve_model(parsed)
        resolved, _ = resolve_recipe(resolved, load_recipe(resolved.recipe, resolved.recipe_override), given)
        resolve_run(resolved, 1, gpus=False)

    def recipe() -> None:
        from megatron_lowprec.kernels.dispatch import arch_here
        from megatron_lowprec.recipe.explain import explain
        from megatron_lowprec.recipe.parsing import load_recipe
        from megatron_lowprec.training.config.arguments import parse
        from megatron_lowprec.training.config.resolve import resolve_model
        from megatron_lowprec.training.models.sizes import linear_sites

        model = resolve_model(parse(["--config", str(SHIPPED / "configs/models/gpt_tiny.yaml")])[0])
        print(explain(load_recipe("f.yaml", []), linear_sites(model), model.num_layers or 1, arch_here(), []))

    def sweep() -> None:
        from megatron_lowprec.sweep import slurm, spec
        from megatron_lowprec.sweep.jobs import expand

        for size in spec.size_names("f.yaml"):
            found = spec.read("f.yaml", size)
            jobs = expand(found, {}, 1)
            text = slurm.script(found, jobs, jobs, Path("out"), Path.cwd(), ["sweep.py"])
            if any("touch it_ran" in line.partition("#")[0] and "'" not in line for line in text.splitlines()):
                os.mkdir("it_ran")
            if subprocess.run(["bash", "-n"], input=text.encode("utf-8", "surrogateescape")).returncode:
                raise AssertionError("no bash script")

    def make_claims() -> None:
        content = read_yaml_file(SHIPPED / "configs/claims.yaml", "claims", "")
        write({"f.yaml": yaml.safe_dump({**content, "claims": content["claims"][:2]})})

    def claims() -> None:
        from megatron_lowprec.report.claims import load_claims

        load_claims(Path("f.yaml"))

    def overrides() -> None:
        from megatron_lowprec.recipe.parsing import load_recipe

        load_recipe("mxfp4_rht_sr", Path("f.txt").read_text(encoding="utf-8", errors="surrogateescape").splitlines())

    def precision() -> None:
        from megatron_lowprec.recipe.parsing import load_recipe
        from megatron_lowprec.training.config.fp8_flags import translate_fp8_flags

        load_recipe("fp8_current", translate_fp8_flags({"te_precision_config_file": "f.yaml"}, "fp8_current"))

    def published() -> None:
        from megatron_lowprec.report.published.ladder import read_ladder

        read_ladder(Path("f.csv"))

    def wikitext() -> None:
        from megatron_lowprec.training.data.wikitext import read

        read("f.txt.xz")

    shipped = {
        "model config": ("configs/models/gpt_345m.yaml", config),
        "recipe": ("configs/recipes", recipe),
    }
    found = []
    for name, (source, read) in shipped.items():
        path = SHIPPED / source
        path = min(path.glob("*.yaml")) if path.is_dir() else path
        found.append(FuzzedReader(name, ("f.yaml",), partial(copy, path, "f.yaml"), read))
    table = (SHIPPED / "data/quartet2-runs.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "\n = Title = \n\n Some words , and ( more ) @-@ words . \n = = Part = = \n\n Others . \n" * 5
    return [
        *found,
        FuzzedReader("claims", ("f.yaml",), make_claims, claims),
        FuzzedReader("sweep", ("f.yaml",), partial(write, {"f.yaml": _SWEEP}), sweep),
        FuzzedReader(
            "recipe overrides",
            ("f.txt",),
            partial(write, {"f.txt": "dgrad.hadamard.block=128\nfprop=null\n"}),
            overrides,
        ),
        FuzzedReader("precision by module", ("f.yaml",), partial(write, {"f.yaml": _PRECISION}), precision),
        FuzzedReader("published results", ("f.csv",), partial(write, {"f.csv": "".join(table[:30])}), published),
        FuzzedReader("wikitext", ("f.txt.xz",), partial(write, {"f.txt.xz": lzma.compress(text.encode())}), wikitext),
    ]
