"""Two runs compared: what became slower beyond the spread, and what only the machine changed."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import pytest
from report_helpers import CPU, Json, load, records, run_of

from shardops.report import Spread, compare
from shardops.report.compare import changes_table, judge
from shardops.report.tables import Cell


def scaled(data: Json, factors: dict[str, float], primitive: str = "sharded_adam") -> Json:
    """The run with the times of some kinds of contenders multiplied, and ratios that agree with them."""
    data = copy.deepcopy(data)
    for benchmark in data["benchmarks"]:
        rows = [r for r in benchmark["extra_info"]["measurements"] if r["primitive"] == primitive]
        for record in rows:
            record["seconds"] = [s * factors.get(record["kind"], 1.0) for s in record["seconds"]]
            record["median_s"] = statistics.median(record["seconds"])
        for record in rows:
            if record["speed_over_stock"] is not None:
                stock = next(r for r in rows if r["contender"] == record["stock"])
                pairs = zip(stock["seconds"], record["seconds"], strict=True)
                record["speed_over_stock"] = statistics.median(a / b for a, b in pairs)
    return data


def compared(tmp_path: Path, now: Json, **options: Any) -> Any:
    before = run_of(tmp_path / "before", ("a.json", load("bench.json")))
    return compare(run_of(tmp_path / "now", ("a.json", now)), before, **options)


def verdicts(comparison: Any, kind: str, primitive: str = "sharded_adam") -> set[str]:
    chosen = [c for c in comparison.changes if c.now.kind == kind and c.now.primitive == primitive]
    return {c.verdict for c in chosen}


def test_what_became_slower(tmp_path: Path) -> None:
    comparison = compared(tmp_path, scaled(load("bench.json"), {"ours": 1.2}))
    assert verdicts(comparison, "ours") == {"slower"}
    assert verdicts(comparison, "torch") == {"same"}
    assert len(comparison.slower) == 6
    assert comparison.slower[0].stock_ratio == pytest.approx(1 / 1.2)
    assert comparison.slower[0].time_ratio == pytest.approx(1 / 1.2)
    assert comparison.summary == (
        "7 figures of shardops: 6 slower, 0 faster, 1 same; 19 figures of others: 0 slower, 0 faster, 19 same."
    )
    row = changes_table(comparison.slower).rows[0]
    assert row[0] == "sharded_adam"
    assert row[4:7] == (Cell("slower", mark="slower"), Cell("0.83"), Cell("0.83"))


def test_the_worst_stands_first(tmp_path: Path) -> None:
    now = scaled(load("bench.json"), {"ours": 1.2})
    comparison = compared(tmp_path, scaled(now, {"ours": 1.5}, "grad_norm"))
    assert [c.now.primitive for c in comparison.changes] == ["sharded_adam"] * 24 + ["grad_norm"] * 2
    ratios = [c.ratio for c in comparison.slower]
    assert comparison.slower[0].now.primitive == "grad_norm"
    assert ratios == sorted(ratios)
    faster = compared(tmp_path, scaled(scaled(load("bench.json"), {"ours": 0.8}), {"ours": 0.5}, "grad_norm")).faster
    assert faster[0].now.primitive == "grad_norm"


def test_what_became_faster(tmp_path: Path) -> None:
    comparison = compared(tmp_path, scaled(load("bench.json"), {"ours": 0.8}))
    assert verdicts(comparison, "ours") == {"faster"}
    assert len(comparison.faster) == 6
    assert comparison.slower == []


def test_a_machine_that_drifts_changes_no_verdict_on_ours(tmp_path: Path) -> None:
    comparison = compared(tmp_path, scaled(load("bench.json"), {"ours": 2.0, "torch": 2.0, "limit": 2.0}))
    assert verdicts(comparison, "ours") == {"same"}
    ours = next(c for c in comparison.changes if c.now.kind == "ours")
    assert (ours.time_ratio, ours.stock_ratio) == (pytest.approx(0.5), pytest.approx(1.0))
    assert verdicts(comparison, "limit") == {"slower"}  # by time, for it has no other measure


def test_a_change_below_the_tolerance_is_none(tmp_path: Path) -> None:
    now = scaled(load("bench.json"), {"ours": 1.08})
    assert verdicts(compared(tmp_path, now), "ours") == {"slower"}
    assert verdicts(compared(tmp_path, now, tolerance=0.1), "ours") == {"same"}


def test_judging() -> None:
    before = Spread(0.9, 1.0, 1.1)
    assert judge(before, Spread(0.5, 0.6, 0.7)) == "slower"
    assert judge(before, Spread(1.5, 1.6, 1.7)) == "faster"
    assert judge(before, Spread(0.5, 0.8, 0.95)) == "same"  # they overlap
    assert judge(before, Spread(1.05, 1.4, 1.7)) == "same"
    assert judge(Spread(1.0, 1.0, 1.0), Spread(0.99, 0.99, 0.99)) == "same"  # within the tolerance
    assert judge(Spread(1.0, 1.0, 1.0), Spread(0.99, 0.99, 0.99), 0.0) == "slower"
    assert judge(before, None) == "too few rounds"


def passes(data: Json, factors: tuple[float, ...]) -> list[tuple[str, Json]]:
    """A run of several passes; ours takes so many times as long in each."""
    found = []
    for number, factor in enumerate(factors, 1):
        each = scaled(data, {"ours": factor})
        each["machine_info"]["shardops"]["pass"] = number
        found.append((f"{number}.json", each))
    return found


def test_passes_are_what_a_change_is_judged_by(tmp_path: Path) -> None:
    """Rounds of one pass lie so close together that each pass would be called slower than the one before."""
    data = load("bench.json")
    before = run_of(tmp_path / "before", *passes(data, (1.0, 1.2, 1.4)))
    assert verdicts(compare(run_of(tmp_path / "a", *passes(data, (1.3, 1.5, 1.7))), before), "ours") == {"same"}
    slower = compare(run_of(tmp_path / "b", *passes(data, (1.5, 1.6, 1.7))), before)
    assert verdicts(slower, "ours") == {"slower"}
    assert slower.few_passes == 0
    assert verdicts(compare(run_of(tmp_path / "c", *passes(data, (0.7, 0.8, 0.9))), before), "ours") == {"faster"}
    # Four passes in five are alike; the one that is not says what else there is.
    before = run_of(tmp_path / "e", *passes(data, (1.0, 1.0, 1.0, 1.0, 1.5)))
    now = run_of(tmp_path / "f", *passes(data, (1.3, 1.45, 1.45, 1.45, 1.45)))
    assert verdicts(compare(now, before), "ours") == {"same"}
    two = compare(run_of(tmp_path / "d", *passes(data, (1.0, 1.0))), before)
    assert two.few_passes == len(two.changes) == 26


def test_two_rounds_are_not_judged(tmp_path: Path) -> None:
    now = load("bench.json")
    for record in records(now):
        record["seconds"] = record["seconds"][:2]
    comparison = compared(tmp_path, now)
    assert verdicts(comparison, "ours") == {"too few rounds"}
    assert "0 same, 7 of too few rounds" in comparison.summary


def test_what_only_one_run_has(tmp_path: Path) -> None:
    now = load("bench.json")
    now["benchmarks"] = [b for b in now["benchmarks"] if "grad_norm" not in b["name"]]
    assert compared(tmp_path, now).summary.endswith("Measured 2 only before.")


def test_what_differs_between_the_machines(tmp_path: Path) -> None:
    now = load("bench.json")
    now["machine_info"]["shardops"] |= {"cpu": "Another CPU", "date": "2026-12-01"}
    comparison = compared(tmp_path, now)
    assert comparison.machine.rows == [("cpu", CPU, "Another CPU")]
    assert not comparison.is_comparable
    same = compared(tmp_path, load("bench.json"))
    assert same.machine is None
    assert same.is_comparable
