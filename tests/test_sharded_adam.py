"""sharded_adam: known answers, scalars, the split of fp32 masters, and sizes past 2^31."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import (
    DTYPES,
    AdamLists,
    RepeatedMemory,
    adam_lists,
    assert_bits_equal,
    awkward,
    fresh,
    fresh_format,
    from_patterns,
    join,
    ordinary,
    split,
)
from torch import Tensor

from shardops import ops


def master_of(lists: AdamLists) -> Tensor:
    if not lists.masters:
        return lists.params[0]
    if lists.masters[0].dtype == torch.bfloat16:
        return join(lists.params[0], lists.masters[0])
    return lists.masters[0]


FORMATS = [
    pytest.param(torch.float32, None, id="fp32"),
    pytest.param(torch.float32, "fp32", id="fp32-fp32"),
    pytest.param(torch.bfloat16, "split", id="bf16-split"),
    pytest.param(torch.bfloat16, "fp32", id="bf16-fp32"),
    pytest.param(torch.float16, "fp32", id="fp16-fp32"),
]

# ---- known answers ---------------------------------------------------------------------------------------------------


def test_gradients_are_unscaled_once(backend: str) -> None:
    """Two gradients of 1 and 2 under a scale of 65536: one step of lr and one decay, no second division."""
    lists = fresh([1.0, 1.0], grads=[[65536.0, 131072.0]])
    scalars = {"grad_scale": torch.tensor(65536.0), "found_inf": torch.tensor(0.0)}
    lists.update(backend, lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True, **scalars)
    torch.testing.assert_close(lists.params[0], torch.full((2,), 0.99899), rtol=0, atol=6e-8)
    torch.testing.assert_close(lists.exp_avgs[0], torch.tensor([0.1, 0.2]), rtol=0, atol=2e-8)
    assert lists.grads[0].tolist() == [65536.0, 131072.0], "gradients stay scaled"

    unscaled = fresh([1.0, 1.0], grads=[[1.0, 2.0]])
    unscaled.update(backend, lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    assert_bits_equal(lists.params[0], unscaled.params[0])


def test_fp16_parameters_do_not_blow_up(backend: str) -> None:
    """An eps of 1e-8 is 0 in fp16; nothing here is computed in fp16."""
    values = [1.0, -2.0, 0.5]
    masters = [torch.tensor(values)]
    still = fresh(values, grads=[[0.0] * 3], dtype=torch.float16, masters=masters)
    still.update(backend, lr=1e-2, weight_decay=0.01)
    assert still.params[0].isfinite().all()

    moved = fresh(values, grads=[torch.full((3,), 1e-5).half()], dtype=torch.float16, masters=[torch.tensor(values)])
    moved.update(backend, lr=1e-2)
    torch.testing.assert_close(moved.masters[0], torch.tensor(values) - 0.01, rtol=0, atol=2e-5)
    assert_bits_equal(moved.params[0], moved.masters[0].half())


def test_decay_comes_before_the_update(backend: str) -> None:
    lists = fresh([1.0], grads=[[1.0]])
    lists.update(backend, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    torch.testing.assert_close(lists.params[0], torch.tensor([0.89]), rtol=0, atol=1e-7)  # never 0.891


def test_coupled_and_decoupled_decay(backend: str) -> None:
    coupled = fresh([1.0], grads=[[0.0]]).update(backend, lr=1e-3, weight_decay=0.1)
    torch.testing.assert_close(coupled.params[0], torch.tensor([0.999]), rtol=0, atol=6e-8)
    torch.testing.assert_close(coupled.exp_avgs[0], torch.tensor([0.01]), rtol=0, atol=1e-9)
    torch.testing.assert_close(coupled.exp_avg_sqs[0], torch.tensor([1e-5]), rtol=0, atol=1e-12)

    decoupled = fresh([1.0], grads=[[0.0]])
    decoupled.update(backend, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
    torch.testing.assert_close(decoupled.params[0], torch.tensor([0.9999]), rtol=0, atol=6e-8)
    assert decoupled.exp_avgs[0] == 0
    assert decoupled.exp_avg_sqs[0] == 0


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3), torch.tensor([1e-3], dtype=torch.float64)], ids=str)
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_first_step_is_lr(backend: str, param_dtype: torch.dtype, master: str | None, lr: float | Tensor) -> None:
    """Fresh moments and step 0: an update of lr, not 0.744 lr as after a hidden step with zero gradients."""
    lists = fresh_format(torch.ones(5), torch.full((5,), 0.37), param_dtype, master)
    lists.update(backend, lr=lr)
    torch.testing.assert_close(master_of(lists), torch.full((5,), 0.999), rtol=0, atol=1.2e-7)
    assert lists.steps.tolist() == [1.0]


def test_master_moves_where_bf16_cannot(backend: str) -> None:
    lists = fresh_format(torch.ones(1), torch.ones(1), torch.bfloat16, "split").update(backend, lr=1e-4)
    assert lists.params[0] == 1.0
    torch.testing.assert_close(master_of(lists), torch.tensor([0.9999]), rtol=0, atol=6e-8)


@pytest.mark.parametrize("shapes", [[(4,), (0, 8)], [(0, 8), (4,)], [(0, 8), (0,)]], ids=str)
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_empty_tensors(
    backend: str, shapes: list[tuple[int, ...]], param_dtype: torch.dtype, master: str | None
) -> None:
    lists = adam_lists(shapes, 1, param_dtype=param_dtype, master=master, shadow_dtype=torch.bfloat16)
    lists.steps.zero_()
    for index, shape in enumerate(shapes):
        high, remainder = split(torch.ones(shape))
        lists.params[index].copy_(high)
        if master:
            lists.masters[index].copy_(remainder if master == "split" else torch.ones(shape))
        lists.grads[index].fill_(1)
        lists.exp_avgs[index].zero_()
        lists.exp_avg_sqs[index].zero_()
    lists.update(backend, lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    for index, shape in enumerate(shapes):
        assert {t.shape for name, t in lists.named() if name.endswith(f"[{index}]") and t is not lists.steps} == {shape}
        if math.prod(shape):
            torch.testing.assert_close(
                lists.shadows[index].float(), torch.full(shape, 0.99899).bfloat16().float(), rtol=0, atol=0
            )
    assert lists.steps.tolist() == [1.0, 1.0]


def test_no_tensors(backend: str) -> None:
    ops.sharded_adam([], [], [], [], torch.zeros(0), lr=1e-3, backend=backend)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("param_dtype", "master"), FORMATS)
def test_found_inf_writes_nothing(backend: str, param_dtype: torch.dtype, master: str | None, amsgrad: bool) -> None:
    lists = adam_lists(
        [(70,), (3, 5)], 2, param_dtype=param_dtype, master=master, shadow_dtype=torch.float16, amsgrad=amsgrad
    )
    lists.grads[0][3] = math.nan
    lists.grads[1][0, 0] = math.inf
    before = lists.clone()
    scalars = {"grad_scale": torch.tensor(2.0), "clip_coef": torch.tensor(math.nan)}
    lists.update(backend, lr=0.1, weight_decay=0.1, found_inf=torch.tensor([1.0]), **scalars)
    lists.assert_same(before)
    lists.update(backend, lr=0.1, weight_decay=0.1, found_inf=torch.tensor([0.0]))
    assert (lists.steps == before.steps + 1).all()
    assert (lists.params[0] != before.params[0]).any()


@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_nonfinite_gradients_propagate_as_in_torch(backend: str, beta1: float) -> None:
    grads = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 3e38, -3e38, 1e-45, 0.0])
    lists = fresh(torch.ones(8), grads=[grads], max_exp_avg_sqs=[torch.zeros(8)])
    param = torch.ones(8, requires_grad=True)
    theirs = torch.optim.AdamW([param], lr=0.1, betas=(beta1, 0.999), amsgrad=True, foreach=False, weight_decay=0.1)
    param.grad = grads.clone()
    for _ in range(2):
        lists.update(backend, lr=0.1, beta1=beta1, weight_decay=0.1, decoupled_weight_decay=True)
        theirs.step()
    state = theirs.state[param]
    for mine, other in (
        (lists.params, param.detach()),
        (lists.exp_avgs, state["exp_avg"]),
        (lists.exp_avg_sqs, state["exp_avg_sq"]),
        (lists.max_exp_avg_sqs, state["max_exp_avg_sq"]),
    ):
        torch.testing.assert_close(mine[0], other, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert lists.params[0].isnan().tolist() == [True, True, True, False, False, False, False, False]


# ---- scalars ---------------------------------------------------------------------------------------------------------


def test_clip_and_scale_are_one_rounding_each(backend: str) -> None:
    """As if the gradient had been divided, then multiplied, in float32 beforehand."""
    for dtype in DTYPES:
        scale, clip = torch.tensor(3.0), torch.tensor(0.3)
        lists = adam_lists([(500,)], 3, grad_dtype=dtype)
        beforehand = lists.clone()
        beforehand.grads = [lists.grads[0].float() / 3.0 * clip]
        lists.update(backend, lr=1e-2, grad_scale=scale, clip_coef=clip)
        beforehand.update(backend, lr=1e-2)
        assert_bits_equal(lists.params[0], beforehand.params[0])
        assert_bits_equal(lists.exp_avg_sqs[0], beforehand.exp_avg_sqs[0])


def test_maximize_is_the_negated_gradient(backend: str) -> None:
    for weight_decay in (0.0, 0.1):
        lists = adam_lists([(500,)], 4)
        negated = lists.clone()
        negated.grads = [-lists.grads[0]]
        lists.update(backend, lr=1e-2, maximize=True, clip_coef=torch.tensor(0.7), weight_decay=weight_decay)
        negated.update(backend, lr=1e-2, clip_coef=torch.tensor(0.7), weight_decay=weight_decay)
        assert_bits_equal(lists.params[0], negated.params[0])


def test_tensor_lr_is_its_value(backend: str) -> None:
    lists = adam_lists([(300,)], 5)
    for value in (torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1])):
        with_tensor, with_number = lists.clone(), lists.clone()
        options: dict[str, Any] = {"weight_decay": 0.3, "decoupled_weight_decay": True}
        with_tensor.update(backend, lr=value, **options)
        with_number.update(backend, lr=float(value), **options)
        with_tensor.assert_same(with_number)


def test_lr_tensor_is_read_at_each_call(backend: str) -> None:
    lists = fresh([0.0], grads=[[1.0]])
    lr = torch.tensor(1e-3)
    lists.update(backend, lr=lr)
    lr.fill_(0.0)
    before = lists.params[0].clone()
    lists.update(backend, lr=lr)
    assert_bits_equal(lists.params[0], before)


def test_each_parameter_has_its_own_step(backend: str) -> None:
    """Counters by position and by index give what each parameter alone would get; others are not counted."""
    lists = adam_lists([(40,), (3, 4), (7,)], 6, first_step=5)
    lists.steps = torch.tensor([0.0, 100.0, 3.0, 16_777_216.0, 9.0])
    index = torch.tensor([2, 0, 3])
    together = lists.clone().update(backend, lr=1e-2, step_index=index)
    assert together.steps.tolist() == [1.0, 100.0, 4.0, 16_777_216.0, 9.0], "float32 counts to 2^24"
    for i, position in enumerate(index.tolist()):
        alone = AdamLists(
            [lists.params[i].clone()],
            [lists.grads[i]],
            [lists.exp_avgs[i].clone()],
            [lists.exp_avg_sqs[i].clone()],
            steps=lists.steps[position : position + 1].clone(),
        ).update(backend, lr=1e-2)
        assert_bits_equal(together.params[i], alone.params[0])


def test_shadow_is_the_rounded_master(backend: str) -> None:
    """Round to nearest even as ``.to()``, unlike the split's bf16, which rounds ties away from zero."""
    values = torch.cat([awkward(3000, 7), from_patterns([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xBF808000])])
    for param_dtype, master in ((torch.float32, None), (torch.bfloat16, "split"), (torch.float16, "fp32")):
        for shadow_dtype in DTYPES:
            shadows = [torch.empty(values.shape, dtype=shadow_dtype)]
            lists = fresh_format(values, torch.zeros(values.shape), param_dtype, master, shadows=shadows)
            lists.update(backend, lr=0.0)
            assert_bits_equal(lists.shadows[0], values.to(shadow_dtype))


# ---- split fp32 ------------------------------------------------------------------------------------------------------


def split_sample() -> Tensor:
    """Every bf16 with the remainders around ties and ends: each exponent, each sign, NaNs and infinities."""
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF])
    return from_patterns(((torch.arange(1 << 16) << 16)[:, None] + low).view(-1))


def test_split_round_trip(backend: str) -> None:
    """An update that changes nothing decodes and encodes: every value but NaN comes back bit for bit."""
    values = split_sample()
    lists = fresh_format(
        values, torch.zeros(1).expand(values.shape), torch.bfloat16, "split", shadows=[torch.empty(values.shape)]
    )
    before = lists.clone()
    lists.update(backend, lr=0.0)
    assert_bits_equal(lists.shadows[0], values, "decoded")
    finite = ~values.isnan()
    assert_bits_equal(lists.params[0][finite], before.params[0][finite], "bf16", exact=True)
    assert_bits_equal(lists.masters[0][finite], before.masters[0][finite], "remainder", exact=True)
    assert (lists.params[0][~finite].view(torch.int16) == 0x7FC0).all(), "a NaN stays a NaN"
    assert (lists.masters[0][~finite].view(torch.int16) == 0).all()


def test_split_at_its_corners(backend: str) -> None:
    """FLT_MAX has an infinite bf16 and a finite master; ties go away from zero; -0.0 and denormals survive."""
    patterns = [0x3F808000, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF]
    values = from_patterns(patterns)
    lists = fresh_format(values, torch.zeros(8), torch.bfloat16, "split").update(backend, lr=0.0)
    assert_bits_equal(master_of(lists), values, exact=True)
    highs = [0x3F81, 0xBF81, 0x7F80, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x8080]
    assert [v & 0xFFFF for v in lists.params[0].view(torch.int16).tolist()] == highs
    assert [v & 0xFFFF for v in values.bfloat16().view(torch.int16).tolist()][:2] == [0x3F80, 0xBF80]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_split_follows_the_fp32_trajectory(backend: str, amsgrad: bool) -> None:
    values = ordinary(4000, seed=8) * 10.0 ** ordinary(4000, seed=9)
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}
    extra = [{"max_exp_avg_sqs": [torch.zeros(4000)]} if amsgrad else {} for _ in range(2)]
    fp32 = fresh_format(values, torch.zeros(4000), torch.float32, None, **extra[0])
    low = fresh_format(values, torch.zeros(4000), torch.bfloat16, "split", **extra[1])
    for step in range(20):
        grad = ordinary(4000, seed=100 + step).bfloat16()
        fp32.grads, low.grads = [grad], [grad]
        fp32.update(backend, **options)
        low.update(backend, **options)
    assert_bits_equal(master_of(low), fp32.params[0], exact=True)
    assert_bits_equal(low.exp_avg_sqs[0], fp32.exp_avg_sqs[0], exact=True)


# ---- size ------------------------------------------------------------------------------------------------------------


def test_many_tensors_of_more_than_31_bits_together() -> None:
    """The chunk table's positions: 2^31 elements of work before the last tensor, over memory for 2^18."""
    numel, count = 1 << 18, (1 << 13) + 1

    def filled(value: float, last: float) -> list[Tensor]:
        return [torch.full((numel,), value)] * count + [torch.full((3,), last)]

    params, grads = filled(1.0, 1.0), filled(0.0, 1.0)
    steps = torch.zeros(count + 1)
    ops.sharded_adam(params, grads, filled(0.0, 0.0), filled(0.0, 0.0), steps, lr=0.25, backend="cpp")
    assert params[-1].tolist() == [0.75] * 3
    assert (params[0] == 1.0).all()
    assert (steps == 1.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("master", [None, "split"])
@pytest.mark.parametrize("numel", [2**31, 2_359_332_864, 2**32 + 1])
def test_last_element_past_31_bits(numel: int, master: str | None) -> None:
    """One tensor; memory that repeats stands for all but its end. Doing nothing at all is the usual failure."""
    torch.set_num_threads(2)
    dtype = torch.float32 if master is None else torch.bfloat16
    with (
        RepeatedMemory(numel, dtype) as param,
        RepeatedMemory(numel, torch.bfloat16) as grad,
        RepeatedMemory(numel, torch.float32) as exp_avg,
        RepeatedMemory(numel, torch.float32) as exp_avg_sq,
        RepeatedMemory(numel, torch.bfloat16) as remainder,
    ):
        end = 12 << 20  # elements: more than the memory of its own at the end
        param[: 4 << 20].fill_(1.0)
        param[-end:].fill_(1.0)
        grad[-1] = 1.0
        masters = [] if master is None else [remainder]
        steps = torch.zeros(1)
        ops.sharded_adam([param], [grad], [exp_avg], [exp_avg_sq], steps, lr=0.25, masters=masters, backend="cpp")
        assert param[-3:].tolist() == [1.0, 1.0, 0.75]
        assert exp_avg[-3:].tolist()[:2] == [0.0, 0.0]
        assert exp_avg[-1] == torch.tensor(0.1)
        assert (param[: 4 << 20] == 1.0).all()
        assert steps == 1.0
