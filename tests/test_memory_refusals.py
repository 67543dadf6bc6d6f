"""Amounts and counts as people write them, and what the planner refuses: each error has the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory import LLAMA
from torch import nn

from shardops.memory import Activations, format_size, parse_count, parse_size, plan

# ---- numbers as people write them ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 * 10**9), ("74GiB", 74 * 2**30), ("1.5 TiB", 3 * 2**39), ("512", 512), ("16g", 16 * 10**9), (7, 7)],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (208 * 10**9, "208.0 GB (193.7 GiB)"),
        (1234 * 10**9, "1,234.0 GB (1,149.3 GiB)"),
        (25 << 20, "26.2 MB (25.0 MiB)"),
        (2048, "2.0 kB (2.0 KiB)"),
        (999, "999 bytes"),
    ],
)
def test_sizes_are_shown(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("13B", 13 * 10**9), ("7.5b", 7_500_000_000), ("350M", 350_000_000), ("7.5e9", 7_500_000_000), ("1_300", 1300)],
)
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count
    assert plan(text).parameters == count


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size is 0; it is at least 1"),
        ({"world_size": 2.0}, TypeError, "world_size is 2.0; it is an integer"),
        ({"zero": 4}, ValueError, "zero is 4; it is a stage, 0 to 3"),
        ({"master": "fp8"}, ValueError, "master is 'fp8'; it is one of 'auto'"),
        ({"state_dtype": "int4"}, ValueError, "state_dtype is 'int4'; it is one of 'float32'"),
        ({"param_dtype": "int8"}, ValueError, "param_dtype is 'int8'; it is float32"),
        ({"grad_dtype": torch.float64}, ValueError, "grad_dtype is torch.float64; it is float32"),
        ({"param_dtype": "fp16", "master": "split32"}, ValueError, "master is 'split32' and parameters are float16"),
        ({"offload_state": "disk"}, ValueError, "offload_state is 'disk'; it is 'cpu'"),
        ({"gradient_release": 1}, TypeError, "gradient_release is 1; it is True or False"),
        ({"gradient_release": True, "world_size": 2}, ValueError, "take zero=3"),
        ({"grad_dtype": "bf16", "param_dtype": "fp32", "zero": 3}, ValueError, "FSDP2 gives each gradient"),
        ({"activations": {"batch": 0, "sequence": 8}}, ValueError, "batch is 0; it is an integer of at least 1"),
        ({"activations": Activations(1, 8), "bucket_bytes": 0}, ValueError, "bucket_bytes is 0"),
        ({"activations": "2GB"}, TypeError, "activations is '2GB'; it is a number of bytes"),
        ({"activations": -1}, ValueError, "activations is -1"),
        ({"buffers": 5}, TypeError, "buffers is 5; it is True, False"),
        ({"device_memory": "lots"}, ValueError, "'lots' is no amount of memory; write 80GB"),
        ({"device_memory": "80"}, None, ""),
        ({"device_memory": 0}, ValueError, "the amount of memory is 0"),
        ({"device_memory": 8.0}, TypeError, "the amount of memory is 8.0"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    if error is None:
        assert plan("13B", **options).device_memory == 80
        return
    with pytest.raises(error, match=message):
        plan("13B", **options)


def test_a_module_is_not_taken_for_a_decoder() -> None:
    with pytest.raises(ValueError, match=r"not known to be a decoder.*--activations 12GB"):
        plan(nn.Linear(2, 2), activations={"batch": 1, "sequence": 8})


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("13 billion", FileNotFoundError, "'13 billion' is neither a number of parameters"),
        (0, ValueError, "the number of parameters is 0"),
        (1.5, TypeError, "model is a float; it is a number of parameters"),
        ({"model_type": "bert"}, ValueError, "model_type is 'bert'; known are llama, mistral"),
        ({"hidden_size": 8}, ValueError, "model_type is None"),
        ({**LLAMA, "hidden_size": None}, ValueError, "the config of a llama has no hidden_size"),
        ({**LLAMA, "vocab_size": "many"}, ValueError, "vocab_size is 'many' in the config"),
        (nn.Identity(), ValueError, "the model has no parameters"),
        (nn.Linear(2, 2, dtype=torch.float64), TypeError, "weight of shape .2, 2. has dtype torch.float64"),
    ],
)
def test_bad_models(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(model)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[1]", "holds a JSON list")])
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        plan(path)
