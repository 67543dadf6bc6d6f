"""Reading any set of JSON files of measurements into one run: what is taken from them, and what cannot be read."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_helpers import CPU, Json, gpu, load, only, records, run_of

from shardops.report import Measurement, read
from shardops.report.tables import Cell, memory_table, sections

# ---- reading ---------------------------------------------------------------------------------------------------------


def test_records_of_the_benchmarks(tmp_path: Path) -> None:
    run = run_of(tmp_path, ("a.json", load("bench.json")))
    assert len(run.measurements) == len(records(load("bench.json"))) == 26
    m = only(run, numel=8000, kind="ours")
    assert (m.primitive, m.case, m.dtype, m.tensors) == ("sharded_adam", "fp32", "float32", 1)
    assert (m.contender, m.backend, m.device, m.threads) == ("shardops cpp", "cpp", "cpu", 2)
    assert m.nbytes == 28 * 8000
    assert m.median_s == pytest.approx(8000 * 4e-10)
    assert m.gb_s == pytest.approx(70.0)
    assert m.limit_share == pytest.approx(0.9019607843)  # 0.92 / 1.02, the median of the paired ones
    assert m.stock == "torch fused"
    assert m.speed_over_stock == pytest.approx(1.25)
    assert m.speeds == pytest.approx((1.25, 1.2, 1.25, 1.3, 1.2))  # round by round, in the order run
    assert m.speed_spread == pytest.approx((1.2, 1.25, 1.25))
    assert m.where == "Made-up CPU of a test, 2 threads"


def test_stock_and_limit_are_compared_with_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, ("a.json", load("bench.json")))
    for contender in ("torch fused", "same-streams limit"):
        m = only(run, numel=8000, contender=contender)
        assert (m.speed_over_stock, m.speeds, m.stock) == (None, (), None)
    assert only(run, numel=8000, contender="torch foreach").stock == "torch fused"


def test_stock_is_found_without_its_name(tmp_path: Path) -> None:
    data = load("bench.json")
    for record in records(data):
        del record["stock"]
    m = only(run_of(tmp_path, ("a.json", data)), numel=8000, kind="ours")
    assert m.stock == "torch fused"
    assert m.speeds == pytest.approx((1.25, 1.2, 1.25, 1.3, 1.2))


def test_a_record_names_its_stock(tmp_path: Path) -> None:
    data = load("bench.json")
    next(record for record in records(data) if record["kind"] == "ours")["stock"] = "torch foreach"
    m = only(run_of(tmp_path, ("a.json", data)), numel=8000, kind="ours")
    assert m.stock == "torch foreach"
    assert m.speeds == pytest.approx((4.0, 4.0, 4.0, 4.2, 4.0))


def test_rounds_of_another_number_are_not_paired(tmp_path: Path) -> None:
    data = load("bench.json")
    ours = next(record for record in records(data) if record["kind"] == "ours")
    ours["seconds"] = ours["seconds"][:-1]
    m = only(run_of(tmp_path, ("a.json", data)), numel=8000, kind="ours")
    assert m.speeds == ()
    assert m.speed_spread is None
    assert m.speed_over_stock == pytest.approx(1.25)  # as the record says


def test_machine_and_what_is_missing(tmp_path: Path) -> None:
    (source,) = run_of(tmp_path, ("a.json", load("bench.json"))).sources
    assert source.machine["torch"] == "2.13.0+cpu"
    assert source.machine["backends: cpp"] == "available"
    assert "CUDA of torch" not in source.machine
    assert not {"missing", "DeepSpeedCPUAdam"} & set(source.machine)
    assert source.missing == {
        "DeepSpeedCPUAdam": "ModuleNotFoundError: No module named 'deepspeed'",
        "torch get_total_norm": "RuntimeError: made for a test",
    }
    assert source.date == "2026-11-01T12:00:00+00:00"


def test_clipped_contenders_keep_their_name(tmp_path: Path) -> None:
    data = load("bench.json")
    next(record for record in records(data) if record["kind"] == "ours")["contender"] = "shardops, clipped"
    assert only(run_of(tmp_path, ("a.json", data)), numel=8000, kind="ours").contender == "shardops cpp, clipped"


def test_gpu_session(tmp_path: Path) -> None:
    data = gpu(load("gpu_session.json"))
    run = run_of(tmp_path, ("gpu_session.json", data))
    assert {m.primitive for m in run.measurements} == {"sharded_adam", "update_path", "optimizer_step"}
    m = only(run, primitive="sharded_adam", numel=1000, backend="cpp")
    unit = next(u for u in data["parts"]["bandwidth"]["units"] if u["name"] == "sharded_adam, fp32, 1e+03 elements")
    ratios = unit["measurements"][0]["ratios"]["cpp"]
    assert m.case == "fp32"
    assert (m.contender, m.device, m.where, m.stock) == ("shardops cpp", "cuda", "Some GPU", "torch fused")
    assert m.speed_over_stock == pytest.approx(ratios["torch fused"])
    assert m.limit_share == pytest.approx(ratios["device copy"])  # of as many bytes
    assert only(run, primitive="sharded_adam", numel=1000, contender="device copy").kind == "limit"
    assert only(run, primitive="update_path", contender="shardops cpp").case == "clip, step, cast"
    assert only(run, primitive="optimizer_step", contender="shardops cpp").tensors == 3
    (source,) = run.sources
    assert "apex" in source.missing["apex FusedAdam"]
    assert "GPU" in source.missing["shardops triton"]
    assert source.warnings == ()


def test_a_limit_of_other_bytes_is_compared_by_rate(tmp_path: Path) -> None:
    data = load("gpu_session.json")
    measurement = data["parts"]["bandwidth"]["units"][0]["measurements"][0]
    measurement["contenders"]["device copy"]["bytes"] *= 2
    m = only(run_of(tmp_path, ("a.json", data)), primitive="sharded_adam", numel=1000, backend="cpp")
    assert m.limit_share == pytest.approx(measurement["ratios"]["cpp"]["device copy"] / 2)


def test_what_a_reader_of_a_session_has_to_know(tmp_path: Path) -> None:
    data = load("gpu_session.json")
    data["finished"] = False
    data["parts"]["many"]["status"] = "failed"
    (source,) = run_of(tmp_path, ("a.json", data)).sources
    dry, unfinished, failed = source.warnings
    assert "dry run" in dry
    assert "did not come to its end" in unfinished
    assert "many" in failed


def test_memory_of_a_session(tmp_path: Path) -> None:
    data = gpu(load("gpu_session.json"))
    peak = next(u for u in data["parts"]["bandwidth"]["units"] if u["name"] == "peak memory of a step")["info"]["peak"]
    assert memory_table(run_of(tmp_path, ("a.json", data))) is None  # a CPU's is not recorded
    peak[0] |= {"elements": 10**8, "resident": 1_600_000_000, "peak": 1_616_000_000}
    table = memory_table(run_of(tmp_path, ("a.json", data)))
    assert table is not None
    assert table.rows == [("fp32", "shardops cpp", Cell("100M"), Cell("16.00"), Cell("1.62 GB"), Cell("1.010"))]


def test_passes_of_another_folder_are_another_run(tmp_path: Path) -> None:
    """Of the newer run, which has one pass, not two of the older one's beside it."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    for number in (1, 2, 3):
        (tmp_path / "old" / f"{number}.json").write_text(json.dumps(nth_pass(number)))
    late = nth_pass(1, 5.0, date="2026-11-09T00:00:00+00:00")
    run = run_of(tmp_path, ("new/1.json", late))
    assert {(m.source.name, m.passes) for m in run.measurements} == {("new/1.json", ())}
    assert "78 older figures" in run.notes[0]


def test_speeds_are_pooled_over_one_stock(tmp_path: Path) -> None:
    """In the last pass torch's fused update failed: its ratios are over nothing, not over another of torch's."""
    files = [(f"{number}.json", nth_pass(number)) for number in (1, 2, 3)]
    for benchmark in files[2][1]["benchmarks"]:
        rows = benchmark["extra_info"]["measurements"]
        gone = {record["stock"] for record in rows if record["speed_over_stock"] is not None}
        benchmark["extra_info"]["measurements"] = [
            {**record, "speed_over_stock": None} for record in rows if record["contender"] not in gone
        ]
    found = run_of(tmp_path, *files)
    mine = only(found, kind="ours", numel=8000)
    assert len(mine.passes) == 3
    assert (mine.stock, mine.speed_over_stock, mine.speeds) == (None, None, ())


def test_memory_of_two_machines_stands_beside_each_other(tmp_path: Path) -> None:
    files = []
    for number, cpu in ((1, CPU), (2, "Another CPU")):
        data = nth_pass(1, cpu=cpu)
        row = {"case": "fp32", "contender": "shardops cpp", "numel": 10**6, "resident": 16 * 10**6}
        data["benchmarks"][0]["extra_info"]["memory"] = [
            {**row, "peak": (16 + number) * 10**6},
            {**row, "resident": 0, "peak": 1},
            {"case": "fp32"},
        ]
        files.append((f"{number}.json", data))
    run = run_of(tmp_path, *files)
    table = memory_table(run)
    assert table is not None
    assert sorted(str(row[0]) for row in table.rows) == ["fp32; Another CPU", f"fp32; {CPU}"]
    assert sum("a record of memory is left out" in note for note in run.notes) == 4


def test_memory_of_passes_is_told_once(tmp_path: Path) -> None:
    files = []
    for number in (1, 2):
        data = nth_pass(number)
        row = {"case": "fp32", "contender": "shardops cpp", "numel": 10**6, "resident": 16 * 10**6}
        data["benchmarks"][0]["extra_info"]["memory"] = [{**row, "peak": (16 + number) * 10**6}]
        files.append((f"{3 - number}.json", data))
    table = memory_table(run_of(tmp_path, *files))
    assert table is not None
    assert [row[-1] for row in table.rows] == [Cell("1.125")]  # the later one's


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def without_measurements(data: Json) -> Json:
    for benchmark in data["benchmarks"]:
        benchmark["extra_info"] = {}
    return data


UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "no JSON": (lambda: "{", "Expecting"),
    "no object": (lambda: [1], "neither pytest-benchmark's JSON nor a GPU session's"),
    "another object": (lambda: {"a": 1}, "neither pytest-benchmark's JSON nor a GPU session's"),
    "another's benchmarks": (lambda: without_measurements(load("bench.json")), "no benchmark in it has records"),
    "benchmarks that are none": (lambda: {"benchmarks": [1], "machine_info": {}}, "no benchmark in it has records"),
    "another schema": (lambda: load("gpu_session.json") | {"schema": 2}, "schema 2"),
    "an empty session": (lambda: load("gpu_session.json") | {"parts": {}}, "nothing was measured"),
    "a broken session": (lambda: load("gpu_session.json") | {"parts": {"bits": 3}}, "not laid out as its kind is"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unknown_file_is_named_and_skipped(name: str, tmp_path: Path) -> None:
    content, reason = UNREADABLE[name]
    run = run_of(tmp_path, ("bad.json", content()), ("good.json", load("bench.json")))
    assert reason in run.skipped["bad.json"]
    assert "\n" not in run.skipped["bad.json"]
    assert [source.name for source in run.sources] == ["good.json"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("numel", None, "'numel' is None, not of type int"),
        ("numel", 0, "'numel' is 0"),
        ("seconds", [], "'seconds' holds no positive times"),
        ("seconds", [1.0, -1.0], "'seconds' holds no positive times"),
        ("kind", "own", "'kind' is 'own', none of ours"),
        ("seconds", [1.0, float("inf")], "'seconds' holds no positive times"),
        ("numel", 10**400, "nothing can be said of so many"),
        ("tensors", -1, "'tensors' is -1"),
        ("median_s", float("nan"), "'median_s' is nan"),
        ("speed_over_stock", -1, "'speed_over_stock' is -1"),
        ("backend", ["cpp"], "'backend' is ['cpp'], neither a text nor null"),
        ("gb_s", "fast", "'gb_s' is 'fast', neither a positive number nor null"),
    ],
)
def test_a_bad_record_is_left_out_with_the_reason(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    data = load("bench.json")
    records(data)[1][key] = value
    run = run_of(tmp_path, ("a.json", data))
    assert len(run.measurements) == 25
    (note,) = run.notes
    assert note.startswith("a.json: test_sharded_adam[8000-1-fp32], measurement 1 is left out: ")
    assert reason in note


def test_a_file_of_bad_records_is_skipped(tmp_path: Path) -> None:
    data = load("bench.json")
    for record in records(data):
        record["seconds"] = []
    assert "no record in it can be used" in run_of(tmp_path, ("a.json", data)).skipped["a.json"]


def test_no_directory() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; `shardops bench"):
        read("nowhere")


def test_of_two_equal_files_the_newest_counts(tmp_path: Path) -> None:
    newer = load("bench.json")
    newer["machine_info"]["shardops"]["date"] = "2026-11-02T12:00:00+00:00"
    run = run_of(tmp_path, ("a.json", newer), ("b.json", load("bench.json")))
    assert len(run.measurements) == 26
    assert {m.source.name for m in run.measurements} == {"a.json"}
    assert "26 older figures" in run.notes[0]


def nth_pass(number: int, factor: float = 1.0, **machine: Any) -> Json:
    """The file of a pass, an hour after the one before, with all times multiplied."""
    data = load("bench.json")
    data["machine_info"]["shardops"] |= {"pass": number, "date": f"2026-11-02T{10 + number}:00:00+00:00", **machine}
    for record in records(data):
        record["seconds"] = [value * factor for value in record["seconds"]]
        record["median_s"] *= factor
        record["gb_s"] = record["gb_s"] and record["gb_s"] / factor
    return data


def test_passes_are_one_measurement(tmp_path: Path) -> None:
    files = [
        (f"{name}.json", nth_pass(number, factor))
        for name, number, factor in zip("bca", (1, 2, 3), (2, 1, 3), strict=True)
    ]
    run = run_of(tmp_path, *files)
    assert len(run.measurements) == 26
    assert run.notes == []
    assert [source.number for source in sorted(run.sources, key=lambda s: s.date)] == [1, 2, 3]
    assert "pass" not in run.sources[0].machine
    mine = only(run, kind="ours", numel=8000)
    alone = only(run_of(tmp_path / "alone", ("a.json", load("bench.json"))), **wanted_of(mine))
    assert mine.seconds == tuple(value * factor for factor in (2, 1, 3) for value in alone.seconds)
    assert mine.median_s == statistics.median(mine.seconds)
    assert mine.nbytes is not None
    assert mine.gb_s == pytest.approx(mine.nbytes / mine.median_s / 1e9)
    assert len(mine.speeds) == 3 * len(alone.speeds) > 0
    assert mine.speed_over_stock == pytest.approx(alone.speed_over_stock)
    assert [each.median_s / alone.median_s for each in mine.passes] == pytest.approx([2, 1, 3])
    assert mine.time_range == pytest.approx((alone.median_s, 2 * alone.median_s, 3 * alone.median_s))
    assert mine.time_spread != mine.time_range
    assert alone.passes == ()
    assert alone.time_range == alone.time_spread


def wanted_of(measurement: Measurement) -> dict[str, Any]:
    return {name: getattr(measurement, name) for name in ("primitive", "kind", "numel", "case", "contender", "tensors")}


def test_two_passes_have_no_range(tmp_path: Path) -> None:
    run = run_of(tmp_path, ("a.json", nth_pass(1)), ("b.json", nth_pass(2)))
    assert {len(m.passes) for m in run.measurements} == {2}
    assert all(m.speed_range == m.speed_spread and m.time_range == m.time_spread for m in run.measurements)


def test_a_pass_measured_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    late = nth_pass(1, 5.0, date="2026-11-09T00:00:00+00:00")
    run = run_of(tmp_path, ("a.json", nth_pass(1)), ("b.json", nth_pass(2)), ("c.json", late))
    assert {tuple(each.source.name for each in m.passes) for m in run.measurements} == {("c.json", "b.json")}
    assert "26 older figures" in run.notes[0]


def test_passes_of_another_revision_are_not_pooled(tmp_path: Path) -> None:
    run = run_of(tmp_path, ("a.json", nth_pass(1, revision="abc")), ("b.json", nth_pass(2)))
    assert {m.passes for m in run.measurements} == {()}
    assert {m.source.name for m in run.measurements} == {"b.json"}


def test_files_of_two_machines_stand_beside_each_other(tmp_path: Path) -> None:
    other = load("bench.json")
    other["machine_info"]["shardops"]["cpu"] = "Another CPU"
    run = run_of(tmp_path, ("a.json", load("bench.json")), ("sub.json", other))
    assert len(run.measurements) == 52
    titles = [section.title for section in sections(run)]
    assert titles == [f"{p}: {c}, 2 threads" for p in ("sharded_adam", "grad_norm") for c in (CPU, "Another CPU")]
