"""What an op's checks found out is kept by the tensors' geometry: the second call gives the first one's bits, refuses
what the first would have, and looks at no tensor in Python.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardops import ops
from shardops.ops import _adam_formats, _checks, _geometry, _library

pytestmark = pytest.mark.skipif(not _library.load(), reason="the op library tells the geometry")

SHAPES = ((7, 5), (3,), (8, 16), (1, 2))


def tensors(seed: int, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [tensor.requires_grad_(requires_grad) for tensor in made]


def adam(requires_grad: bool = False, **options: Any) -> list[Tensor]:
    params, grads = tensors(0, requires_grad=requires_grad), tensors(1)
    exp_avgs, exp_avg_sqs = tensors(2), [tensor.square() for tensor in tensors(3)]
    steps = torch.ones(len(params))
    ops.sharded_adam(params, grads, exp_avgs, exp_avg_sqs, steps, lr=1e-3, **options)
    assert all(param.is_leaf and param.requires_grad == requires_grad for param in params)
    assert all(param._version > 0 for param in params)
    return [*(param.detach() for param in params), *exp_avgs, *exp_avg_sqs, steps]


def flatten(requires_grad: bool = False, **options: Any) -> list[Tensor]:
    made = ops.flatten_shard(tensors(4, requires_grad=requires_grad), 3, **options)
    assert not made.requires_grad
    return [made]


def unflatten(requires_grad: bool = False, **options: Any) -> list[Tensor]:
    buffer = ops.flatten_shard(tensors(4), 3, layout="per_param", align=1)
    outs = [torch.zeros_like(tensor) for tensor in tensors(4)]
    ops.unflatten_shard(buffer.requires_grad_(requires_grad), outs, **{"layout": "per_param", **options})
    assert not any(out.requires_grad for out in outs)
    assert all(out._version > 0 for out in outs)
    return outs


def gather(requires_grad: bool = False, **options: Any) -> list[Tensor]:
    made = ops.cast_gather(tensors(5, requires_grad=requires_grad), options.pop("dtype", torch.bfloat16), **options)
    assert not made.requires_grad
    return [made]


def norm(requires_grad: bool = False, **options: Any) -> list[Tensor]:
    made = ops.grad_norm(tensors(6, requires_grad=requires_grad), **options)
    assert not any(result.requires_grad for result in made)
    return list(made)


CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "sharded_adam": adam,
    "flatten_shard": flatten,
    "unflatten_shard": unflatten,
    "cast_gather": gather,
    "grad_norm": norm,
}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    for name in ("sharded_adam", "flatten_shard", "cast_gather", "grad_norm"):
        for value in vars(importlib.import_module(f"shardops.ops.{name}")).values():
            if isinstance(value, _geometry.Seen):
                value._found.clear()


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: from then on a look at a list in Python fails the test."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("checked again")

    def arm() -> None:
        monkeypatch.setattr(_checks, "check_tensors", refuse)
        monkeypatch.setattr(_adam_formats, "check_lists", refuse)

    return arm


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_the_second_call_looks_at_nothing(name: str, backend: str, no_checks: Callable[[], None]) -> None:
    call = CALLS[name]
    first = call(backend=backend)
    if name == "unflatten_shard":  # its buffer is made by another op, which must know it, too
        call(backend=backend)
    no_checks()
    for requires_grad in (False, True):
        second = call(requires_grad, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("flatten_shard", {"align": True}, ValueError),  # 1 is fine
        ("flatten_shard", {"align": 1.0}, ValueError),
        ("flatten_shard", {"layout": "flatt"}, ValueError),
        ("flatten_shard", {"layout": ["flat"]}, TypeError),  # nothing to look up
        ("flatten_shard", {"rank": 3}, ValueError),
        ("flatten_shard", {"rank": False}, ValueError),  # 0 is fine
        ("flatten_shard", {"dtype": torch.float64}, TypeError),
        ("flatten_shard", {"out": torch.zeros(3, 1)}, ValueError),
        ("flatten_shard", {"backend": "fastest"}, ValueError),
        ("unflatten_shard", {"layout": "flatt"}, ValueError),
        ("cast_gather", {"dtype": torch.float64}, TypeError),
        ("cast_gather", {"out": torch.zeros(168)}, ValueError),  # of another dtype than asked for
        ("grad_norm", {"norm_type": 3.0}, ValueError),
        ("sharded_adam", {"rounding": "nearest"}, ValueError),
        ("sharded_adam", {"clip_coef": torch.zeros(2)}, ValueError),
        ("sharded_adam", {"dither": torch.full((4, 4), -1)}, ValueError),
        ("sharded_adam", {"dither": torch.tensor([[1 << 32, 0, 5, 5]] * 4)}, ValueError),
        ("sharded_adam", {"dither": torch.tensor([[0, 0, 0, 5]] * 4)}, ValueError),
        ("sharded_adam", {"step_index": torch.tensor([0, 1, 2, 2])}, ValueError),
    ],
)
def test_what_is_no_geometry_is_still_refused(name: str, options: dict[str, Any], error: type[Exception]) -> None:
    call = CALLS[name]
    call()
    if name == "flatten_shard":
        call(align=1, rank=0)
        call(align=1)
    if name == "sharded_adam":
        call(dither=torch.tensor([[7, 0, 5, 5]] * 4))
    with pytest.raises(error):
        call(**options)


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda tensor: tensor.double(), TypeError),
        (lambda tensor: tensor[:-1], ValueError),
        (lambda tensor: tensor.bfloat16(), ValueError),
        (lambda tensor: tensor.to("meta"), ValueError),
        (lambda tensor: tensor.to_sparse(), TypeError),
        (expanded, ValueError),
        (lambda tensor: tensor.tolist(), TypeError),
    ],
)
def test_one_tensor_of_another_geometry(spoil: Callable[[Tensor], Any], error: type[Exception]) -> None:
    params, grads, exp_avgs = tensors(0), tensors(1), tensors(2)
    exp_avg_sqs, steps = [tensor.square() for tensor in tensors(3)], torch.zeros(4)
    ops.sharded_adam(params, grads, exp_avgs, exp_avg_sqs, steps, lr=1e-3)
    before = [tensor.clone() for tensor in params]
    exp_avgs[1] = spoil(exp_avgs[1])
    with pytest.raises(error):
        ops.sharded_adam(params, grads, exp_avgs, exp_avg_sqs, steps, lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert steps.tolist() == [1.0] * 4


def test_lists_of_one_length_together_are_told_apart() -> None:
    """The same tensors in other lists: a shadow is no master."""
    params = tensors(0, torch.bfloat16)
    rest = (tensors(1, torch.bfloat16), tensors(2), [tensor.square() for tensor in tensors(3)], torch.zeros(4))
    remainders = [torch.zeros_like(param) for param in params]
    ops.sharded_adam(params, *rest, lr=1e-3, masters=remainders)
    with pytest.raises(ValueError, match="masters is empty"):
        ops.sharded_adam(params, *rest, lr=1e-3, shadows=remainders)


def test_strided_tensors_are_copied_in_every_call() -> None:
    for _ in range(3):
        source = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors(7)]
        expected = torch.cat([tensor.reshape(-1) for tensor in source])
        assert torch.equal(ops.cast_gather(source, torch.float32), expected)
        flat = ops.flatten_shard(source, 2, align=1)
        assert torch.equal(flat.view(-1)[: expected.numel()], expected)
        outs = [torch.zeros(tensor.shape[::-1]).t() if tensor.dim() == 2 else torch.zeros(3) for tensor in source]
        ops.unflatten_shard(flat, outs)
        assert all(torch.equal(a, b) for a, b in zip(outs, source, strict=True))
        total, _ = ops.grad_norm([tensor[::2] for tensor in source], float("inf"))
        assert float(total) == max(float(tensor[::2].abs().max()) for tensor in source)


def test_views_that_negate_are_looked_at_each_time() -> None:
    """The dispatcher hands the hash plain copies of them: they would pass for others of their shapes."""
    plain = [torch.randn(3, 5) for _ in range(6)]
    negated = [torch.complex(tensor * 100, tensor).conj().imag for tensor in plain]
    expected = sum(float(tensor.double().square().sum()) for tensor in plain)
    for backend in ("cpp", "reference"):
        for grads in (plain, negated, plain, negated):
            assert float(ops.grad_norm(grads, backend=backend)[0]) == pytest.approx(expected)
    outs = [torch.complex(tensor, tensor).conj().imag for tensor in plain]
    buffer = ops.flatten_shard(plain, 1, align=1)
    ops.unflatten_shard(buffer, [torch.empty_like(tensor) for tensor in plain])
    ops.unflatten_shard(buffer, outs)
    assert all(torch.equal(out, tensor) for out, tensor in zip(outs, plain, strict=True))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_no_derivative_in_any_call(backend: str) -> None:
    grads = tensors(6)
    tangents = [torch.ones_like(grad) for grad in grads]
    for _ in range(3):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True)]
            total, _ = ops.grad_norm(duals, backend=backend)
            assert forward_ad.unpack_dual(total).tangent is None
            assert forward_ad.unpack_dual(ops.cast_gather(duals, torch.float32, backend=backend)).tangent is None
        _, tangent = torch.func.jvp(lambda *given: ops.grad_norm(given, backend=backend)[0], (*grads,), (*tangents,))
        assert float(tangent) == 0.0


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_results_that_want_a_gradient_are_written_in_every_call(backend: str) -> None:
    source = tensors(4)
    expected = ops.flatten_shard(source, 2, align=1)
    for _ in range(2):
        leaf = torch.zeros_like(expected).requires_grad_()
        ops.flatten_shard(source, 2, align=1, out=leaf, backend=backend)
        assert torch.equal(leaf, expected)
        assert leaf.is_leaf
        inner = torch.zeros(expected.numel()).requires_grad_() * 2
        before = inner.grad_fn
        ops.cast_gather([expected.view(-1)] + [torch.empty(0)] * 3, torch.float32, out=inner, backend=backend)
        assert torch.equal(inner, expected.view(-1))
        assert inner.grad_fn is before


def test_sizes_that_differ_in_their_upper_bits_are_told_apart() -> None:
    """Under a hash by products alone these two collided, and the second result had the first one's shape."""
    small = [torch.ones(1, 8)] * 4
    wide = torch.arange(16777224.0).as_strided((1, 16777224), (67461185544, 1))
    assert ops.flatten_shard(small, 1, align=1).numel() == 32
    assert ops.flatten_shard([wide, *small[:3]], 1, align=1).numel() == 16777224 + 24


def test_many_threads_keep_what_they_found() -> None:
    seen: _geometry.Seen[int] = _geometry.Seen()
    failures: list[BaseException] = []

    def put(first: int) -> None:
        try:
            for number in range(20_000):
                seen.put((first, number), number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=put, args=(first,)) for first in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert failures == []
    assert len(seen._found) == seen._MOST


def test_the_oldest_go() -> None:
    seen: _geometry.Seen[int] = _geometry.Seen()
    keys = [seen.key([torch.empty(n + 1)] * 4) for n in range(seen._MOST + 1)]
    assert len(set(keys)) == len(keys)
    for n, key in enumerate(keys):
        seen.put(key, n)
    assert [seen.get(key) for key in (keys[0], keys[1], keys[-1])] == [None, 1, seen._MOST]
    seen.put(None, 5)
    assert seen.get(None) is None


def test_nothing_is_kept_under_a_trace() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen: _geometry.Seen[int] = _geometry.Seen()
    with FakeTensorMode():
        assert seen.key([torch.empty(3)] * 4) is None
    tensors = [torch.empty(3)] * 4
    assert seen.key(tensors, [1]) is None
    assert seen.key(tensors[:3]) is None
    assert seen.key(tensors, 1) != seen.key(tensors, True)
