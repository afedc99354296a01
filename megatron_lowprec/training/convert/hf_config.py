"""Converts a GPT's options to the config.json of a Hugging Face model, and back. Pure data.

Each architecture of ``training/models/`` has such a model or none. Mixtures of them are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import checked_options
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.architectures import ARCHITECTURES, architecture_of
from megatron_lowprec.training.models.common.hf_options import absent, completed
from megatron_lowprec.training.models.common.interface import HFConfig, HuggingFace

_FORMS: dict[str, HuggingFace] = {
    form.config.MODEL_TYPE: form
    for form in (architecture.hugging_face for architecture in reversed(ARCHITECTURES))
    if form is not None
}
_READ: dict[str, HuggingFace] = _FORMS | {
    form.config.MODEL_TYPE: form for architecture in ARCHITECTURES for form in architecture.also_read
}


def hf_form(config: Config) -> HuggingFace:
    """The Hugging Face form of the architecture that the options select.

    Raises:
        UserError: there is none; names the differences from the nearest.
    """
    differing = {kind: form.config.differing(config) for kind, form in _FORMS.items()}
    selected = architecture_of(config).hugging_face
    kind = min(differing, key=lambda name: (len(differing[name]), _FORMS[name] is not selected))
    if differing[kind]:
        titles = " nor ".join(f"a {form.config.TITLE}" for form in _FORMS.values())
        raise UserError(
            f"this model is neither {titles} to Hugging Face: {', '.join(differing[kind])} is not {kind}'s; only those "
            f"{len(_FORMS)} can be written"
        )
    return _FORMS[kind]


def to_hf_config(config: Config, vocab_size: int, eod: int | None, dtype: str) -> dict[str, Any]:
    """config.json; ``vocab_size`` without padding."""
    return hf_form(config).config.to_config(config) | {
        "vocab_size": vocab_size,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def from_hf_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes. Missing keys have transformers' defaults.

    Raises:
        UserError: an architecture without a Hugging Face form, a quantized model, or a variant that Megatron's layers
            do not support.
    """
    form = _form_of(hf)
    for name in ("quantization_config", "compression_config"):
        if hf.get(name):
            method = hf[name].get("quant_method") if isinstance(hf[name], Mapping) else hf[name]
            raise UserError(
                f"config.json has {name} ({method}): its tensors are codes of a quantization, which are not read; "
                "save the model dequantized, in bf16, without that entry"
            )
    given = {form.ALIASES.get(name, name): value for name, value in hf.items()}
    for name, allowed in form.VARIANTS.items():
        if given.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"config.json has {name} {given[name]!r}, which these layers do not have: it must be {allowed[0]!r}"
            )
    options = {name: value for name, value in form.OPTIONS.items() if value is not None} | form.from_config(hf)
    return checked_options("config.json", options)


def vocabulary_of(hf: Mapping[str, Any]) -> int:
    """Rows of the embedding."""
    form = _form_of(hf)
    rows: int = completed(hf, form.DEFAULTS, form.ALIASES)["vocab_size"]
    return rows


def defaults_taken(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that config.json lacks, with transformers' defaults."""
    form = _form_of(hf)
    return absent(hf, form.DEFAULTS, form.ALIASES)


def _form_of(hf: Mapping[str, Any]) -> HFConfig:
    kind = str(hf.get("model_type"))
    if kind not in _READ:
        raise UserError(f"config.json is of a {kind!r} model; {' and '.join(_READ)} can be read")
    return _READ[kind].config
