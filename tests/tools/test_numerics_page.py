"""The page of experiments and telemetry: its numbers are the files', and a browser draws every figure."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_lowprec.commands import lab as numerics
from tests.report.synthetic import operand_row as row
from tests.report.synthetic import write_snapshots

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
# Writes what a reader would see into the page's title, which --dump-dom prints.
LOOK = """<script>
const faults = [];
addEventListener("error", event => faults.push(event.message || event.target.alt), true);
addEventListener("load", () => {
  for (const image of document.images) if (!image.complete || !image.naturalWidth) faults.push(image.alt);
  for (const link of document.links)
    if (!document.getElementById(decodeURIComponent(link.hash.slice(1)))) faults.push(link.href);
  const tables = document.querySelectorAll("table").length;
  document.title = `${document.images.length} figures, ${tables} tables, faults: ${faults}`;
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two experiments and one run."""
    folder = tmp_path_factory.mktemp("numerics")
    for experiment in ("formats", "clipping"):
        assert numerics.main([experiment, "--quick", "--out", str(folder)]) == 0
    rows = [row(i, f"layers.{n}.a", 10.0 + n, gemm="wgrad", operand="input") for i in (10, 20) for n in (1, 2, 3)]
    rows += [row(i, "layers.1.a", 7.25, "wgrad", "output", gradient_to_noise=1.5) for i in (10, 20)]
    rows += [row(20, f"layers.{n}.a", 31.5, "wgrad", "input", recipe="mxfp8<&") for n in (1, 2)]
    run = write_snapshots(folder / "run<1>", rows)
    assert numerics.main(["report", str(run), "--out", str(folder)]) == 0
    return folder / "report.html"


def test_the_page_has_the_files_numbers_and_needs_no_other_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]+)"', text) == ["clipping", "formats", "run-run&lt;1&gt;"]
    assert re.search(r"mxfp8&lt;&amp;</td><td>31\.5</td><td>-</td>", text)
    assert re.search(r"the run&#39;s</td><td>12\.0</td><td>7\.2</td>", text)  # medians over layers
    captions = re.findall(r"<figcaption>([^<]+)</figcaption>", text)
    assert "operands: signal-to-noise ratio, dB" in captions
    assert "GEMM outputs: gradient-to-noise ratio of the weight gradient" in captions
    assert not any("largest value" in caption for caption in captions), "nothing saturated: no empty heat map"
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', text) == []


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_draws_every_figure(page: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    text = page.read_text(encoding="utf-8")
    watched = tmp_path / "page.html"
    watched.write_text(text.replace("<head>", "<head>" + LOOK), encoding="utf-8")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    options = [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--enable-logging=stderr"]
    seen = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", *quiet, *options, "--dump-dom", watched.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    figures, tables = text.count("<img "), text.count("<table>")
    assert figures >= 5
    assert f"<title>{figures} figures, {tables} tables, faults: </title>" in seen.stdout
    assert "CONSOLE" not in seen.stderr


@pytest.mark.parametrize(
    ("files", "arguments", "words"),
    [
        ({}, [], "holds no experiments"),
        ({"other.json": "{}"}, [], "other.json was not written by"),
        ({}, ["run"], "has no rows of quantization.jsonl"),
        ({}, ["--recipes", "mxfp8"], "--recipes was given"),
    ],
)
def test_reports_that_cannot_be_drawn_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], arguments: list[str], words: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    given = [str(tmp_path / word) if word == "run" else word for word in arguments]
    assert numerics.main(["report", *given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
