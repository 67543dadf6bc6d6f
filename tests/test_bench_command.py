"""``shardops bench``: run once for one suite, at tiny sizes; what it makes of failures, with suites made for that."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardops.cli import bench
from shardops.report import reading


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--only", "cast_gather", "--scale", "tiny", "--device", "cpu", "--passes", "2", "--out", str(tmp_path))
    (tmp_path / "cast_gather.pass3.json").write_text("{}")  # of an earlier run of more passes
    (tmp_path / "flatten_shard.pass2.json").write_text("{}")  # of a suite that does not run now
    assert bench.run(options(*arguments)) == 0
    names = [f"cast_gather{number}{end}" for number in ("", ".pass2") for end in (".json", ".log")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "flatten_shard.pass2.json"])
    (tmp_path / "flatten_shard.pass2.json").unlink()
    second = json.loads((tmp_path / "cast_gather.pass2.json").read_text())
    assert second["machine_info"]["shardops"]["pass"] == 2
    data = json.loads((tmp_path / "cast_gather.json").read_text())
    records = [record for each in data["benchmarks"] for record in each["extra_info"]["measurements"]]
    assert {record["primitive"] for record in records} == {"cast_gather"}
    assert {record["tensors"] for record in records} == {1, 291}
    found = reading.read(tmp_path)  # as the report reads it
    assert (found.skipped, found.notes, len(found.measurements)) == ({}, [], len(records))
    assert {len(m.passes) for m in found.measurements} == {2}
    assert data["machine_info"]["node"] == ""
    machine = data["machine_info"]["shardops"]
    assert {"machine", "cpu", "threads", "gpus", "versions", "revision", "date", "missing"} <= set(machine)
    assert {"python", "torch", "triton", "numpy", "compiler"} <= set(machine["versions"])
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["scale"] == "tiny"
    printed = capsys.readouterr().out
    assert "cast_gather 6/6" in printed
    assert "cast_gather.json" in printed


GOOD = "def test_good(benchmark):\n    benchmark.extra_info['measurements'] = [1]\n    benchmark(len, 'x')\n"
BAD = "def test_bad(benchmark):\n    raise ValueError('spoilt')\n"


def made_up(folder: Path, source: str) -> Path:
    """A checkout whose suite ``grad_norm`` is this."""
    benchmarks = folder / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "_suite.py").touch()
    (benchmarks / "bench_grad_norm.py").write_text(source)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\npython_files = ["bench_*.py"]\n')
    (benchmarks / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    for name in ('--scale', '--device', '--pass'):\n"
        "        parser.addoption(name)\n"
    )
    return benchmarks


def test_a_failed_test_is_told_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_up(tmp_path, GOOD + BAD)
    monkeypatch.setattr(bench, "benchmarks_folder", lambda: folder)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 2")  # whatever the shell has: nothing is measured side by side
    out = tmp_path / "out"
    assert bench.run(options("--only", "grad_norm", "--out", str(out))) == 1
    data = json.loads((out / "grad_norm.json").read_text())
    assert [each["name"] for each in data["benchmarks"]] == ["test_good"]
    said = capsys.readouterr()
    assert "grad_norm failed" in said.err
    assert "spoilt" in said.err
    assert "grad_norm 1/2" in said.out
    assert "grad_norm 2/2" in said.out


def test_a_suite_that_measures_nothing_leaves_no_file(tmp_path: Path) -> None:
    """Not even an older one, which would pass for this run's."""
    folder = made_up(tmp_path, "import no_such_module\n")
    (tmp_path / "grad_norm.json").write_text("{}")
    told: list[Any] = []
    code = bench.run_suite(folder, "grad_norm", tmp_path, [], lambda *args: told.append(args))
    assert code != 0
    assert told == []
    assert not list(tmp_path.glob("*.json*"))
    (folder / "bench_grad_norm.py").write_text("import pytest\ndef test_x():\n    pytest.skip('no')\n")
    assert bench.run_suite(folder, "grad_norm", tmp_path, [], lambda *args: told.append(args)) == 1
    assert told == [(1, 1, "test_x")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_suite_too(tmp_path: Path, number: int, code: int) -> None:
    """Sent to the command alone, as a scheduler does it: nothing may go on measuring on cores that others take."""
    pid = tmp_path / "pid"
    folder = made_up(
        tmp_path,
        "import os, pathlib, time\n"
        "def test_long():\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(120)\n",
    )
    script = (
        "import pathlib, sys; from shardops import cli; from shardops.cli import bench; "
        f"bench.benchmarks_folder = lambda: pathlib.Path({str(folder)!r}); sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = ["bench", "--only", "grad_norm", "--out", str(tmp_path / "out")]
    command = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (pid.is_file() and pid.read_text()):
            assert time.monotonic() < deadline
            assert command.poll() is None, command.communicate()[1]
            time.sleep(0.05)
        command.send_signal(number)
        _, said = command.communicate(timeout=30)
    finally:
        command.kill()
    assert command.returncode == code, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["grad_norm.log"]


def test_nothing_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--only", "everything"), ("--passes", "0")):
        with pytest.raises(SystemExit):
            options(*arguments)
    capsys.readouterr()
    monkeypatch.setattr(bench, "run_suite", lambda *arguments: 0)  # should it come to that, nothing is measured
    (tmp_path / "file").touch()
    assert bench.run(options("--out", str(tmp_path / "file"))) == 2
    assert "cannot be a folder" in capsys.readouterr().err
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.run(options("--out", str(tmp_path / "out"))) == 2
    assert "pip install pytest pytest-benchmark" in capsys.readouterr().err
    monkeypatch.setattr(bench, "benchmarks_folder", lambda: tmp_path)
    assert bench.run(options("--out", str(tmp_path / "out"))) == 2
    said = capsys.readouterr().err
    assert "holds no benchmarks" in said
    assert "clone the repository" in said
    assert not (tmp_path / "out").exists()


def test_every_suite_is_there() -> None:
    assert {path.stem for path in bench.benchmarks_folder().glob("bench_*.py")} >= {f"bench_{n}" for n in bench.SUITES}
