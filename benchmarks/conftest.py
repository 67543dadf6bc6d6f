"""Options and fixtures of the benchmarks: how much is measured, on which device, and what goes into the JSON file.

``python -m pytest benchmarks -s --scale quick|full --device auto|cpu|cuda --benchmark-json FILE``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _suite import SCALES, Suite, grid_of

_SUITE = pytest.StashKey[Suite]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardops")
    group.addoption("--scale", choices=list(SCALES), default="quick", help="how much is measured (default: quick)")
    group.addoption("--pass", type=int, default=1, dest="number", help="of several passes, which one this is")
    group.addoption(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU where torch finds one"
    )


def _suite_of(config: pytest.Config) -> Suite:
    if _SUITE not in config.stash:
        config.stash[_SUITE] = Suite(config.getoption("--scale"), config.getoption("--device"))
    return config.stash[_SUITE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    scale = SCALES[metafunc.config.getoption("--scale")]
    if "grid" in metafunc.fixturenames:
        cases = grid_of(scale)
        metafunc.parametrize("grid", cases, ids=[f"{numel:.0e}-{tensors}" for numel, tensors in cases])
    if "ranks" in metafunc.fixturenames:
        cases = list(scale.ranks)
        metafunc.parametrize("ranks", cases, ids=[f"{count}-{numel:.0e}" for count, numel, _ in cases])


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    return _suite_of(request.config)


@pytest.fixture(scope="module", autouse=True)
def _tables(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if _SUITE in request.config.stash:
        request.config.stash[_SUITE].show_tables()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Called once all has been measured, so that what is missing is known."""
    machine_info["node"] = ""  # the machine's name is nobody's business
    machine_info["shardops"] = {**_suite_of(config).machine(), "pass": config.getoption("number")}
