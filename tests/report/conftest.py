"""Reports: the driver in this process, for what it writes, and figures that are made and not rendered."""

import pytest

from megatron_lowprec.report import plot_style
from tests.training.conftest import drive

__all__ = ["drive"]


@pytest.fixture
def rendered() -> None:
    """For tests of a report whose figures must be such that they can be rendered."""


@pytest.fixture(autouse=True)
def without_rendering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures become no PNG, which takes most of a report's time, unless a test asks for ``rendered``."""
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(plot_style.Theme, "png", lambda theme, figure: b"\x89PNG")
