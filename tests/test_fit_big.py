"""The example that trains a model which did not fit, at sizes that do: its JSON, its arithmetic of bytes, its refusals.

The runs are made once, as users make them; what they measured from live tensors is held against what the formats imply.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STEPS = 4
TINY = f"--params 2M --sequence 64 --threads 1 --seed 3 --device cpu --steps {STEPS}".split()
RUNS = {
    "int8": (),
    "released": ("--gradient-release",),
    "bfloat16": ("--state-dtype", "bfloat16", "--master-weights", "stochastic"),
    "stock": ("--optimizer", "torch"),
}


# One Python makes all runs after another: importing torch takes longer than any of them.
DRIVER = """
import json, runpy, sys
script, *runs = sys.argv[1:]
for sys.argv in map(json.loads, runs):
    runpy.run_path(script, run_name="__main__")
"""


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with this checkout's shardops."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(EXAMPLES)))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def runs(shared_folder: Path) -> dict[str, dict[str, Any]]:
    """Name of a run -> its JSON; what all of them printed under "printed"."""
    folder = shared_folder / "fit_big"
    with FileLock(f"{folder}.lock"):
        if not (folder / "printed.txt").exists():
            commands = [
                json.dumps(["fit_big.py", *TINY, *arguments, "--json", str(folder / f"{name}.json")])
                for name, arguments in RUNS.items()
            ]
            finished = run_python("-c", DRIVER, EXAMPLES / "fit_big.py", *commands)
            assert finished.returncode == 0, finished.stdout + finished.stderr
            (folder / "printed.txt").write_text(finished.stdout)
    printed = {"printed": (folder / "printed.txt").read_text()}
    return {name: json.loads((folder / f"{name}.json").read_text()) | printed for name in RUNS}


@pytest.fixture
def shapes(load: Callable[[str], Any]) -> list[tuple[torch.Size, torch.dtype]]:
    """Of the parameters that the runs trained."""
    big_model = load("big_model")
    model = big_model.build(big_model.choose_config(2_000_000), torch.device("cpu"))
    return [(parameter.shape, parameter.dtype) for parameter in model.parameters()]


def has_int8_states(shape: torch.Size) -> bool:
    return len(shape) == 2 and shape.numel() >= 4096 and shape[1] >= 128


@pytest.mark.parametrize("name", RUNS)
def test_json_and_table(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert type(run["parameters"]) is int
    assert run["parameters"] == pytest.approx(2_000_000, rel=0.01)
    assert type(run["peak_rss_bytes"]) is int
    for series in ("losses", "step_seconds", "learning_rates"):
        assert len(run[series]) == STEPS, series
        assert all(type(value) is float and math.isfinite(value) and value > 0 for value in run[series]), series
    assert run["held_out_losses"]["after"] < run["held_out_losses"]["before"]
    assert sum(run["losses"][-2:]) < sum(run["losses"][:2])
    components = run["bytes_per_parameter"]
    assert set(components) == {"parameters", "gradients", "exp_avg", "exp_avg_sq", "master", "counters", "total"}
    assert components["total"] == pytest.approx(sum(v for k, v in components.items() if k != "total"), rel=1e-12)
    assert run["stock_bytes_per_parameter"]["total"] == 16
    assert f"{components['total']:.4f}" in run["printed"]
    assert {"torch", "shardops", "python"} <= set(run["versions"])
    assert {"cpu", "cores", "threads", "memory_bytes"} <= set(run["machine"])
    assert run["machine"]["threads"] == 1
    assert run["options"]["seed"] == 3


@pytest.mark.parametrize("name", RUNS)
def test_memory_adds_up(runs: dict[str, dict[str, Any]], name: str) -> None:
    """What is resident is the components and a rest, and neither is more than the system's own peak."""
    run = runs[name]
    fullest = dict(run["fullest_moment_bytes"])
    resident = fullest.pop("resident")
    assert sum(fullest.values()) == pytest.approx(resident)
    assert fullest["rest"] > 0
    assert resident <= run["peak_rss_bytes"]
    assert fullest["parameters"] == pytest.approx(run["bytes_per_parameter"]["parameters"] * run["parameters"])


def test_bytes_are_those_of_the_formats(
    runs: dict[str, dict[str, Any]], shapes: list[tuple[torch.Size, torch.dtype]]
) -> None:
    """int8: a code each and 8 bytes a block of 128 (2 of exp_avg, 6 of exp_avg_sq); split24: 1 byte a bf16 weight."""
    expected = dict.fromkeys(("parameters", "gradients", "exp_avg", "exp_avg_sq", "master"), 0.0)
    for shape, dtype in shapes:
        numel = shape.numel()
        expected["parameters"] += numel * dtype.itemsize
        expected["gradients"] += numel * dtype.itemsize
        expected["master"] += numel if dtype == torch.bfloat16 else 0
        blocks = shape[0] * math.ceil(shape[1] / 128) if has_int8_states(shape) else None
        expected["exp_avg"] += 4 * numel if blocks is None else numel + 2 * blocks
        expected["exp_avg_sq"] += 4 * numel if blocks is None else numel + 6 * blocks
    run = runs["int8"]
    numel = sum(shape.numel() for shape, _ in shapes)
    assert run["parameters"] == numel
    for name, nbytes in expected.items():
        assert run["bytes_per_parameter"][name] * numel == pytest.approx(nbytes, abs=0.01), name


def test_other_formats(runs: dict[str, dict[str, Any]], shapes: list[tuple[torch.Size, torch.dtype]]) -> None:
    numel = sum(shape.numel() for shape, _ in shapes)
    norms = sum(shape.numel() for shape, dtype in shapes if dtype == torch.float32)
    assert runs["bfloat16"]["bytes_per_parameter"]["master"] == 0
    assert runs["bfloat16"]["bytes_per_parameter"]["exp_avg"] == pytest.approx(2.0, abs=2 * norms / numel + 1e-6)
    stock = runs["stock"]["bytes_per_parameter"]
    assert (stock["exp_avg"], stock["exp_avg_sq"], stock["master"]) == pytest.approx((4, 4, 4))
    assert stock["parameters"] == pytest.approx(2 + 2 * norms / numel)


def test_gradient_release_holds_one_gradient(
    runs: dict[str, dict[str, Any]], shapes: list[tuple[torch.Size, torch.dtype]]
) -> None:
    """The same training bit for bit, with never more than the largest gradient alive."""
    released, whole = runs["released"], runs["int8"]
    assert released["losses"] == whole["losses"]
    assert released["held_out_losses"] == whole["held_out_losses"]
    largest = max(shape.numel() * dtype.itemsize for shape, dtype in shapes)
    assert released["bytes_per_parameter"]["gradients"] * released["parameters"] == pytest.approx(largest)
    for name in ("parameters", "exp_avg", "exp_avg_sq", "master"):
        assert released["bytes_per_parameter"][name] == whole["bytes_per_parameter"][name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Python and torch are larger than this: refused before there is a model.
        (("--memory-cap", "100MB"), "the memory cap is 0.10 GB, but Python and torch alone may hold"),
        # Enough for Python and torch, and not for 400 MB of parameters: an allocation fails.
        (("--params", "200M", "--memory-cap", "900MB"), "out of memory: building the model did not fit the cap of 900"),
    ],
)
def test_memory_cap(arguments: tuple[str, ...], message: str) -> None:
    finished = run_python(EXAMPLES / "fit_big.py", *TINY, *arguments)
    assert finished.returncode == 1
    assert finished.stderr.startswith(message)
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params 1k", "--params is 1,000, and no decoder of usual proportions is within 1% of it"),
        ("--params big", "'big' is no number of parameters"),
        ("--memory-cap 5XB", "'5XB' is no amount of memory"),
        ("--steps 0", "--steps is 0, but it counts from 1"),
        pytest.param(
            "--device cuda",
            "--device is cuda, but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("--optimizer torch --gradient-release", "--gradient-release is shardops' own"),
    ],
)
def test_refused_arguments(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fit_big.py", *TINY, *arguments.split()])
    with pytest.raises(SystemExit) as refused:
        load("fit_big").main()
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_help(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fit_big.py", "--help"])
    with pytest.raises(SystemExit) as left:
        load("fit_big").main()
    assert left.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("--params", "--memory-cap", "--gradient-release", "--state-dtype", "--master-weights", "--json"):
        assert flag in printed


def test_sizes(load: Callable[[str], Any]) -> None:
    """Counts are met within 1 %, as counted of the modules themselves, by decoders of usual proportions."""
    big_model = load("big_model")
    for text in ("2M", "20M", "350M", "1.9B", "3B", "13B", "70B"):
        count = big_model.parse_count(text)
        config = big_model.choose_config(count)
        with torch.device("meta"):
            model = big_model.Decoder(config)
        numel = sum(parameter.numel() for parameter in model.parameters())
        assert numel == big_model.count_parameters(config)
        assert numel == pytest.approx(count, rel=0.01), text
        assert 2 <= config.hidden / config.dim <= 4
        if count >= 350_000_000:
            assert 40 <= config.dim / config.layers <= 160
    assert [big_model.parse_count(text) for text in ("1.9B", "350M", "20k", "12345")] == [
        1_900_000_000,
        350_000_000,
        20_000,
        12345,
    ]


def test_amounts_of_memory(load: Callable[[str], Any]) -> None:
    parse_bytes = load("memory_use").parse_bytes
    amounts = ("80GB", "22GiB", "1.5gb", "512 MiB", "7")
    assert [parse_bytes(text) for text in amounts] == [80 * 10**9, 22 * 2**30, 1_500_000_000, 2**29, 7]


def test_sliced_linear_is_linear(load: Callable[[str], Any]) -> None:
    """Slices of rows are the whole weight: outputs equal, gradients too, and none is larger than allowed."""
    big_model = load("big_model")
    torch.manual_seed(0)
    layer = big_model.SlicedLinear(48, 100, largest=48 * 30, native=True)
    for weight in layer.slices:
        torch.nn.init.normal_(weight)
    assert [len(weight) for weight in layer.slices] == [25, 25, 25, 25]
    whole = torch.cat(list(layer.slices)).detach().requires_grad_()
    x = torch.randn(5, 48)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, whole))
    layer(x).square().sum().backward()
    torch.nn.functional.linear(x, whole).square().sum().backward()
    torch.testing.assert_close(torch.cat([weight.grad for weight in layer.slices]), whole.grad)


def test_other_errors_are_no_lack_of_memory(load: Callable[[str], Any]) -> None:
    is_out_of_memory = load("memory_use").is_out_of_memory
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as failed:
        torch.randn(2, 3) @ torch.randn(2, 3)
    assert not is_out_of_memory(failed.value)
