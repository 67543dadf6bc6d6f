"""The update path's benchmark at a tiny size: what it counts is what the formula says, and its tables can be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_update_path as bench
from update_path import parts

# Of a step, for each element that is sent: the table of docs/update_path.md.
TOTALS = {parts.STOCK: 60, parts.SHADOW: 42, parts.ELIDED: 34, parts.MASTER: 36}


def test_counts_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = bench.measure(tmp_path, 2, elements=10_000, repeats=1, warmup=1)
    bench.check_bytes(ranks)
    for name, found in ranks[0].items():  # rank 0 has no padding, so that elements held are elements sent
        expected = parts.expected_bytes(name, found["sizes"])
        assert sum(expected[part] for part in parts.UPDATE) == TOTALS[name] * found["sizes"].padded
    assert ranks[1][parts.STOCK]["sizes"].local < ranks[1][parts.STOCK]["sizes"].padded

    for found in ranks:
        for name, variant in found.items():
            new = max(variant["largest_new"].get(part, 0) for part in parts.UPDATE)
            if name == parts.STOCK:  # the largest group is cast into one temporary
                assert new > 2 * variant["sizes"].padded // 10
            else:  # a parameter has 660 bytes on average
                assert new <= 8
                assert variant["update_peak"] < 256
            for part in (parts.CLIP, parts.STEP, parts.COPY_IN, parts.COPY_OUT, parts.CHUNK_CAT):
                assert variant["seconds"][0]["wall"][part] > 0, (name, part)

    summary = bench.summary(ranks)
    json.dumps(summary)
    bench.show_tables(summary)
    printed = capsys.readouterr().out
    for total in TOTALS.values():
        assert f"{total}.00" in printed
