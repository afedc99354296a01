"""Converted models under Hugging Face's Trainer and under accelerate: weights of a plain loop."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_lowprec import convert
from megatron_lowprec.finetuning import quantize_frozen_weights
from megatron_lowprec.linear.convert import plain_state_dict
from tests.environment import PLACE_IN_LAUNCH
from tests.linear.test_convert_transformers import VOCABULARY, build

accelerate = pytest.importorskip("accelerate", reason="the extra peft, which brings accelerate, is not installed")
transformers = pytest.importorskip("transformers")

STEPS, LR = 4, 1e-3
# equal sequences: the order in which a trainer draws them has no effect
SEQUENCE = torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": SEQUENCE.expand(2, -1), "labels": SEQUENCE.expand(2, -1)}
recipes = pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])


@pytest.fixture(autouse=True)
def _own_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an ``Accelerator`` is the process's; other tests leave a launcher's variables, which it reads."""
    for name in PLACE_IN_LAUNCH:
        monkeypatch.delenv(name, raising=False)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model_of(recipe: str) -> Any:
    return convert(build("llama"), recipe).train()


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    """Hugging Face's Trainer of ``STEPS`` steps of AdamW, without clipping and decay."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=0.0,
        save_steps=STEPS,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    data = [{key: value[0] for key, value in BATCH.items()}] * 2 * STEPS
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2])


def loop(recipe: str, context: AbstractContextManager[Any]) -> dict[str, torch.Tensor]:
    """The state dict after a plain loop: with amax histories and counts of passes."""
    model = model_of(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(STEPS):
        with context:
            loss = model(**BATCH).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


@recipes
def test_trainer_ends_with_the_weights_of_a_plain_loop(recipe: str, tmp_path: Path) -> None:
    """Bit for bit, state of the recipe included, with evaluations between the steps; its checkpoint loads."""
    model = model_of(recipe)
    trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=1).train()
    want = loop(recipe, nullcontext())
    assert_equal(model.state_dict(), want)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert_equal(saved.state_dict(), {key: want[key] for key in plain_state_dict(model)})


def test_trainer_trains_adapters_over_codes(tmp_path: Path) -> None:
    """The adapters of a base model in bf16, bit for bit; the checkpoint has only them."""
    peft = pytest.importorskip("peft", reason="the extra peft is not installed")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = []
    for codes in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(convert(build("llama").bfloat16(), "fp8_current"), config)
        folder = tmp_path / str(codes)
        trainer_of(quantize_frozen_weights(model) if codes else model, folder).train()
        found.append(load_file(folder / f"checkpoint-{STEPS}" / "adapter_model.safetensors"))
    assert len(found[0]) == 2 * 2 * 2
    assert_equal(*found)


@recipes
def test_accelerate_ends_with_the_weights_of_a_plain_loop(recipe: str) -> None:
    """Bit for bit, under mixed precision of bf16."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = model_of(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    data = torch.utils.data.DataLoader([{key: value[0] for key, value in BATCH.items()}] * 2 * STEPS, batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        loss = model(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    got = accelerator.get_state_dict(model)
    assert_equal(got, loop(recipe, torch.autocast("cpu", torch.bfloat16)))
