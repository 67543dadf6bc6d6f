"""The training benchmark of precisions at a tiny size: runs are made once each, and differences are paired by seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks" / "quality"))

import report
import train_modes

SIZES = "--dim 128 --layers 1 --heads 2 --hidden 160 --steps 60 --batch 2 --sequence 16 --compute fp32"
SIZES += " --evaluate-every 30 --windows 32 --last-windows 64"


def test_runs_are_made_once_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "runs.jsonl"
    modes = list(train_modes.MODES)

    def make_runs(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train_modes.py", "--out", str(out), *SIZES.split(), *more])
        train_modes.main()

    make_runs("--seeds", "0", "--modes", *modes[:2])
    lines = out.read_text().splitlines()
    assert len(lines) == 2
    make_runs("--seeds", "0")
    assert out.read_text().splitlines()[:2] == lines  # neither is made again
    records = {record["mode"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert list(records) == modes

    state_bytes = {mode: record["state_bytes_per_parameter"] for mode, record in records.items()}
    assert state_bytes["fp32"] == pytest.approx(10.0, abs=0.01)
    assert state_bytes["int8+split32"] - state_bytes["int8+split24"] == pytest.approx(1.0, abs=0.01)
    assert state_bytes["int8+split24"] < 3.2
    assert state_bytes["bf16+stochastic"] == pytest.approx(4.0, abs=0.01)
    curves = {mode: [loss for _, loss in record["held_out_curve"]] for mode, record in records.items()}
    assert len({tuple(curve) for curve in curves.values()}) == len(modes)  # no mode is another under its name
    for mode, curve in curves.items():
        assert len(curve) == 2, mode
        assert curve[-1] == pytest.approx(curves["fp32"][-1], rel=0.02), mode
        assert curve[-1] < 4.0, mode  # 5.5 at first

    with pytest.raises(SystemExit):  # another learning rate does not belong in the file
        make_runs("--seeds", "1", "--modes", "fp32", "--lr", "0.5")
    assert len(out.read_text().splitlines()) == len(modes)
    with train_modes.claimed(out, "fp32", 1) as first, train_modes.claimed(out, "fp32", 1) as second:
        assert (first, second) == (True, False)

    runs = report.load(out)
    report.plot_losses(runs, tmp_path / "losses.png")
    report.plot_differences(runs, tmp_path / "differences.png")
    assert "| int8+split24 |" in report.table(runs)


def runs_of(losses: dict[str, list[float]]) -> report.Runs:
    def record(loss: float) -> dict[str, Any]:
        return {"held_out_loss": loss, "state_bytes_per_parameter": 1.0}

    return {mode: {seed: record(loss) for seed, loss in enumerate(values)} for mode, values in losses.items()}


def test_differences_are_paired_by_seed() -> None:
    summary = report.summarise(runs_of({"fp32": [1.0, 2.0, 3.0], "int8": [1.01, 2.02, 3.03], "new": [0.5]}))
    found = summary["int8"]["difference"]
    assert list(found["by_seed"].values()) == pytest.approx([0.01, 0.02, 0.03])
    assert found["mean"] == pytest.approx(0.02)
    assert found["standard_error"] == pytest.approx(0.01 / 3**0.5)
    assert found["percent"] == pytest.approx(1.0)
    assert "beyond" in found["verdict"]
    assert summary["new"]["difference"]["percent"] == pytest.approx(-50.0)  # to the first seed, the one that it has
    assert "difference" not in summary["fp32"]


def test_a_difference_inside_its_spread_is_said_to_be() -> None:
    summary = report.summarise(runs_of({"fp32": [1.0, 1.0, 1.0], "int8": [1.02, 0.99, 1.0]}))
    assert "within" in summary["int8"]["difference"]["verdict"]
