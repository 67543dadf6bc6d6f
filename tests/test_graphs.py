"""The step in CUDA graphs, whose replays are imitated on the CPU.

What a graph would record is refused where replays would undo steps, and what they would no longer see is found.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_helpers import Graph, capture, in_modes, make, write_grads
from optim_helpers import assert_same, make_params, one, parameters, snapshot
from reference import generator
from torch import Tensor, nn

import shardops
from shardops import FusedShardedAdamW
from shardops.optim import attachers, graphs
from shardops.shadow import Shadow


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.is_capturing)
    monkeypatch.setattr(graphs, "DEVICE_TYPES", ("cuda", "cpu"))


captures = pytest.mark.usefixtures("_captures")


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
