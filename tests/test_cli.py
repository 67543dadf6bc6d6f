"""The command ``shardops`` itself: its subcommands, usage errors, tables, and a reader that goes away.

What each subcommand does is tested in files of their own.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardops
from shardops import cli
from shardops.cli import _show, main

ROOT = Path(__file__).resolve().parents[1]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("plan", "doctor", "bench", "report"):
        assert f"\n    {name} " in text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: shardops {command} ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"shardops {shardops.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["planner"], ["plan", "13B", "--zero", "4"], ["doctor", "--yaml"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "error: " in streams.err


def test_the_installed_command_is_this_one() -> None:
    (line,) = re.findall(r'^shardops = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    module, name = line.split(":")
    assert getattr(importlib.import_module(module), name) is main


def test_a_reader_that_goes_away() -> None:
    """As `shardops plan ... | head -1` does: no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "shardops", "plan", "13B", "--json"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # noticed at the end
    with os.fdopen(write, "wb") as gone:
        done = subprocess.run(
            command, stdout=gone, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


# ---- tables ----------------------------------------------------------------------------------------------------------


def show_table(capsys: pytest.CaptureFixture[str]) -> str:
    rows = [["a", "1,000", "[rows, blocks, 2]"], ["sum", "20", ""]]
    _show.table("A title", ["name", "bytes", "text"], rows, numbers=(1,), is_last_total=True)
    _show.say("a line of [text]")
    return capsys.readouterr().out


def test_plain_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert show_table(capsys) == (
        "\n"
        "A title\n"
        "name  bytes  text\n"
        "------------------------------\n"
        "a     1,000  [rows, blocks, 2]\n"
        "------------------------------\n"
        "sum      20\n"
        "a line of [text]\n"
    )


def test_rich_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    text = show_table(capsys)
    assert "│ a    │ 1,000 │ [rows, blocks, 2] │" in text  # texts are no markup
    assert "│ sum  │    20 │                   │" in text
    assert "├──────┼───────┼───────────────────┤\n│ sum" in text
    assert text.endswith("a line of [text]\n")


def test_json_stays_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    _show.print_json({"b": 1, "a": None})
    assert capsys.readouterr().out == '{\n  "b": 1,\n  "a": null\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        _show.print_json({"a": float("nan")})
