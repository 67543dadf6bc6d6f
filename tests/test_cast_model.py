"""cast_model: parameters cast in place, ties and exceptions kept, and refusals that cast nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from distributed import Net
from reference import assert_bits_equal
from torch import Tensor, nn

import shardops

LOW = (torch.bfloat16, torch.float16)


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters(remove_duplicate=False)}


def _refused(model: nn.Module, error: type[Exception], match: str, *args: Any, **options: Any) -> None:
    before = _dtypes(model)
    with pytest.raises(error, match=match):
        shardops.cast_model(model, *args, **options)
    assert _dtypes(model) == before


@pytest.mark.parametrize("dtype", LOW)
def test_parameters_are_cast_in_place(dtype: torch.dtype) -> None:
    model = Net(tied=True, frozen=True)
    before = copy.deepcopy(model)
    objects = {name: (param, param.requires_grad) for name, param in model.named_parameters(remove_duplicate=False)}
    modules = list(model.modules())
    assert shardops.cast_model(model, dtype, keep_fp32=["*.norm.weight", "head.bias"]) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    for (name, param), (_, old) in zip(
        model.named_parameters(remove_duplicate=False), before.named_parameters(remove_duplicate=False), strict=True
    ):
        assert param is objects[name][0]
        assert param.requires_grad == objects[name][1]
        assert param.grad is None
        is_kept = name in ("blocks.0.norm.weight", "blocks.1.norm.weight", "head.bias")
        assert_bits_equal(param, old if is_kept else old.to(dtype), name)
    assert model.head.weight is model.embedding.weight
    shardops.cast_model(model, torch.float32)
    assert set(_dtypes(model).values()) == {torch.float32}


def test_a_tied_parameter_is_kept_under_any_of_its_names() -> None:
    for name in ("head.weight", "embedding.weight"):
        model = shardops.cast_model(Net(tied=True), torch.bfloat16, keep_fp32=[name])
        kept = {key for key, dtype in _dtypes(model).items() if dtype == torch.float32}
        assert kept == {"head.weight", "embedding.weight"}


def test_one_pattern_may_be_a_plain_string_and_case_matters() -> None:
    model = shardops.cast_model(Net(), torch.bfloat16, keep_fp32="*.norm.*")
    assert {name for name, dtype in _dtypes(model).items() if dtype == torch.float32} == {
        f"blocks.{i}.norm.{part}" for i in range(2) for part in ("weight", "bias")
    }
    _refused(Net(), ValueError, r"'\*\.Norm\.weight', which matches none", torch.bfloat16, keep_fp32=["*.Norm.weight"])


def test_gradients_are_cast_along() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.bfloat16()
    shardops.cast_model(model, torch.bfloat16)
    assert_bits_equal(model.weight.grad, expected)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert_bits_equal(model.weight.grad, 2 * expected)


class _Mixed(nn.Module):
    """Parameters of every kind that there is, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        self.quantised = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)


def test_what_is_no_floating_point_parameter_is_left_alone() -> None:
    model = shardops.cast_model(_Mixed(), torch.bfloat16)
    assert _dtypes(model) == {
        "wide": torch.bfloat16,
        "waves": torch.complex64,
        "codes": torch.int8,
        "quantised": torch.float8_e4m3fn,
        "norm.weight": torch.bfloat16,
        "norm.bias": torch.bfloat16,
    }
    assert model.norm.running_mean.dtype == model.norm.running_var.dtype == torch.float32


def test_meta_and_lazy_models() -> None:
    with torch.device("meta"):
        model = Net(tied=True)
    shardops.cast_model(model, torch.float16, keep_fp32=["head.bias"]).to_empty(device="cpu")
    assert {name for name, dtype in _dtypes(model).items() if dtype != torch.float16} == {"head.bias"}
    lazy = shardops.cast_model(nn.LazyLinear(3), torch.bfloat16)
    lazy(torch.ones(1, 2, dtype=torch.bfloat16))
    assert lazy.weight.dtype == lazy.bias.dtype == torch.bfloat16


def test_one_parameter_at_a_time_exists_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next parameter is cast, the last one's old values are gone."""
    model = nn.ParameterList(torch.full((3,), float(i)) for i in range(4))
    held: list[int] = []
    cast = Tensor.to

    def counted(tensor: Tensor, *args: Any) -> Tensor:
        held.append(sum(param.dtype == torch.float32 for param in model))
        return cast(tensor, *args)

    monkeypatch.setattr(Tensor, "to", counted)
    shardops.cast_model(model, torch.bfloat16)
    assert held == [4, 3, 2, 1]


def test_refusals(dtensor: Tensor) -> None:
    _refused(Net(), ValueError, "dtype is torch.float64; .* pass one of", torch.float64)
    _refused(Net(), ValueError, "dtype is torch.complex64", torch.complex64)
    _refused(Net(), ValueError, "'norm', which matches none", torch.bfloat16, keep_fp32=["*.norm.*", "norm"])
    model = nn.ParameterDict({"plain": torch.ones(2), "sharded": nn.Parameter(dtensor)})
    _refused(model, TypeError, "'sharded' is a DTensor: .* before fully_shard", torch.bfloat16)
    model = nn.ParameterDict({"plain": torch.ones(2), "flat": torch.ones(2)})
    model["flat"]._fsdp_flattened = True  # as FSDP1 marks its own
    _refused(model, TypeError, "'flat' is a slice of an FSDP1", torch.bfloat16)
