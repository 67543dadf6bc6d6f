"""The step in CUDA graphs, shown without a GPU: replays are imitated on the CPU, and fake tensors stand for a GPU's.

What a graph would record is refused where replays would undo steps, and what they would no longer see is found.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import assert_same, make_params, one, parameters, set_grads, snapshot
from reference import generator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardops
from shardops import FusedShardedAdamW
from shardops.backends.triton import _launch
from shardops.optim import attachers, clipping, graphs
from shardops.shadow import Shadow

MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"amsgrad": True, "max_grad_norm": 0.5}),
    (torch.bfloat16, {"max_grad_norm": 0.5}),
    (torch.float16, {"eps": 1e-6}),
    (torch.bfloat16, {"state_dtype": "int8", "master_weights": "split24", "max_grad_norm": 0.5}),
    (torch.bfloat16, {"state_dtype": torch.bfloat16, "master_weights": "stochastic"}),
]
in_modes = pytest.mark.parametrize(("dtype", "options"), MODES)
SHAPES = ((7, 5), (7,), (), (0, 4), (37, 130))


class Graph(TorchDispatchMode):
    """Stands for a CUDA graph: what runs under it is recorded, and runs again on the same tensors.

    Unlike in a graph, what is recorded runs, so that a capture is a step.
    """

    is_capturing = False

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Graph:
        Graph.is_capturing = True
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        Graph.is_capturing = False
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self._calls:
            for result, again in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(result, Tensor) and result.data_ptr() != again.data_ptr():
                    result.copy_(again)


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.is_capturing)
    monkeypatch.setattr(graphs, "DEVICE_TYPES", ("cuda", "cpu"))


captures = pytest.mark.usefixtures("_captures")


def make(dtype: torch.dtype = torch.float32, **options: Any) -> FusedShardedAdamW:
    """With gradients that are written where they are."""
    optimizer = FusedShardedAdamW(make_params(SHAPES, dtype), **{"lr": 1e-2, "capturable": True, **options})
    for param in parameters(optimizer):
        param.grad = torch.zeros_like(param)
    write_grads(optimizer, 0)
    return optimizer


def write_grads(optimizer: Any, step: int, is_bad: bool = False) -> None:
    kept: list[Any] = [param.grad for param in parameters(optimizer)]
    set_grads(parameters(optimizer), step)
    for param, grad in zip(parameters(optimizer), kept, strict=True):
        param.grad = grad.copy_(param.grad)
    if is_bad:
        kept[0].view(-1)[0] = float("nan")


def capture(optimizer: Any) -> Graph:
    with Graph() as graph:
        optimizer.step()
    return graph


# ---- replays are steps -----------------------------------------------------------------------------------------------


@captures
@in_modes
@pytest.mark.parametrize("is_warm", [True, False])
def test_replays_are_steps(dtype: torch.dtype, options: dict[str, Any], is_warm: bool) -> None:
    ours, plain = make(dtype, **options), make(dtype, **options)
    if is_warm:
        ours.step()
        plain.step()
    else:
        ours.prepare_capture()
    graph = capture(ours)
    plain.step()
    is_guarded = options.get("state_dtype") == "int8"
    for step in range(1, 6):
        for optimizer in (ours, plain):
            write_grads(optimizer, step, is_bad=is_guarded and step in (2, 3))
        graph.replay()
        plain.step()
        for name in ("last_grad_norm", "last_found_inf", "skipped_steps"):
            mine, theirs = getattr(ours, name), getattr(plain, name)
            assert mine is theirs is None or torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), (name, step)
    assert plain.skipped_steps == (2 if is_guarded else 0)
    assert_same(snapshot(ours), snapshot(plain))
    ours.check_captured()


@captures
def test_backward_and_a_scaler_in_the_graph() -> None:
    """From the scaled loss to the scaler's update; steps of infinite gradients are skipped, and the scale follows."""
    results = []
    for is_graphed in (True, False):
        model = nn.Linear(7, 3)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator(3)))
        optimizer = FusedShardedAdamW(model.parameters(), lr=1e-2, capturable=True, max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        batch, graph = torch.zeros(4, 7), Graph()
        for index in range(8):
            batch.copy_(torch.randn(4, 7, generator=generator(index)) * (float("inf") if index in (4, 5) else 1.0))
            if is_graphed and index > 2:
                graph.replay()
                continue
            optimizer.zero_grad()
            with graph:
                Graph.is_capturing = is_graphed and index == 2
                graph._calls.clear()
                scaler.scale(model(batch).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert optimizer.skipped_steps == 2
        assert scaler._scale is not None
        results.append({**snapshot(optimizer), "scale": scaler._scale.clone()})
        if is_graphed:
            optimizer.check_captured()
            optimizer.zero_grad()
            optimizer.check_captured(grads=False)
    assert_same(*results)


@captures
def test_the_count_of_skipped_steps_that_was_read_stays() -> None:
    optimizer = make(state_dtype="int8")
    before = optimizer.skipped_steps
    write_grads(optimizer, 1, is_bad=True)
    optimizer.step()
    assert (before, optimizer.skipped_steps) == (0, 1)


@captures
@pytest.mark.parametrize("is_first_captured", [True, False])
def test_a_shared_norm_stays_in_its_graph(is_first_captured: bool) -> None:
    first, second = optimizers = make(max_grad_norm=0.5), make(max_grad_norm=0.5)
    for optimizer in optimizers:
        optimizer.prepare_capture()
    with shardops.share_grad_norm(optimizers):
        for optimizer in optimizers:
            if (optimizer is first) == is_first_captured:
                capture(optimizer)
            else:
                optimizer.step()
        assert first.last_grad_norm is not second.last_grad_norm
        write_grads(first, 1)
        with Graph():
            first.step()
            second.step()
        assert first.last_grad_norm is second.last_grad_norm  # one pass over both


# ---- what may not be recorded ----------------------------------------------------------------------------------------


def loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def written(optimizer: Any) -> None:
    with torch.no_grad():
        parameters(optimizer)[0].mul_(1.5)


def exposed(optimizer: Any) -> None:
    optimizer._tracker.expose(parameters(optimizer))


def written_late(optimizer: Any) -> None:
    """Through what a state dict holds, a count of whose writes the parameter does not share."""
    optimizer.alias = alias = parameters(optimizer)[0].data
    optimizer._tracker.follow(parameters(optimizer)[0], alias)
    alias.mul_(1.5)


def unfrozen(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [one([1.0, 2.0], [0.5, 0.5])]})


def replaced(optimizer: Any) -> None:
    state = optimizer.state[parameters(optimizer)[0]]
    state["exp_avg"] = state["exp_avg"].clone()


def cast(optimizer: Any) -> None:
    param: Any = parameters(optimizer)[0]
    param.data, grad = param.data.float(), param.grad.float()
    param.grad = grad


PENDING: list[tuple[Callable[[Any], None], str]] = [
    (loaded, "loaded or replaced"),
    (written, r"shape \(7, 5\) was written"),
    (exposed, "exposed by a state dict"),
    (written_late, r"shape \(7, 5\) was written"),
    (unfrozen, r"parameter 0 of group 1 of shape \(2,\) has no states yet"),
    (replaced, "loaded or replaced"),
    (cast, "cast or moved"),
]


@captures
@pytest.mark.parametrize(("happens", "reason"), PENDING, ids=[happens.__name__ for happens, _ in PENDING])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_what_is_pending_is_not_recorded(happens: Callable[[Any], None], reason: str, is_prepared: bool) -> None:
    """It would be done again at each replay: moments and counters reset, masters rounded to their parameters."""
    ours, plain = make(torch.bfloat16), make(torch.bfloat16)
    for optimizer in (ours, plain):
        optimizer.step()
        happens(optimizer)
        write_grads(optimizer, 1)
    if is_prepared:
        ours.prepare_capture()
        capture(ours).replay()
        plain.step()
        plain.step()
    else:
        before = [dict(state) for state in ours.state.values()]
        with pytest.raises(RuntimeError, match=f"captured in a CUDA graph and .*{reason}.*prepare_capture"):
            capture(ours)
        after = list(ours.state.values())
        assert [list(map(id, state.values())) for state in after] == [list(map(id, s.values())) for s in before]
        assert len(ours._tracker._exposed) == (5 if happens is exposed else 0)
    assert_same(snapshot(ours), snapshot(plain))


@captures
def test_a_first_step_is_not_recorded() -> None:
    optimizer = make(state_dtype="int8")
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .* has no states yet.*prepare_capture"):
        capture(optimizer)
    assert not optimizer.state
    assert optimizer._skipped is None
    assert_same(snapshot(optimizer), before)
    with Graph(), pytest.raises(RuntimeError, match="call it before"):
        optimizer.prepare_capture()
    optimizer.prepare_capture()
    capture(optimizer)


@captures
def test_integrations_attach_before_a_capture(dtensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or shadows would be made in it."""
    attached: list[bool] = []
    monkeypatch.setattr(attachers, "_attachers", [lambda _: attached.append(Graph.is_capturing)])
    param: Any = nn.Parameter(dtensor)
    optimizer: Any = FusedShardedAdamW([param], capturable=True)
    param.grad = torch.ones_like(param)
    optimizer.init_states()
    optimizer._skip_count()
    with pytest.raises(RuntimeError, match="no step was made yet with the parameters as they are"):
        capture(optimizer)
    for prepare in (optimizer.prepare_capture, optimizer.step):
        attached.clear()
        param._local_tensor = param._local_tensor.clone()
        with pytest.raises(RuntimeError, match="no step was made yet with the parameters as they are"):
            capture(optimizer)
        prepare()
        prepare()
        capture(optimizer)
        assert attached == [False]
    optimizer._skipped = None
    with pytest.raises(RuntimeError, match="no step was made yet"):
        capture(optimizer)


@captures
@pytest.mark.parametrize("call", [capture, FusedShardedAdamW.prepare_capture])
def test_what_no_graph_holds(call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"param group 0 has capturable=False.*on the CPU"):
        call(make(capturable=False))
    with pytest.raises(RuntimeError, match=r"offload_state is 'cpu'.*offload_state=None"):
        call(make(offload_state="cpu"))
    optimizer = make()
    optimizer.step()
    monkeypatch.setattr(graphs, "DEVICE_TYPES", ("cuda",))
    with pytest.raises(RuntimeError, match=r"has parameters on cpu.*runs on one GPU"):
        call(optimizer)


def test_torch_refuses_what_is_not_capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # older torch asks this
    optimizer = make(capturable=False)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="capturable is False"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    make().step()


# ---- what replays no longer see --------------------------------------------------------------------------------------


def loaded_in_place(optimizer: Any) -> None:
    model = nn.ParameterList(parameters(optimizer))
    optimizer.load_fp32_state_dict(model, optimizer.fp32_state_dict(model))


def moved(optimizer: Any) -> None:
    parameters(optimizer)[1].data = parameters(optimizer)[1].data.clone()


def new_grad(optimizer: Any) -> None:
    param: Any = parameters(optimizer)[1]
    param.grad = param.grad.clone()


def new_shadow(optimizer: Any) -> None:
    parameters(optimizer)[1]._shardops_shadow = Shadow(torch.zeros(7, dtype=torch.bfloat16), 7)  # type: ignore[attr-defined]


def option(**changed: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[0].update(changed)


CHANGES: list[tuple[Callable[[Any], None], str | None]] = [
    (written, None),
    (loaded_in_place, None),
    (lambda o: o.zero_grad(set_to_none=False), None),
    (option(lr=1e-2), None),
    (moved, r"parameter 1 of group 0 of shape \(7,\): it is another tensor.*capture the step again"),
    (new_grad, r"parameter 1 of group 0 of shape \(7,\): its \.grad is another tensor.*set_to_none=False"),
    (lambda o: o.zero_grad(), r"parameter 0 of group 0 .*its \.grad is gone.*grads=False"),
    (replaced, r"parameter 0 of group 0 of shape \(7, 5\): its state 'exp_avg' is another"),
    (loaded, "parameter 0 of group 0 .*: its state '"),
    (lambda o: o.state.clear(), "its state 'step' is gone"),
    (new_shadow, "parameter 1 of group 0 .*: its shadow is another"),
    (lambda o: o.param_groups.clear(), "5 parameters were captured, the optimizer has 0"),
    (option(lr=2e-2), r"param group 0: lr is 0.02, and was 0.01 when .*lr as a tensor"),
    (option(lr=torch.tensor(2e-2)), r"param group 0: lr is 0.0199.*, and was 0.01"),
    (option(betas=(0.8, 0.9)), r"betas is \(0.8, 0.9\)"),
    (option(eps=1e-3), "eps is 0.001"),
    (option(weight_decay=0.5), "weight_decay is 0.5"),
    (option(decoupled_weight_decay=False), "decoupled_weight_decay is False"),
    (option(maximize=True), "maximize is True"),
    (lambda o: setattr(o, "max_grad_norm", 1.0), "the optimizer: max_grad_norm is 1.0, and was None"),
]


@captures
@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_changes_after_a_capture_are_found(change: Callable[[Any], None], reason: str | None) -> None:
    optimizer = make()
    with pytest.raises(RuntimeError, match="no step of this optimizer was captured"):
        optimizer.check_captured()
    new_shadow(optimizer)
    optimizer.prepare_capture()
    capture(optimizer)
    optimizer.check_captured()
    change(optimizer)
    if reason is not None:
        with pytest.raises(RuntimeError, match=reason):
            optimizer.check_captured()
    if reason is None or ".grad is" in reason:
        optimizer.check_captured(grads=False)
        optimizer.step()


@captures
def test_parameters_without_a_gradient_may_move_and_names_are_said() -> None:
    params = make_params(((3,), (2,)))
    optimizer = FusedShardedAdamW([("bias", params[0]), ("weight", params[1])], capturable=True)
    params[1].grad = torch.ones(2)
    optimizer.step()
    capture(optimizer)
    params[0].data = params[0].data.clone()
    optimizer.check_captured()
    moved(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter 'weight' of shape \(2,\): it is another"):
        optimizer.check_captured()


@captures
def test_a_step_outside_says_once_what_replays_miss(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make()
    optimizer.step()
    capture(optimizer)
    new_grad(optimizer)  # as a step outside of a graph that has its own
    optimizer.step()
    assert caplog.messages == []
    for change, count in ((loaded, 1), (loaded, 1), (capture, 1), (moved, 2), (replaced, 2)):
        change(optimizer)
        optimizer.step()
        assert len(caplog.messages) == count
    assert "since optimizer.step() was captured in a CUDA graph: parameter 0 of group 0" in caplog.messages[0]
    assert caplog.records[0].levelno == logging.WARNING


# ---- nothing waits for the GPU, or copies from and to the host -------------------------------------------------------


class OnFakeGpu(TorchFunctionMode):
    """Fake CUDA tensors in a torch that was built without CUDA: some of its bindings look for the device first."""

    PAST_BINDINGS: dict[Any, Any] = {  # noqa: RUF012
        Tensor.__getitem__: lambda x, index: x.select(0, index),
        Tensor.__invert__: torch.ops.aten.bitwise_not.default,
        Tensor.copy_: torch.ops.aten.copy_.default,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.PAST_BINDINGS.get(func, func)(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Notes copies between devices, numbers read from a GPU, and what the update was launched with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.launches: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves((args, kwargs)))
        if on_gpu and torch.Tag.data_dependent_output in func.tags:
            self.found.append(str(func))
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device != result.device:
                self.found.append(f"{func} from {source.device} to {result.device}")
        if func is torch.ops.shardops.sharded_adam.default:
            self.launches.append(args)
        return result


def on_gpu(value: float) -> Tensor:
    return torch.full((), value, device="cuda")


@in_modes
@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_host_is_not_waited_for(
    dtype: torch.dtype, options: dict[str, Any], is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(), OnFakeGpu():
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
        optimizer: Any = FusedShardedAdamW(params, lr=on_gpu(1e-2), capturable=True, **options)
        for param in params:
            param.grad = torch.zeros_like(param)
        if is_scaled:
            optimizer.grad_scale, optimizer.found_inf = on_gpu(4.0), on_gpu(0.0)
        optimizer.prepare_capture()
        for module in (graphs, clipping):
            monkeypatch.setattr(module, "is_capturing", lambda: True)
        monkeypatch.setattr(graphs, "address_of", id)
        with Watch() as watch:
            optimizer.step()
        assert watch.found == []
        assert watch.launches
        for launch in watch.launches:
            assert all(x.is_cuda for tensors in launch[:9] for x in tree_leaves(tensors))  # counters too
            assert launch[19] is optimizer.param_groups[0]["lr"]
            assert all(x is None or x.is_cuda for x in launch[20:])
            assert [x is not None for x in launch[20:22]] == ["max_grad_norm" in options, is_scaled]


BAD: list[Callable[[Tensor], Any]] = [
    lambda x: torch.tensor(1.0, device="cuda"),
    lambda x: torch.ops.aten._to_copy.default(torch.zeros(2), device=torch.device("cuda"), non_blocking=True),
    lambda x: x.copy_(torch.zeros(2)),
    lambda x: x.cpu(),
    lambda x: x.sum().item(),
    lambda x: bool(x.any()),
]


@pytest.mark.parametrize("bad", BAD)
def test_waiting_is_seen(bad: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode(), OnFakeGpu(), Watch() as watch, contextlib.suppress(DataDependentOutputException):
        bad(torch.zeros(2, device="cuda"))
    assert len(watch.found) == 1


# ---- the Triton launcher's tables ------------------------------------------------------------------------------------


def test_tables_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied by the graph itself from pinned memory that is there before it, and shared by captures of the same."""
    pinned: list[int] = []
    uploads: list[Tensor] = []

    def host_memory(size: int, is_pinned: bool) -> Tensor:
        assert is_pinned
        pinned.append(size)
        return torch.zeros(size, dtype=torch.int64)

    monkeypatch.setattr(_launch, "_host_memory", host_memory)
    monkeypatch.setattr(_launch, "_upload", lambda host, _: uploads.append(host) or host.clone())
    for name in ("_captured", "_spare"):
        monkeypatch.setattr(_launch, name, {})
    for cached in (_launch._cached_rows, _launch._cached_chunks, _launch._host_chunks):
        cached.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=1))

    def tables(*firsts: int, is_captured: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
        for first in firsts:
            rows = np.array([[first, 5000], [3, 70]], dtype=np.int64)
            table, chunks = _launch.tables(rows, 4096, torch.device("cuda"))
            assert table.tolist() == rows.ravel().tolist()
            assert chunks.tolist() == [0, 1, 1 << 32]

    tables(1, 2, is_captured=False)
    assert sorted(pinned) == [3, 4, 4, 4, 4]
    tables(1, 2, is_captured=False)
    assert len(uploads) == 3  # rows of two lists, and their chunks
    tables(8, 9, 8, is_captured=True)
    assert len(uploads) == 9  # at each launch
    assert len({id(host) for host in uploads[3:]}) == 3
    tables(8, 9, is_captured=True)
    assert len(pinned) == 5
    assert len(_launch._captured) == 3
    tables(10, is_captured=True)
    assert len(pinned) == 6  # no launch outside had left any
    assert {id(host) for host in _launch._captured.values()} <= {id(host) for host in uploads}
    for cached in (_launch._cached_rows, _launch._cached_chunks, _launch._host_chunks):
        cached.cache_clear()
