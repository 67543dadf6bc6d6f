"""The GPU session in a dry run: all of it runs, its record is whole, and neither errors nor time stop it.

The command itself is run once; what becomes of units that raise, die, hang or are slow is tried with parts made for it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import gpu_session
from gpu import report, runner, sanitizer, verdict
from gpu.bandwidth import DRY_SIZES, PATH
from gpu.contenders import COPIES, FORMATS
from gpu.record import JSON_NAME, REPORT_NAME, Record
from gpu.runner import Part

BENCHMARKS = Path(gpu_session.__file__).resolve().parent
PARTS = ["start", "bits", "sanitizer", "bandwidth", "many", "graphs", "sweep"]


def strict_json(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def all_units(data: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [unit for name in names or data["parts"] for unit in data["parts"][name]["units"]]


def measured(data: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [measurement for unit in all_units(data, *names) for measurement in unit["measurements"]]


# ---- the command -----------------------------------------------------------------------------------------------------


def check_parts(data: dict[str, Any]) -> None:
    assert list(data["parts"]) == PARTS
    assert data["finished"]
    for name, part in data["parts"].items():
        assert part["status"] in ("ok", "skipped"), (name, part["reason"])
        assert set(part) == {"status", "reason", "seconds", "allotted", "processes", "absent", "units"}
        assert 0 < part["seconds"] <= part["allotted"]
        assert part["units"], name
        for unit in part["units"]:
            assert set(unit) == {"name", "status", "reason", "seconds", "info", "checks", "measurements"}
            assert unit["status"] == "ok" or unit["reason"], unit["name"]
            for check in unit["checks"]:
                assert check["status"] != "skipped" or check["reason"]
    checks = [check for unit in all_units(data, "bits") for check in unit["checks"]]
    assert {check["status"] for check in checks} == {"ok"}
    assert len(checks) > 300
    assert sum(check["count"] for check in checks) > 5_000_000
    names = " ".join(unit["name"] for unit in all_units(data, "bits"))
    for word in ("stochastic", "split24", "int8", "float16-nearest", "per_param", "grad_norm inf", "patterns", "long"):
        assert word in names
    # Everything of these ran, by means that stand in for a GPU's.
    graphs = [check for unit in all_units(data, "graphs") for check in unit["checks"]]
    assert {check["status"] for check in graphs} == {"skipped"}
    assert {check["backend"] for check in graphs} == {"cpp", "reference"}
    assert sum(check["count"] or 0 for check in graphs if check["name"] == "bf16, split32") > 1000
    skipped = {unit["name"]: unit["reason"] for unit in all_units(data) if unit["status"] == "skipped"}
    assert "compute-sanitizer was not found" in skipped["memcheck"] or sanitizer.find_sanitizer()
    assert "no environment variable" in skipped["CUDA kernels"]
    assert "TRITON_INTERPRET" in skipped["launch triton"]
    assert data["parts"]["bandwidth"]["absent"].keys() == {"triton"}
    assert data["machine"]["device"] == "cpu"
    assert data["machine"]["torch"]


def check_measurements(data: dict[str, Any]) -> None:
    cases = {found["case"] for found in measured(data, "bandwidth")}
    assert cases == {PATH, *COPIES, *(f"sharded_adam, {name}" for name in FORMATS)}
    for found in measured(data):
        live = {name: row for name, row in found["contenders"].items() if not row["error"]}
        assert live.keys() == found["contenders"].keys(), found["case"]
        for row in live.values():
            assert len(row["device_s"]) == len(row["host_s"]) == found["rounds"] == 3
            assert row["median_s"] == statistics.median(row["device_s"]) > 0
            if row["bytes"]:
                assert row["gb_s"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
        for ours, ratios in found["ratios"].items():
            assert live[ours]["kind"] == "ours"
            for other, ratio in ratios.items():
                pairs = zip(live[other]["device_s"], live[ours]["device_s"], strict=True)
                assert ratio == statistics.median(a / b for a, b in pairs)
    for found in measured(data, "bandwidth"):
        copied = found["contenders"]["device copy"]["bytes"]
        assert copied == pytest.approx(found["bytes"], abs=1)
        assert {"cpp", "reference"} <= found["ratios"].keys()
    bytes_an_element = {
        found["case"]: found["bytes"] / found["elements"]
        for found in measured(data, "bandwidth")
        if found["tensors"] > 1
    }
    assert bytes_an_element["sharded_adam, fp32"] == 28
    assert bytes_an_element["sharded_adam, bf16, split32"] == 26
    assert bytes_an_element["sharded_adam, bf16, split24, int8 moments"] == 12.125
    assert bytes_an_element["sharded_adam, fp32, bf16 shadow"] == 30
    assert bytes_an_element[PATH] == 34
    assert len([found for found in measured(data, "bandwidth") if found["case"] == PATH]) == len(DRY_SIZES)
    assert [found["tensors"] for found in measured(data, "many")] == [291, 1, 3]


def check_report(data: dict[str, Any], text: str) -> None:
    assert text == report.render(data)
    assert "No figure in here says anything about a GPU" in text
    lines = text.splitlines()
    for name, part in data["parts"].items():
        assert sum(line.startswith(f"| {name} | {part['status']} |") for line in lines) == 1
    rows = sum(len(found["contenders"]) for found in measured(data))
    tables = text[text.index("## Measured") : text.index("## Noted")].splitlines()
    assert sum(line.startswith("| ") and not line.startswith("| elements |") for line in tables) == rows
    assert {row["outcome"] for row in data["verdict"]} == {"not measured"}
    assert len(data["verdict"]) == 2 * len(verdict.TARGETS)


def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_session.py"), "--dry-run", "--no-build", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    data = strict_json(tmp_path / JSON_NAME)
    check_parts(data)
    check_measurements(data)
    check_report(data, (tmp_path / REPORT_NAME).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON_NAME, REPORT_NAME]
    assert "speed over torch fused" in done.stdout


def test_the_parent_imports_no_torch() -> None:
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu_session; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- parts that go wrong ---------------------------------------------------------------------------------------------

BAD_PARTS = """
import os, time
from gpu.units import Skip, Unit

def fine(log):
    log.check("one", "cpp", lambda: 3)

def raises(log):
    raise ValueError("this one raises")

def check_fails(log):
    log.check("wrong", "cpp", lambda: 1 / 0)
    log.check("right", "cpp", lambda: 1)

def dies(log):
    log.backend = "triton"
    log.measurements.append({"case": "before", "contenders": {}, "ratios": {}, "elements": 1, "tensors": 1})
    log.save(True)
    os._exit(9)

def loses(log):
    log.backend = "cpp"
    open("lost", "w").close()  # the device answers no more, until a new process is there

def hangs(log):
    time.sleep(60)

def units(context):
    named = [("fine", fine, 9), ("raises", raises, 9), ("check fails", check_fails, 9), ("dies", dies, 9)]
    if not os.path.exists("lost"):
        named.append(("loses", loses, 9))
    else:
        os.remove("lost")
        named.append(("loses", None, 9))
    named += [("hangs", hangs, 0.3), ("backends", lambda log: log.info.update(backends=list(context.backends)), 9)]
    return [Unit(*each) for each in named]

def slow(context):
    def one(log):
        log.info["process"] = os.getpid()
        log.save(True)
        time.sleep(60)
    return [Unit("slow", one), Unit("never", fine)]

def after(context):
    return [Unit("fine", fine)]

def broken(context):
    raise RuntimeError("no units")
"""


# The child with a device that needs no torch, whose import takes longer than these parts.
LIGHT_CHILD = """
import os, sys, types
sys.path.insert(0, {benchmarks!r})
from gpu import child, units

def light_context(arguments):
    device = types.SimpleNamespace(kind="cpu", synchronize=lambda: os.path.exists("lost") and 1 / 0)
    backends = tuple(name for name in ("cpp", "triton") if name not in arguments.exclude)
    return units.Context(device, backends, {{}}, arguments.quick, arguments.deadline)

child.open_context = light_context
os._exit(child.main())
"""


@pytest.fixture
def bad_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bad_parts.py").write_text(BAD_PARTS)
    (tmp_path / "light_child.py").write_text(LIGHT_CHILD.format(benchmarks=str(BENCHMARKS)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(runner, "CHILD", tmp_path / "light_child.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_name(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {unit["name"]: unit for unit in part["units"]}


def test_neither_errors_nor_time_stop_it(bad_parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE", 0.5)
    record = Record(bad_parts / "out", {"dry_run": True})
    parts = [
        Part("bad", "bad_parts:units", 30.0),
        Part("broken", "bad_parts:broken", 30.0),
        Part("slow", "bad_parts:slow", 1.0),
        Part("after", "bad_parts:after", 2.0),
    ]
    seconds = 60.0
    began = time.monotonic()
    monkeypatch.setattr(gpu_session, "share_out", lambda parts, index, left: (30.0, 10.0, 3.0, left)[index])
    gpu_session.run_session(parts, record, began + seconds, device="cpu", quick=False)
    assert time.monotonic() - began < seconds
    data = strict_json(bad_parts / "out" / JSON_NAME)
    found = data["parts"]

    bad = by_name(found["bad"])
    assert found["bad"]["status"] == "failed"
    assert found["bad"]["reason"].startswith("5 of 7 failed")
    assert found["bad"]["processes"] == 4
    assert (bad["fine"]["status"], bad["fine"]["checks"][0]["count"]) == ("ok", 3)
    assert (bad["raises"]["status"], bad["raises"]["reason"]) == ("failed", "ValueError: this one raises")
    assert [check["status"] for check in bad["check fails"]["checks"]] == ["failed", "ok"]
    assert "ZeroDivisionError" in bad["check fails"]["checks"][0]["reason"]
    assert bad["dies"]["status"] == "failed"
    assert "exit status 9" in bad["dies"]["reason"]
    assert bad["dies"]["measurements"][0]["case"] == "before"
    assert bad["loses"]["reason"] == "the device: ZeroDivisionError: division by zero"
    assert "no end after 0 s" in bad["hangs"]["reason"]
    # The backend that a process died in is left out from then on.
    assert data["excluded"].keys() == {"cpp", "triton"}
    assert bad["backends"]["info"]["backends"] == []

    assert found["broken"]["status"] == "failed"
    assert "no units" in found["broken"]["reason"]
    slow = by_name(found["slow"])
    assert "time was over" in slow["slow"]["reason"]
    assert slow["slow"]["info"].keys() == {"process"}
    assert (slow["never"]["status"], slow["never"]["reason"]) == ("skipped", "no time left")
    assert 3 <= found["slow"]["seconds"] < 7
    assert found["after"]["status"] == "ok"
    text = (bad_parts / "out" / REPORT_NAME).read_text()
    failures = text[text.index("## Failures") : text.index("## Measured")]
    for words in ("this one raises", "ZeroDivisionError", "time was over", "no units"):
        assert words in failures


def test_a_part_whose_processes_all_die_ends(bad_parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_PROCESSES", 1)
    part = Part("bad", "bad_parts:units", 1.0)
    rest: dict[str, Any] = {"quick": False, "excluded": {}, "directory": bad_parts / "scratch"}
    *_, found = runner.run_part(part, device="cpu", seconds=30.0, **rest)
    assert found["processes"] == 1
    assert (found["status"], found["reason"]) == ("failed", "1 processes died or hung, and no other was started")
    assert by_name(found)["hangs"]["reason"] == found["reason"]
    assert by_name(found)["dies"]["status"] == "failed"


def test_no_time_at_all(tmp_path: Path) -> None:
    record = Record(tmp_path, {"dry_run": True})
    gpu_session.run_session([Part("late", "none:none", 1.0)], record, time.monotonic() - 1, device="cpu", quick=False)
    assert record.data["parts"]["late"]["status"] == "skipped"
    assert record.data["parts"]["late"]["reason"] == "no time left"


def is_alive(status: Path) -> bool:
    try:
        return "State:\tZ" not in status.read_text()
    except FileNotFoundError:
        return False


def test_a_kill_leaves_what_was_found(bad_parts: Path) -> None:
    out = bad_parts / "out"
    script = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import gpu_session; from pathlib import Path\n"
        "from gpu.record import Record; from gpu import runner; from gpu.runner import Part\n"
        f"record = Record(Path({str(out)!r}), {{'dry_run': True}})\n"
        "parts = [Part('slow', 'bad_parts:slow', 1.0)]\n"
        f"gpu_session._SAVES_APART = 0.1; runner.CHILD = {str(bad_parts / 'light_child.py')!r}\n"
        "gpu_session.run_session(parts, record, time.monotonic() + 60, device='cpu', quick=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 50
        units: Sequence[dict[str, Any]] = []
        while not (units and units[0]["info"]) and time.monotonic() < deadline:
            time.sleep(0.1)
            units = all_units(strict_json(out / JSON_NAME)) if (out / JSON_NAME).exists() else []
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    data = strict_json(out / JSON_NAME)
    assert not data["finished"]
    assert data["parts"]["slow"]["status"] == "running"
    assert "did not end" in (out / REPORT_NAME).read_text()
    # The child goes with its parent: on a GPU it would hold memory, and disturb whatever is measured next.
    status = Path(f"/proc/{all_units(data)[0]['info']['process']}/status")
    deadline = time.monotonic() + 10
    while is_alive(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(status)


def test_time_is_shared_and_what_is_left_goes_on() -> None:
    parts = gpu_session.parts_of(is_dry=False)
    assert [part.name for part in parts] == PARTS
    left, given = 524.0, {}
    for index, part in enumerate(parts):
        given[part.name] = runner.share_out(parts, index, left)
        left -= given[part.name]
    assert left == pytest.approx(0.0, abs=1e-6)
    assert given["bandwidth"] > 100
    # The sixth part alone is given as much as the rest when nothing was used before.
    assert runner.share_out(parts, len(parts) - 1, 524.0) == 524.0
    assert gpu_session.SECONDS <= 9 * 60
    assert gpu_session.QUICK_SECONDS <= 3 * 60
