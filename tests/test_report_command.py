"""``shardops report``: what it says, where it writes, and its exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from report_helpers import DATA

from shardops import report
from shardops.cli import report as command


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="shardops")
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["report", *map(str, arguments)]))


def lines(text: str) -> Sequence[str]:
    return text.strip().split("\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.json").write_text((DATA / "bench.json").read_text())
    (tmp_path / "other.json").write_text("[]")
    assert run(tmp_path, DATA / "bench.json", "--tolerance", "0.1") == 0
    said = lines(capsys.readouterr().out)
    assert said[0] == f"{tmp_path}: 26 figures from bench.json"
    assert said[1].startswith("skipped other.json: neither")
    assert said[-3].startswith("7 figures of shardops: 0 slower, 0 faster, 7 same")
    assert said[-2:] == [str(tmp_path / "report.html"), str(tmp_path / "report.md")]
    assert "more than 10 %" in (tmp_path / "report.md").read_text()


def test_the_command_writes_elsewhere(tmp_path: Path) -> None:
    assert run(DATA / "bench.json", "--out", tmp_path / "new/one") == 0
    assert sorted(path.name for path in (tmp_path / "new/one").iterdir()) == ["report.html", "report.md"]


@pytest.mark.parametrize("case", ["empty", "unknown", "absent", "other"])
def test_exit_code_2_without_a_readable_file(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if case == "unknown":
        (tmp_path / "a.json").write_text("[]")
    directory = tmp_path / "absent" if case == "absent" else DATA if case == "other" else tmp_path
    reason = {
        "empty": "no JSON file in it",
        "unknown": "skipped a.json: neither pytest-benchmark's",
        "absent": "does not exist",
        "other": "no JSON file in it",
    }[case]
    assert run(directory, *([tmp_path] if case == "other" else []), "--out", tmp_path / "out") == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(lines(error)) == 1
    assert error.startswith("shardops report: error: ")
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_without_jinja2_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "shardops.report.render")
    monkeypatch.delattr(report, "render")
    assert run(DATA / "bench.json", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert len(lines(error)) == 1
    assert "jinja2" in error
    assert "pip install jinja2 matplotlib" in error


def test_a_tolerance_is_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(DATA, "--tolerance", "5")
    assert exit_.value.code == 2
    assert "a share lies between 0 and 1" in capsys.readouterr().err
