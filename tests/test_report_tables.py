"""Figures put in order for a reader: texts, marks, cases, columns and what a plot says."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_helpers import load, records, run_of

from shardops.report import Spread
from shardops.report.tables import (
    Case,
    Cell,
    bytes_table,
    column_name,
    columns,
    count,
    figure,
    message,
    ratio_cell,
    seconds,
    sections,
)


def test_texts_of_figures() -> None:
    assert [count(n) for n in (999, 1000, 16384, 10**8, 999_999, 10**9)] == ["999", "1k", "16.4k", "100M", "1M", "1G"]
    assert [seconds(s) for s in (2.0, 1.5e-3, 2.34e-5, 9.9999e-7, 5e-9)] == [
        "2.00 s",
        "1.50 ms",
        "23.4 µs",
        "1.00 µs",
        "5.00 ns",
    ]
    shown = [figure(v) for v in (1234.0, 99.96, 12.34, 9.999, 1.234, 0.1, 0.05, 0.0123, 0.0)]
    assert shown == ["1234", "100", "12.3", "10.0", "1.23", "0.10", "0.050", "0.012", "0.00"]


def test_sizes_that_are_nearly_the_same_are_one_column() -> None:
    found = columns([1000, 10**6, 1_003_520, 10**7, 1000])
    assert found == [[1000], [10**6, 1_003_520], [10**7]]
    assert [column_name(sizes) for sizes in found] == ["1k", "~1M", "10M"]


def test_a_ratio_is_marked_beyond_its_spread_only() -> None:
    assert ratio_cell(1.1, Spread(1.05, 1.1, 1.2)) == Cell("1.10", "1.05–1.20", "faster")
    assert ratio_cell(1.1, Spread(0.95, 1.1, 1.2)).mark == ""
    assert ratio_cell(0.9, Spread(0.85, 0.9, 1.1)).mark == ""
    assert ratio_cell(0.9, Spread(0.85, 0.9, 0.95)).mark == "slower"
    assert ratio_cell(0.9, None) == Cell("0.90")


def test_cases_are_told_apart_by_the_number_of_tensors(tmp_path: Path) -> None:
    section = sections(run_of(tmp_path, ("a.json", load("bench.json"))))[0]
    assert list(section.groups) == [
        Case("fp32", "1 tensor"),
        Case("fp32", "291 tensors"),
        Case("bf16 + split24 + int8", "1 tensor"),
    ]
    # A plot needs two sizes.
    assert [panel.title for panel in section.panels] == ["fp32, 1 tensor", "fp32, 291 tensors"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1, 2, 24], ["1 to 24 tensors"]),  # a few, as many as the size wants
        ([24, 24, 24], ["24 tensors"]),
        ([1, 1, 24], ["1 tensor", "24 tensors"]),  # one of them at several sizes
        ([1, 24, 291], ["1 tensor", "24 tensors", "291 tensors"]),  # many small ones
    ],
)
def test_which_numbers_of_tensors_are_one_case(counts: list[int], expected: list[str], tmp_path: Path) -> None:
    data = load("bench.json")
    data["benchmarks"] = data["benchmarks"][:3]
    for benchmark, number in zip(data["benchmarks"], counts, strict=True):
        for record in benchmark["extra_info"]["measurements"]:
            record["tensors"] = number
    (section,) = sections(run_of(tmp_path, ("a.json", data)))
    assert [case.tensors for case in section.groups] == expected


def test_a_few_tensors_more_at_each_size_are_one_line(tmp_path: Path) -> None:
    section = sections(run_of(tmp_path, ("a.json", load("gpu_session.json"))))[0]
    assert list(section.groups) == [Case("fp32", "1 to 2 tensors")]
    assert len(section.panels) == 1


def test_a_dtype_is_named_where_the_case_does_not_tell(tmp_path: Path) -> None:
    data = load("bench.json")
    for record in records(data):
        record["case"] = "per_param"
    section = sections(run_of(tmp_path, ("a.json", data)))[0]
    assert {case.label for case in section.groups} == {"per_param, fp32", "per_param, bf16"}


def test_speeds_over_stock(tmp_path: Path) -> None:
    speeds = sections(run_of(tmp_path, ("a.json", load("bench.json"))))[0].speeds
    assert speeds is not None
    assert speeds.header == ("case", "contender", "8k", "~80.1k", "~801k")
    ours, foreach, many, *_ = speeds.rows
    assert ours[:2] == ("fp32, 1 tensor, over torch fused", "shardops cpp")
    assert ours[2:] == (Cell("1.25", "1.20–1.25", "faster"),) * 3
    assert foreach[1:3] == ("torch foreach", Cell("0.31", "0.30–0.31"))  # others are not marked
    assert many[2:] == (None, *(Cell("0.83", "0.80–0.83", "slower"),) * 2)


def test_all_figures(tmp_path: Path) -> None:
    figures = sections(run_of(tmp_path, ("a.json", load("bench.json"))))[0].figures
    assert len(figures.rows) == 24
    assert figures.rows[0] == (
        "fp32, 1 tensor",
        "shardops cpp",
        Cell("8k"),
        Cell("3.20 µs", "3.20 µs–3.26 µs"),
        Cell("70.0"),
        Cell("0.90"),
        Cell("5"),
    )


def test_the_message_of_a_plot(tmp_path: Path) -> None:
    panel = sections(run_of(tmp_path, ("a.json", load("bench.json"))))[0].panels[0]
    assert panel.message == message(panel.measurements)
    assert panel.message == (
        "At 800k elements shardops cpp moves 70.0 GB/s, 0.90 of the limit (76.9 GB/s), at 1.25 times the speed of "
        "torch fused."
    )
    assert message([m for m in panel.measurements if m.kind != "ours"]) == "No kernel of shardops was measured here."


def test_bytes_an_element(tmp_path: Path) -> None:
    table = bytes_table(run_of(tmp_path, ("a.json", load("bench.json"))))
    assert table is not None
    found = {row[:3]: row[3] for row in table.rows}
    assert found["sharded_adam", "fp32", "shardops cpp"] == Cell("28.000")
    assert found["sharded_adam", "bf16 + split24 + int8", "shardops cpp"] == Cell("12.125")
    assert found["grad_norm", "fp32", "torch._foreach_norm"] == Cell("4.000")
    assert not any("limit" in str(row[2]) for row in table.rows)
