"""The ops under torch's tracers: opcheck of every overload, torch.compile of the typed functions, and FakeTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adam_modes import SPLIT24, STOCHASTIC, dither_table, mode_lists
from reference import AdamLists, adam_lists, assert_bits_equal, ordinary, unaligned
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardops import ops

PRIMITIVES = ("flatten_shard", "unflatten_shard", "cast_gather", "grad_norm", "sharded_adam")
OVERLOADS = ("default", "reference")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)  # type: ignore[no-any-return]


# ---- opcheck ---------------------------------------------------------------------------------------------------------


def adam_arguments(lists: AdamLists, **given: Any) -> tuple[Any, ...]:
    """Arguments of the op itself, in its order."""
    options: dict[str, Any] = {
        "step_index": None,
        "dither": None,
        "rounding": 0,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
    }
    options |= {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": False}
    options |= {"lr_tensor": None, "clip_coef": None, "grad_scale": None, "found_inf": None, **given}
    return (
        *(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs, lists.masters),
        *(lists.shadows, lists.block_words, lists.steps, *options.values()),
    )


def quantised_arguments() -> tuple[Any, ...]:
    lists = mode_lists([(2, 200), (3, 5)], 4, "int8", SPLIT24)
    return adam_arguments(lists, dither=dither_table(lists, 4))


def stochastic_arguments() -> tuple[Any, ...]:
    lists = mode_lists([(7,)], 5, "bf16", STOCHASTIC)
    return adam_arguments(lists, dither=dither_table(lists, 5), rounding=2)


SCALARS: dict[str, Tensor] = {
    "lr_tensor": torch.tensor(0.1, dtype=torch.float64),
    "clip_coef": torch.tensor(0.5),
    "grad_scale": torch.tensor(4.0),
    "found_inf": torch.tensor(0.0),
}

SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "flatten_shard": [
        (torch.zeros(2, 8), [ordinary(3, 2, seed=1), ordinary(5, seed=2)], torch.tensor([[0, 1, 0, 5], [1, 0, 9, 5]])),
        (torch.zeros(9).half(), [ordinary(5, seed=1)], torch.tensor([[-1, 0, 0, 4], [0, 0, 4, 5]]), 0.5),
        (torch.zeros(0), [], torch.zeros(0, 4, dtype=torch.int64)),
    ],
    "unflatten_shard": [
        (ordinary(2, 8, seed=1), [torch.zeros(3, 2), torch.zeros(5)], torch.tensor([[0, 1, 0, 5], [1, 0, 9, 5]])),
        (ordinary(9, seed=1), [torch.zeros(5).bfloat16()], torch.tensor([[0, 0, 4, 5], [-1, 0, 0, 4]]), 0.5),
    ],
    "cast_gather": [
        (torch.zeros(9).bfloat16(), [ordinary(2, 2, seed=1), ordinary(5, seed=2).half()]),
        (torch.zeros(0), []),
    ],
    "grad_norm": [([ordinary(70, seed=1), ordinary(3, 2, seed=2).bfloat16()], 2.0), ([torch.ones(3)], float("inf"))],
    "sharded_adam": [
        adam_arguments(adam_lists([(5,), (2, 3), (0,)], 1)),
        adam_arguments(
            adam_lists([(5,), (2, 3)], 2, master="split", shadow_dtype=torch.float16, amsgrad=True),
            step_index=torch.tensor([1, 0]),
            **SCALARS,
        ),
        adam_arguments(
            adam_lists([(5,)], 3, param_dtype=torch.float16, master="fp32"), decoupled_weight_decay=False, maximize=True
        ),
        quantised_arguments(),
        stochastic_arguments(),
    ],
}


def test_every_op_has_samples() -> None:
    assert SAMPLES.keys() == set(PRIMITIVES)


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize(("primitive", "sample"), [(p, i) for p in PRIMITIVES for i in range(len(SAMPLES[p]))])
def test_opcheck(primitive: str, sample: int, overload: str) -> None:
    """Schema (what is mutated and what is not), fake implementation, and tracing with symbolic shapes."""
    op = getattr(getattr(torch.ops.shardops, primitive), overload)
    arguments = SAMPLES[primitive][sample]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    result = torch.library.opcheck(op, arguments, test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_default_and_reference_are_different_code(primitive: str) -> None:
    """The default overload has a kernel of its own on the CPU: not two names of one function, compared with itself."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"shardops::{primitive}", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"shardops::{primitive}.reference", "CPU")


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "per_param"])
def test_compiled_flatten_and_unflatten(backend: str, layout: str) -> None:
    def there_and_back(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        buffer = ops.flatten_shard(
            [a * 2, b], 3, dtype=torch.bfloat16, scale=0.5, layout=layout, align=4, backend=backend
        )
        ops.unflatten_shard(buffer, [c, d], layout=layout, scale=4.0, backend=backend)
        return buffer, c + 1

    a, b = ordinary(7, 3, seed=1), ordinary(11, seed=2)
    targets = [torch.zeros(7, 3), unaligned(torch.zeros(11))]
    expected = [t.clone() for t in targets]
    buffer, plus = there_and_back(a, b, *expected)
    got_buffer, got_plus = compiled(there_and_back)(a, b, *targets)
    assert_bits_equal(got_buffer, buffer, exact=True)
    assert_bits_equal(got_plus, plus, exact=True)
    for target, value in zip(targets, expected, strict=True):
        assert_bits_equal(target, value, "mutated argument", exact=True)
    assert (targets[0] != 0).all()


def test_compiled_flatten_into_out(backend: str) -> None:
    out, rank_out = torch.full((2, 8), 5.0), torch.full((8,), 5.0)

    def run(x: Tensor, out: Tensor, rank_out: Tensor) -> Tensor:
        ops.flatten_shard([x], 2, align=8, out=out, backend=backend)
        ops.flatten_shard([x], 2, rank=1, align=8, out=rank_out, backend=backend)
        return out.sum()

    x = ordinary(13, seed=1)
    total = compiled(run)(x, out, rank_out)
    assert_bits_equal(out, ops.flatten_shard([x], 2, align=8, backend=backend), exact=True)
    assert_bits_equal(rank_out, out[1], exact=True)
    assert torch.equal(total, out.sum())


def test_compiled_cast_gather(backend: str) -> None:
    out = torch.zeros(14, dtype=torch.float16)

    def run(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        ops.cast_gather([a, b], torch.float16, out=out, backend=backend)
        return ops.cast_gather([a, b.t()], torch.bfloat16, backend=backend) * 2

    a, b = ordinary(8, seed=1), ordinary(2, 3, seed=2)
    doubled = compiled(run)(a, b, out)
    assert_bits_equal(out, torch.cat([a, b.view(-1)]).half(), exact=True)
    assert_bits_equal(doubled, torch.cat([a, b.t().reshape(-1)]).bfloat16() * 2, exact=True)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_compiled_grad_norm(backend: str, norm_type: float) -> None:
    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total, nonfinite = ops.grad_norm([a * 2, b], norm_type, backend=backend)
        return total * 1.0, nonfinite

    grads = ordinary(5000, seed=1), ordinary(3, 4, seed=2).bfloat16()
    for mine, theirs in zip(compiled(run)(*grads), run(*grads), strict=True):
        assert_bits_equal(mine, theirs, exact=True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("master", [None, "split"])
def test_compiled_adam(backend: str, master: str | None, requires_grad: bool) -> None:
    """Two steps of a compiled update: every mutated argument, read after it and read outside."""
    lists = adam_lists([(70,), (3, 5)], 4, master=master, shadow_dtype=torch.float16, amsgrad=True)
    lists.params[1] = lists.params[1].t().contiguous().t()  # not row-major: updated through a copy
    scalars = {name: value for name, value in SCALARS.items() if name != "lr_tensor"}

    def step(lists: AdamLists, lr: Tensor, clip_coef: Tensor) -> Tensor:
        with torch.no_grad():
            lists.update(backend, lr=lr, weight_decay=0.1, **{**scalars, "clip_coef": clip_coef})
        return lists.params[0].float().sum() + lists.steps.sum()

    expected = lists.clone()
    if requires_grad:
        for param in (*lists.params, *expected.params):
            param.requires_grad_()
    lr, clip_coef = torch.tensor(0.1), torch.tensor(0.5)
    run = compiled(step)
    for _ in range(2):
        assert torch.equal(run(lists, lr, clip_coef), step(expected, lr, clip_coef))
        lists.assert_same(expected)
        lr.mul_(0.5)
    assert lists.steps.tolist() == [2.0, 3.0]


def test_compiled_calls_the_backend_that_was_named() -> None:
    """The graph holds the overload of that backend; an unknown name is refused, not run as the default."""
    seen = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if "shardops" in str(node.target))
        return graph.forward

    for name in ("reference", "cpp", None):
        torch.compiler.reset()
        torch.compile(lambda x, name=name: ops.cast_gather([x], torch.float16, backend=name), backend=look)(
            torch.ones(3)
        )
    assert seen == ["shardops.cast_gather.reference", "shardops.cast_gather.default", "shardops.cast_gather.default"]
    with pytest.raises(Exception, match="backend is 'best', which is none of"):
        compiled(lambda x: ops.cast_gather([x], torch.float16, backend="best"))(torch.ones(3))


def test_compiled_with_dynamic_shapes() -> None:
    def run(x: Tensor) -> Tensor:
        return ops.cast_gather([x, x * 2], torch.bfloat16)

    function = compiled(run, dynamic=True)
    for numel in (5, 70, 4097):
        x = ordinary(numel, seed=numel)
        assert_bits_equal(function(x), torch.cat([x, x * 2]).bfloat16(), exact=True)


# ---- FakeTensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_through_the_typed_functions(device: str) -> None:
    """Shapes, dtypes and devices without a kernel and without the device."""
    with FakeTensorMode():
        tensors = [torch.empty(5, 7, device=device), torch.empty(3, device=device)]
        buffer = ops.flatten_shard(tensors, 2, dtype=torch.bfloat16)
        one = ops.flatten_shard(tensors, 2, rank=1, layout="per_param")
        gathered = ops.cast_gather(tensors, torch.float16)
        total, nonfinite = ops.grad_norm(tensors)
        assert ops.unflatten_shard(buffer, tensors) is tensors
        zeros = [[torch.empty_like(t) for t in tensors] for _ in range(3)]
        lr, step_index = torch.empty((), device=device), torch.empty(2, dtype=torch.int64)
        for home in (device, "cpu"):  # counters may stay on the CPU
            ops.sharded_adam(tensors, *zeros, torch.empty(2, device=home), lr=lr, step_index=step_index)
    described = [(t.shape, t.dtype, t.device.type) for t in (buffer, one, gathered, total, nonfinite)]
    assert described == [
        ((2, 64), torch.bfloat16, device),
        ((3 * 7 + 2,), torch.float32, device),
        ((38,), torch.float16, device),
        ((), torch.float64, device),
        ((), torch.float32, device),
    ]
    assert all(isinstance(t, FakeTensor) for t in (buffer, one, gathered, total, nonfinite))


@pytest.mark.parametrize("overload", OVERLOADS)
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_fake_cuda_tensors_through_the_ops(primitive: str, overload: str) -> None:
    """The fake implementation alone: segments and the step index stay on the CPU."""
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, list):
                return [fake(v) for v in value]
            if isinstance(value, Tensor):
                if value.dtype == torch.int64:
                    return mode.from_tensor(value)
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            return value

        for sample in SAMPLES[primitive]:
            result = getattr(getattr(torch.ops.shardops, primitive), overload)(*fake(list(sample)))
            if primitive == "grad_norm":
                assert [(r.shape, r.dtype, r.device.type) for r in result] == [
                    ((), torch.float64, "cuda"),
                    ((), torch.float32, "cuda"),
                ]
            else:
                assert result is None


def test_nothing_fake_is_kept_for_real_calls() -> None:
    """The cached segment tables: a fake call first, then a real one, then a fake one, of the same shapes."""
    shapes = [(9, 2), (4,)]
    for layout in ("flat", "per_param"):
        for mode in (FakeTensorMode(), None, FakeTensorMode()):
            if mode is None:
                tensors = [ordinary(*shape, seed=1) for shape in shapes]
                buffer = ops.flatten_shard(tensors, 2, layout=layout)
                outs = [torch.zeros(shape) for shape in shapes]
                ops.unflatten_shard(buffer, outs, layout=layout)
                assert all(torch.equal(a, b) for a, b in zip(tensors, outs, strict=True))
            else:
                with mode:
                    tensors = [torch.empty(shape) for shape in shapes]
                    buffer = ops.flatten_shard(tensors, 2, layout=layout)
                    ops.unflatten_shard(buffer, tensors, layout=layout)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_node(mode: str) -> None:
    def run(x: Tensor) -> Tensor:
        return ops.cast_gather([x], torch.bfloat16)

    graph = make_fx(run, tracing_mode=mode)(torch.ones(5))
    assert [str(n.target) for n in graph.graph.nodes if "shardops" in str(n.target)] == ["shardops.cast_gather.default"]
    x = ordinary(5, seed=3)
    assert_bits_equal(graph(x), x.bfloat16(), exact=True)
