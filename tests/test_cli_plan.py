"""``shardops plan``: published figures through the command line, its JSON, exit codes, errors and measuring.

The planner's own arithmetic is tested beside it; here it is what goes in by options and comes out as text.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardops import memory
from shardops.cli import main
from shardops.cli.plan import flags

ROOT = Path(__file__).resolve().parents[1]
PER_RANK = ["parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "activations", "buffers", "total"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}

Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The exit code of ``shardops plan ... --json``, and what it printed: nothing but JSON."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["plan", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "total", "shown"),
    [
        ("0", 120_000_000_000, "120.0 GB"),
        ("1", 31_406_250_000, "31.4 GB"),
        ("2", 16_640_625_000, "16.6 GB"),
        ("3", 1_875_000_000, "1.9 GB"),
    ],
)
def test_the_zero_papers_example(
    stage: str, total: int, shown: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rajbhandari et al. (2020), figure 1: 7.5 billion parameters, 64 ranks, 2 + 2 + 12 bytes."""
    arguments = ["7.5B", "--world-size", "64", "--zero", stage, "--master", "fp32"]
    code, found = plan(*arguments)
    assert code == 0
    assert found["per_rank"]["total"] == total
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert f"7,500,000,000 parameters, ZeRO stage {stage}, 64 ranks" in text
    assert f" {total:,} " in text
    assert shown in text


def test_thirteen_billion_on_eighty_gigabytes() -> None:
    """26 GB on disk, and too large by 128 GB; in a process of its own."""
    command = [
        *(sys.executable, "-m", "shardops", "plan", "13B"),
        "--device-memory",
        "80GB",
        "--master",
        "fp32",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert list(found["per_rank"]) == PER_RANK
    assert found["per_rank"] == {
        "parameters": 26_000_000_000,
        "gradients": 26_000_000_000,
        **dict.fromkeys(["master", "exp_avg", "exp_avg_sq"], 52_000_000_000),
        **dict.fromkeys(["activations", "buffers"], 0),
        "total": 208_000_000_000,
    }
    assert found["bytes_per_parameter"] == 16.0
    assert (found["fits"], found["device_memory"], found["parameters"]) == (False, 80_000_000_000, 13_000_000_000)
    for suggestion in found["suggestions"]:
        assert suggestion.keys() == {"text", "changes", "total"}
        assert suggestion["total"] <= 80_000_000_000
        assert suggestion["changes"]
    assert found["suggestions"]


def test_json_is_the_plans_own(plan: Plan) -> None:
    _, found = plan("350M", "--state-dtype", "int8", "--device-memory", "1GB")
    expected = memory.plan("350M", state_dtype="int8", device_memory="1GB").to_json()
    assert found == expected
    assert list(found) == list(expected)
    types = {name: type(found[name]) for name in ("per_rank", "bytes_per_parameter", "fits", "suggestions", "options")}
    assert types == {"per_rank": dict, "bytes_per_parameter": float, "fits": bool, "suggestions": list, "options": dict}


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--world-size", "3"], "world_size", 3),
        (["--zero", "2"], "zero", 2),
        (["--param-dtype", "float32"], "param_dtype", "float32"),
        (["--compute-dtype", "float16"], "compute_dtype", "float16"),
        (["--grad-dtype", "float32"], "grad_dtype", "float32"),
        (["--reduce-dtype", "bfloat16"], "reduce_dtype", "bfloat16"),
        (["--state-dtype", "int8"], "state_dtype", "int8"),
        (["--master", "split24"], "master", "split24"),
        (["--amsgrad"], "amsgrad", True),
        (["--gradient-release"], "gradient_release", True),
        (["--gradient-as-bucket-view"], "gradient_as_bucket_view", True),
        (["--offload-state", "cpu"], "offload_state", "cpu"),
        (["--buffers"], "buffers", True),
        (["--no-buffers"], "buffers", False),
        (["--bucket-size", "10MiB"], "bucket_bytes", 10 << 20),
        (["--activations", "2GB"], "activations", 2_000_000_000),
    ],
)
def test_options_arrive(arguments: list[str], name: str, value: Any, plan: Plan) -> None:
    default = plan("1B")[1]["options"]
    _, found = plan("1B", *arguments)
    assert found["options"] == {**default, name: value}
    assert default[name] != value


def test_options_of_activations(plan: Plan, config: str) -> None:
    run = ["--batch", "2", "--sequence", "128"]
    expected = {"batch": 2, "sequence": 128, "checkpointing": "none", "flash_attention": True}
    least = plan(config, *run)[1]
    assert least["options"]["activations"] == expected
    assert least["per_rank"]["activations"] > 0
    checkpointed = plan(config, *run, "--checkpointing")[1]
    assert checkpointed["options"]["activations"] == {**expected, "checkpointing": "full"}
    assert checkpointed["per_rank"]["activations"] < least["per_rank"]["activations"]
    scores = plan(config, *run, "--no-flash-attention", "--checkpointing", "selective")[1]
    assert scores["options"]["activations"] == {**expected, "flash_attention": False, "checkpointing": "selective"}


def test_every_option_of_the_planner_can_be_given() -> None:
    """But for what has no place on a command line: lists of all ranks, and what FSDP2 is plugged in with."""
    from shardops.cli.plan import _PLAIN
    from shardops.memory.options import Options

    left_out = {"offload_bucket_bytes", "shadows", "bucket_bytes", "activations"}
    assert set(Options.__dataclass_fields__) - set(_PLAIN) == left_out
    assert "device_memory" in inspect.signature(memory.plan).parameters


# ---- exit codes and texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "code", "fits"),
    [(None, 0, None), ("15GB", 0, True), ("14GB", 0, True), ("13.9GB", 1, False), ("14GiB", 0, True)],
)
def test_exit_codes(device: str | None, code: int, fits: bool | None, plan: Plan) -> None:
    """A billion parameters take 14 GB by default."""
    found = plan("1B", *([] if device is None else ["--device-memory", device]))
    assert (found[0], found[1]["fits"]) == (code, fits)


def test_how_much_is_missing_in_both_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "13B", "--device-memory", "80GB", "--master", "fp32"]) == 1
    text = capsys.readouterr().out
    assert "does not fit: 128.0 GB (119.2 GiB) too much" in text
    assert "The cheapest changes that make it fit" in text
    assert text.count("not counted") == 3  # two rows, and the verdict
    assert main(["plan", "1B", "--device-memory", "20GB"]) == 0
    text = capsys.readouterr().out
    assert "fits, with 6.0 GB (5.6 GiB) left" in text
    assert "cheapest" not in text


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["plan", "13B", "--device-memory", "80GB", "--master", "fp32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (total,) = (line for line in lines if line.startswith("total"))
    assert total.split() == ["total", "208,000,000,000", "208.0", "GB", "(193.7", "GiB)", "16.00", "100.0", "%"]
    assert not any("│" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ["13B", "--device-memory", "80GB", "--master", "fp32"],
        ["13B", "--device-memory", "20GiB", "--world-size", "4"],
        ["config", "--device-memory", "50MB", "--batch", "4", "--sequence", "256", "--no-flash-attention"],
    ],
)
def test_suggested_options_lead_there(arguments: list[str], plan: Plan, config: str) -> None:
    """The options printed beside a suggestion, added to the command, give its total, and it fits."""
    arguments = [config if argument == "config" else argument for argument in arguments]
    code, found = plan(*arguments)
    assert code == 1
    assert len(found["suggestions"]) > 1
    for suggestion in found["suggestions"]:
        code, changed = plan(*arguments, *flags(suggestion["changes"]).split())
        assert (code, changed["per_rank"]["total"]) == (0, suggestion["total"]), suggestion["text"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["13 apples"], "neither a number of parameters (13B, 350M) nor a file"),
        ([], "SIZE_OR_CONFIG is missing"),
        (["13B", "--device-memory", "80 bananas"], "no amount of memory"),
        (["13B", "--world-size", "0"], "world_size is 0"),
        (["13B", "--batch", "2"], "--batch without both --batch and --sequence"),
        (["13B", "--batch", "2", "--sequence", "8", "--activations", "1GB"], "are both given"),
        (["13B", "--gradient-release", "--world-size", "2"], "gradient_release is True with zero=0"),
        (["13B", "--png", "picture.docx"], "docx"),
        (["13B", "--png", "/not/there/picture.png"], "/not/there/picture.png"),
        (["--measure", "nowhere_to_be_found:build"], "No module named 'nowhere_to_be_found'"),
        (["--measure", "json:nothing"], "no attribute 'nothing'"),
        (["--measure", "json"], "it is MODULE:FACTORY"),
        (["1e400"], "it is at least 1 and less than 1e+16"),
        (["3000000T"], "it is at least 1 and less than 1e+16"),
        (["13B", "--device-memory", "1e400GB"], "less than 1e+16"),
        (["--measure", "json:dumps", "--zero", "3"], "zero cannot be measured"),
    ],
)
def test_errors_are_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = streams.err.splitlines()
    assert line.startswith("shardops plan: error: ")
    assert reason in line


# ---- measuring -------------------------------------------------------------------------------------------------------

FACTORY = """
import torch

def build():
    print("a model speaks")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return model, torch.randn(8, 64)

def fails():
    raise ValueError("no data\\n  in the folder")

def frozen():
    return torch.nn.Linear(2, 2).requires_grad_(False)

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, batch):
        return self.nothing_of_this_name * batch

def broken():
    return Broken(), torch.ones(2)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_of_this_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_of_this_test", raising=False)
    return "models_of_this_test:build"


def test_measured_beside_planned(factory: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan("--measure", factory, "--state-dtype", "int8", "--device-memory", "1MB")
    assert (code, found["fits"], found["options"]["state_dtype"]) == (0, True, "int8")
    assert found["parameters"] == 2 * 64 * 256 + 256 + 64
    measured = found["measured"]["measured"]
    held = PER_RANK[:5]
    assert {name: measured[name] for name in held} == {name: found["per_rank"][name] for name in held}
    assert measured["exp_avg"] > found["parameters"]
    assert main(["plan", "--measure", factory]) == 0
    text = capsys.readouterr().out
    assert "Measured in this process: one step, forward and backward" in text
    assert "+0.00 %" in text
    assert "none planned" in text  # activations


def test_a_factory_that_fails(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", factory.replace("build", "fails")]) == 2
    assert capsys.readouterr().err == "shardops plan: error: no data in the folder\n"


def test_a_model_that_fails_shows_where(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its fault is no import's, and exit code 1 would say that it does not fit."""
    assert main(["plan", "--measure", factory.replace("build", "broken")]) == 2
    said = capsys.readouterr().err
    assert "in forward" in said
    assert "failed: AttributeError: 'Broken' object has no attribute 'nothing_of_this_name'" in said.splitlines()[-1]
    assert main(["plan", "--measure", factory.replace("build", "frozen")]) == 2
    assert "no parameter that requires a gradient" in capsys.readouterr().err


def test_activations_of_a_plan_are_not_asked_of_the_measured_model(factory: str, plan: Plan) -> None:
    code, found = plan("7B", "--batch", "1", "--sequence", "8", "--measure", factory)
    assert code == 0
    assert found["per_rank"]["activations"] > 0
    assert found["measured"]["planned"]["activations"] == 0


def test_measured_beside_another_plan(factory: str, plan: Plan) -> None:
    """What is planned may be on many ranks; what is measured is on one."""
    code, found = plan("13B", "--zero", "3", "--world-size", "8", "--master", "none", "--measure", factory)
    assert (code, found["parameters"]) == (0, 13_000_000_000)
    assert found["measured"]["plan"]["options"]["world_size"] == 1
    assert found["measured"]["plan"]["options"]["master"] == "none"
    assert found["measured"]["measured"]["parameters"] == 4 * (2 * 64 * 256 + 256 + 64)
