"""What the GPU session says of targets, of the op library's build, and of what compute-sanitizer printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from gpu import bandwidth, build, many, sanitizer, verdict
from gpu.verdict import PATH, TORCH_PATH

# ---- the build -------------------------------------------------------------------------------------------------------


def tree(root: Path, setup: str = "") -> Callable[[str, float], None]:
    def touch(name: str, age: float) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(setup)
        os.utime(path, (1e9 - age, 1e9 - age))

    for name in ("csrc/cuda/kernel.cu", "csrc/ops.cpp", "setup.py"):
        touch(name, 20)
    return touch


def test_when_the_library_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDOPS_LIBRARY", raising=False)
    touch = tree(tmp_path)
    assert build.why_build(tmp_path) == "there was none"
    touch("shardops/_ops.so", 10)
    assert build.why_build(tmp_path) is None
    assert build.build(1.0, tmp_path)["status"] == "skipped"
    touch("csrc/cuda/kernel.cu", 5)
    assert build.why_build(tmp_path) == "csrc/cuda/kernel.cu was newer"
    touch("csrc/cuda/kernel.cu", 20)
    touch("setup.py", 5)
    assert build.why_build(tmp_path) == "setup.py was newer"
    monkeypatch.setenv("SHARDOPS_LIBRARY", "elsewhere.so")
    assert "elsewhere.so" in build.build(1.0, tmp_path)["reason"]


@pytest.mark.parametrize(
    ("setup", "status", "words"),
    [
        ("pass", "ok", "built since there was none"),
        ("raise SystemExit('no compiler')", "failed", "no compiler"),
        ("import time; time.sleep(60)", "failed", "no end after"),
    ],
)
def test_a_build_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, status: str, words: str
) -> None:
    monkeypatch.delenv("SHARDOPS_LIBRARY", raising=False)
    tree(tmp_path, setup)
    found = build.build(0.5 if "sleep" in setup else 20.0, tmp_path)
    assert found["status"] == status
    assert words in found["reason"]
    assert found["seconds"] < 15


# ---- the verdict -----------------------------------------------------------------------------------------------------


def measurement(case: str, elements: float, ratios: dict[str, float], against: str = "", host: float = 1.0) -> Any:
    row = {"kind": "ours", "error": None, "host_median_s": host}
    rest = {"tensors": 1, "against": [against], "contenders": {"cpp": row}, "ratios": {"cpp": ratios}}
    return {"case": case, "elements": elements, **rest}


def judged(name: str, *found: Any, part: str = "bandwidth", peaks: Any = (), **options: Any) -> dict[str, Any]:
    unit = {"measurements": list(found), "info": {"peak": list(peaks)}}
    data = {"options": options, "excluded": {}, "parts": {part: {"units": [unit], "absent": {"triton": "no triton"}}}}
    rows = [row for row in verdict.judge(data) if row["name"].startswith(name)]
    assert [row["backend"] for row in rows[:2]] == ["cpp", "triton"]
    assert rows[1]["outcome"] == "not measured"
    assert rows[1]["reason"] == ("no triton" if not options else "a dry run measures nothing")
    return rows[0]


@pytest.mark.parametrize(("worst", "outcome"), [(0.919, "missed"), (0.921, "reached")])
def test_verdict_on_bandwidth(worst: float, outcome: str) -> None:
    small = measurement("cast_gather", 1e7, {"device copy": 0.1})  # not counted
    whole = measurement(PATH, 1e9, {"device copy": 0.1})  # no primitive
    large = [measurement("grad_norm", 1e8, {"device copy": value}) for value in (0.99, worst, 0.95)]
    row = judged("share of a device copy", small, whole, *large)
    assert (row["value"], row["outcome"]) == (worst, outcome)
    assert row["where"].startswith("grad_norm")
    assert judged("share of a device copy", small, whole)["outcome"] == "not measured"
    assert judged("share of a device copy", *large, dry_run=True)["outcome"] == "not measured"


@pytest.mark.parametrize(("value", "outcome"), [(0.94, "missed"), (0.96, "reached")])
@pytest.mark.parametrize("stock", verdict.STOCK)
def test_verdict_beside_stock(stock: str, value: float, outcome: str) -> None:
    large = measurement("any", 1e9, {stock: 2.0}, stock)
    found = [measurement("any", 1e3, {stock: value}, stock), measurement("bf16", 1e9, {stock: 0.1}, "another")]
    row = judged(f"speed over {stock},", large, *found)
    assert (row["value"], row["outcome"]) == (value, outcome)


def test_the_verdict_speaks_of_what_is_measured() -> None:
    """It imports no torch, so that names are there twice."""
    assert (bandwidth.PATH, bandwidth.TORCH_PATH) == (PATH, TORCH_PATH)
    assert many.CASE.format(count=many.DECODER) == verdict.STEP_CASE


def test_verdict_on_the_rest() -> None:
    fp32 = [measurement("sharded_adam, fp32", size, {"torch fused": r}) for size, r in ((1e3, 0.5), (1e8, 1.01))]
    assert judged("fp32 step", *fp32)["outcome"] == "reached"
    assert judged("fp32 step", measurement("sharded_adam, fp32", 1e9, {"torch fused": 0.99}))["outcome"] == "missed"
    for ratio, outcome in ((1.59, "missed"), (1.61, "reached")):
        assert judged("clip + step", measurement(PATH, 1e9, {TORCH_PATH: ratio}))["outcome"] == outcome
    for seconds, outcome in ((99e-6, "reached"), (101e-6, "missed")):
        found = measurement("step of 291 tensors", 5e8, {}, host=seconds)
        other = measurement("step of 5000 tensors", 5e8, {}, host=1.0)
        row = judged("host time of a step of 291", found, other, part="many")
        assert row["value"] == pytest.approx(seconds * 1e6)
        assert row["outcome"] == outcome
    for peak, outcome in ((1_005, "reached"), (1_020, "missed")):
        rows = [{"backend": "cpp", "case": "fp32", "elements": 10, "resident": 1_000, "peak": p} for p in (1_000, peak)]
        assert judged("peak memory", peaks=rows)["outcome"] == outcome


# ---- the sanitizer's words -------------------------------------------------------------------------------------------


def test_what_the_sanitizer_says() -> None:
    clean = "========= COMPUTE-SANITIZER\nsanitized calls: 12\n========= ERROR SUMMARY: 0 errors"
    assert sanitizer.errors_in(clean) == (0, [])
    races = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert sanitizer.errors_in(races)[0] == 3
    bad = (
        "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
        "=========     at update_kernel+0x90\n========= ERROR SUMMARY: 2 errors"
    )
    assert sanitizer.errors_in(bad) == (2, ["Invalid __global__ read of size 4 bytes", "at update_kernel+0x90"])
    assert sanitizer.errors_in("Device not supported")[0] is None
