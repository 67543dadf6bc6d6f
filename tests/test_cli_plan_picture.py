"""The picture of ``shardops plan --png``: what is drawn is what is planned, and its words can be read."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from shardops.cli import main


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    save = figure.Figure.savefig

    def savefig(self: Any, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return saved


def test_the_picture(figures: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    arguments = ["7.5B", "--world-size", "64", "--master", "fp32", "--zero", "2", "--device-memory", "24GB"]
    assert main(["plan", *arguments, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    tops = [max(bar.get_y() + bar.get_height() for bar in stage) for stage in zip(*axes.containers, strict=True)]
    assert tops == pytest.approx([120.0, 31.40625, 16.640625, 1.875])
    (limit,) = (line for line in axes.lines if len(line.get_xdata()) == 2)
    assert list(limit.get_ydata()) == [24.0, 24.0]
    assert [text.get_text().splitlines()[-1] for text in axes.texts] == [
        "96.0 GB too much",
        "7.4 GB too much",
        "fits",
        "fits",
    ]
    ticks = axes.get_xticklabels()
    assert [tick.get_fontweight() == "bold" for tick in ticks] == [False, False, True, False]
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["device: 24.0 GB\n(22.4 GiB)", "exp_avg_sq", "exp_avg", "master", "gradients", "parameters"]


def test_the_picture_has_no_overlapping_words(figures: list[Any], tmp_path: Path) -> None:
    main(["plan", "7.5B", "--world-size", "64", "--device-memory", "80GB", "--png", str(tmp_path / "plan.png")])
    (axes,) = figures[0].axes
    for texts in (axes.get_xticklabels(), axes.texts):
        boxes = [text.get_window_extent() for text in texts]
        assert len(boxes) == 4
        assert not any(left.overlaps(right) for left, right in itertools.pairwise(boxes))


def test_stages_that_do_not_go_with_the_options(figures: list[Any], tmp_path: Path) -> None:
    arguments = ["20M", "--world-size", "2", "--zero", "3", "--gradient-release", "--png", str(tmp_path / "plan.svg")]
    assert main(["plan", *arguments]) == 0
    (axes,) = figures[0].axes
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["not with\nthese options"] * 3
    assert " MB" in texts[3]
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert main(["plan", "13B", "--png", "never.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
