"""--flash-attention-version: which attention torch takes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import flash_attention
from megatron_lowprec.training.flash_attention import use_flash_attention
from tests.launch import torchrun


@pytest.fixture(autouse=True)
def torch_s_choice_afterwards() -> Iterator[None]:
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    restore = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if restore is not None:
        restore(_raise_warn=False)


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were given to torch's registry, and widths attended at, on a GPU that reports Hopper's capability."""
    names: list[str] = []
    monkeypatch.setattr(flash_attention, "_attend", lambda channels: names.append(f"{channels} channels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", names.append, raising=False)
    return names


@pytest.mark.parametrize(("version", "names"), [(2, []), (3, ["FA3"]), (4, ["FA4"])])
def test_torch_takes_the_version_before_cudnn(activated: list[str], version: int, names: list[str]) -> None:
    use_flash_attention(version, dropout=0.0, channels=128)
    assert activated == [*names, "128 channels"]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_dropout_is_refused_where_there_is_none(activated: list[str]) -> None:
    use_flash_attention(2, dropout=0.1, channels=64)
    with pytest.raises(UserError, match=r"set --attention-dropout 0, now 0\.1, or leave it out"):
        use_flash_attention(4, dropout=0.1, channels=64)
    assert activated == ["64 channels"]


def test_a_gpu_of_another_capability_is_named(activated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.raises(UserError, match=r"of compute capability 9\.x or 10\.x, this one has 12\.0"):
        use_flash_attention(4, dropout=0.0, channels=64)
    assert activated == []


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'flash_attn'"), ValueError("too many values to unpack"), AttributeError("x")]
)
def test_what_does_not_fit_is_named(activated: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """No package, or a release whose functions torch does not call in its way."""

    def fails(_: int) -> None:
        raise error

    monkeypatch.setattr(flash_attention, "_attend", fails)
    words = (
        f"the package flash-attn-4 .* for heads of 64 channels; a small attention failed with {type(error).__name__}: "
    )
    with pytest.raises(UserError, match=words + str(error)):
        use_flash_attention(4, dropout=0.0, channels=64)
    assert activated == ["FA4"]


def test_a_run_without_a_gpu_ends_in_one_line() -> None:
    flags = ["--config", "gpt_tiny", "--mock-data", "--no-save", "--train-iters", "1", "--flash-attention-version", "4"]
    done = torchrun(1, ["-m", "megatron_lowprec.training.driver", *flags], CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert "--flash-attention-version 4 needs a GPU, and this process has none: leave it out" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "package"), [(2, "torch"), (3, "flash_attn_interface"), (4, "flash_attn.cute")])
def test_on_a_gpu_it_is_attention(version: int, package: str) -> None:
    """Within 1% of fp32's; heads in groups, as rope leaves them, and no other kernel."""
    pytest.importorskip(package)
    use_flash_attention(version, dropout=0.0, channels=128)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (256, 2, 8, 128), (256, 2, 2, 128), (256, 2, 2, 128)
    inputs = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    dy = torch.randn(2, 8, 256, 128, generator=generator, device="cuda").bfloat16()

    def results(dtype: torch.dtype, backend: SDPBackend) -> list[torch.Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in inputs]
        q, k, v = (each.permute(1, 2, 0, 3) for each in leaves)
        with sdpa_kernel(backend):
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y.backward(dy.to(dtype))
        return [y, *(each.grad for each in leaves)]

    wanted = results(torch.float32, SDPBackend.MATH)
    for got, want in zip(results(torch.bfloat16, SDPBackend.FLASH_ATTENTION), wanted, strict=True):
        assert torch.linalg.vector_norm(got.float() - want) <= 0.01 * torch.linalg.vector_norm(want)
