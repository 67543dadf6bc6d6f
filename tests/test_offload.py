"""States streamed from host memory: the step's bits, whatever the device does first, and the staging memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from offload_device import FakeDevice, schedules
from reference import generator
from torch import Tensor

from shardops import ops
from shardops.optim import offload
from shardops.optim.offload import SLOTS, StateOffload
from shardops.plan import Bucket

BLOCK = 128
STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "block_words")
# Blocks with short ends, vectors, a scalar, nothing, and parameters that have to be cut: of many rows, and of one.
SHAPES = ((3, 130), (7,), (), (0, 4), (16, 128), (41, 200), (1, 3000), (5,))

# ---- the step --------------------------------------------------------------------------------------------------------


@dataclass
class Format:
    """How parameters, moments and masters are stored."""

    name: str
    param: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32
    master: torch.dtype | None = None
    rounding: int = 0
    amsgrad: bool = False
    shadows: bool = False
    dither: bool = False


FORMATS = [
    Format("fp32", amsgrad=True, shadows=True),
    Format("split32", torch.bfloat16, master=torch.bfloat16),
    Format("fp16", torch.float16, master=torch.float32),
    Format("bf16 moments", moments=torch.bfloat16, dither=True),
    Format("int8", moments=torch.int8, shadows=True, dither=True),
    Format("int8, split24", torch.bfloat16, torch.int8, torch.int8, amsgrad=True, dither=True),
    Format("bf16 moments, split24", torch.bfloat16, torch.bfloat16, torch.int8, dither=True),
    Format("int8, split32", torch.bfloat16, torch.int8, torch.bfloat16),
    Format("stochastic", torch.bfloat16, rounding=2, dither=True),
    Format("none", torch.bfloat16, torch.bfloat16, rounding=1),
]
by_name = pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])


def dither_row(index: int, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Of a whole parameter; or of columns of a larger one, whose rows are 1,000 elements apart."""
    numel = math.prod(shape)
    is_sharded = len(shape) == 2 and index % 2 == 1 and numel
    return (index * 77777777) % 2**32, 3 * index, shape[-1] if is_sharded else max(numel, 1), 1000


def make_bucket(form: Format, shapes: Sequence[Sequence[int]] = SHAPES, seed: int = 0, group_index: int = 0) -> Bucket:
    """States before the first step."""
    rng = generator(seed)
    params = [(torch.randn(tuple(shape), generator=rng) * 0.1).to(form.param) for shape in shapes]
    moments = (form.moments, torch.uint8 if form.moments == torch.int8 else form.moments)
    words = []
    for param in params if form.moments == torch.int8 else ():
        rows = param.shape[0] if param.dim() > 1 else 1
        columns = param.numel() // rows if rows else 0
        words.append(torch.zeros(rows, -(-columns // BLOCK), 2, dtype=torch.int32))
    masters: list[Tensor] = []
    if form.master == torch.float32:
        masters = [param.float() for param in params]
    elif form.master is not None:
        masters = [torch.zeros_like(param, dtype=form.master) for param in params]
    return Bucket(
        group_index=group_index,
        device=torch.device("cpu"),
        members=list(range(len(params))),
        params=params,
        exp_avgs=[torch.zeros_like(param, dtype=moments[0]) for param in params],
        exp_avg_sqs=[torch.zeros_like(param, dtype=moments[1]) for param in params],
        max_exp_avg_sqs=[torch.zeros_like(param, dtype=torch.float32) for param in params] if form.amsgrad else [],
        masters=masters,
        block_words=words,
        steps=torch.arange(len(params) + 3).float(),
        step_index=torch.arange(len(params)).flip(0) + 2,
        dither=torch.tensor([dither_row(i, shape) for i, shape in enumerate(shapes)]) if form.dither else None,
        rounding=form.rounding,
        shadows=[torch.zeros_like(param, dtype=torch.bfloat16) for param in params] if form.shadows else [],
        regular=True,
    )


def copy_of(bucket: Bucket) -> Bucket:
    lists = {name: [t.clone() for t in getattr(bucket, name)] for name in ("params", "shadows", *STATES)}
    return with_lists(replace(bucket, steps=bucket.steps.clone()), lists)


def with_lists(bucket: Bucket, lists: dict[str, list[Tensor]]) -> Bucket:
    for name, tensors in lists.items():
        setattr(bucket, name, tensors)
    return bucket


def set_grads(bucket: Bucket, step: int) -> None:
    rng = generator(1000 + step)
    # A parameter's gradient is its own, whichever bucket it is in.
    whole = {i: torch.randn(shape, generator=rng) for i, shape in enumerate(SHAPES)}
    bucket.grads = [whole[member].to(param.dtype) for member, param in zip(bucket.members, bucket.params, strict=True)]


def launcher(found_inf: Tensor | None = None) -> Callable[[Bucket], None]:
    def launch(bucket: Bucket) -> None:
        rounding = (None, "nearest", "stochastic")[bucket.rounding]
        ops.sharded_adam(
            *(bucket.params, bucket.grads, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.steps),
            lr=1e-2,
            weight_decay=1e-2,
            decoupled_weight_decay=True,
            max_exp_avg_sqs=bucket.max_exp_avg_sqs,
            masters=bucket.masters,
            shadows=bucket.shadows,
            block_words=bucket.block_words,
            step_index=bucket.step_index,
            dither=bucket.dither,
            rounding=rounding,  # type: ignore[arg-type]
            clip_coef=torch.tensor(0.5),
            found_inf=found_inf,
            backend=BACKEND,
        )

    return launch


BACKEND = "reference"
# Staging memory that makes many pieces of SHAPES, and cuts parameters in the middle.
NBYTES = SLOTS * 6400


def assert_same(actual: Bucket, expected: Bucket, label: str = "") -> None:
    for name in ("params", "shadows", *STATES):
        for i, (a, b) in enumerate(zip(getattr(actual, name), getattr(expected, name), strict=True)):
            same = torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
            assert same, f"{label} {name}[{i}] of shape {tuple(a.shape)}"
    assert torch.equal(actual.steps, expected.steps), f"{label} steps: {actual.steps}, expected {expected.steps}"


def streamed(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, nbytes: int = NBYTES) -> StateOffload:
    monkeypatch.setattr(offload, "boundary_of", lambda _: device)
    return StateOffload(nbytes)


def subset(bucket: Bucket, positions: Sequence[int]) -> Bucket:
    """The same tensors, in a bucket of fewer parameters, in another order."""
    lists = {
        name: [getattr(bucket, name)[i] for i in positions]
        for name in ("params", "shadows", *STATES)
        if getattr(bucket, name)
    }
    part = replace(
        bucket,
        members=[bucket.members[i] for i in positions],
        step_index=bucket.step_index[list(positions)],
        dither=None if bucket.dither is None else bucket.dither[list(positions)],
        grads=[],
    )
    return with_lists(part, lists)


@by_name
def test_the_step_is_the_one_without_streaming(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, whatever the device does first; gradients differ, and are let go of while copies are under way."""
    expected = make_bucket(form)
    for step in range(3):
        set_grads(expected, step)
        launcher()(expected)
    for options in list(schedules())[::6]:
        device = FakeDevice(**options)
        states = streamed(device, monkeypatch)
        bucket = make_bucket(form)
        for step in range(3):
            set_grads(bucket, step)
            states.run([bucket], launcher())
            bucket.grads = []
        states.synchronize()
        device.finish("compute")
        assert_same(bucket, expected, f"{form.name}, {options}:")
        assert device.launches >= 3 * 6
        assert sum(device.allocated) <= NBYTES


def toy(bucket: Bucket) -> None:
    """Instead of Adam, where only the order of things matters: everything depends on all that was there before."""
    for position, *tensors in zip(
        bucket.step_index, bucket.params, bucket.grads, bucket.exp_avgs, bucket.exp_avg_sqs, strict=True
    ):
        bucket.steps[position] += 1
        param, grad, exp_avg, exp_avg_sq = tensors
        exp_avg.mul_(0.5).add_(grad)
        exp_avg_sq.mul_(0.75).add_(exp_avg)
        param.sub_(exp_avg_sq)


def scenario(run: Callable[[list[Bucket]], None]) -> Bucket:
    """Steps with other buckets each time: parameters without gradients, in another order, and listed twice."""
    whole = make_bucket(Format("fp32"))
    last_first = subset(whole, (6, 5, 4))
    small = subset(whole, (4,))
    twice = subset(whole, (6, 0))
    ends_late, late = subset(whole, (5, 7)), subset(whole, (7,))  # the last of twelve pieces, and the first of one
    steps = [[whole], [last_first], [whole], [small], [last_first, small, twice], [twice, whole], [small], [small]]
    steps += [[ends_late], [late]]
    for step, buckets in enumerate(steps):
        for bucket in buckets:
            set_grads(bucket, step)
        run(buckets)
    return whole


def expected_scenario() -> Bucket:
    def run(buckets: list[Bucket]) -> None:
        for bucket in buckets:
            toy(bucket)

    return scenario(run)


def run_scenario(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    states = streamed(device, monkeypatch)
    whole = scenario(lambda buckets: states.run(buckets, toy))
    states.synchronize()
    return whole


def test_every_schedule_ends_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_scenario()
    for options in schedules():
        actual = run_scenario(FakeDevice(**options), monkeypatch)
        assert_same(actual, expected, f"{options}:")


@pytest.mark.parametrize(
    "wait",
    [
        ("copy in", "copy out"),
        ("compute", "copy in"),
        ("copy out", "compute"),
        ("host", "copy out"),
        ("copy in", "compute"),
    ],
)
def test_a_device_that_passes_over_waits_is_found_out(wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the device of these tests would notice a wait that is missing."""
    expected = expected_scenario()
    wrong = 0
    for options in schedules():
        actual = run_scenario(FakeDevice(**options, deaf=[wait]), monkeypatch)
        try:
            assert_same(actual, expected)
        except AssertionError:
            wrong += 1
    assert wrong


def test_the_host_reads_states_after_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was done before, all is done after, and there is nothing to wait for a second time."""
    bucket, expected = make_bucket(FORMATS[0]), make_bucket(FORMATS[0])
    device = FakeDevice()
    states = streamed(device, monkeypatch)
    before = copy_of(bucket)
    set_grads(bucket, 0)
    states.run([bucket], launcher())
    assert_same(bucket, before)
    states.synchronize()
    set_grads(expected, 0)
    launcher()(expected)
    assert_same(bucket, expected)
    monkeypatch.setattr(device, "synchronize", None)
    states.synchronize()


def test_copies_in_and_kernels_run_ahead_of_copies_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many pieces as there are slots: so one is copied in while another is updated and a third is copied out."""
    launched: list[Bucket] = []
    states = streamed(FakeDevice(eager=["copy in", "compute"]), monkeypatch)
    bucket = make_bucket(FORMATS[0])
    set_grads(bucket, 0)
    states.run([bucket], launched.append)
    assert len(launched) == SLOTS == 3
    states.synchronize()
    assert len(launched) > 6


def test_found_inf_writes_nothing_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = make_bucket(FORMATS[5])
    states = streamed(FakeDevice(), monkeypatch)
    before = copy_of(bucket)
    set_grads(bucket, 0)
    states.run([bucket], launcher(found_inf=torch.ones(())))
    states.synchronize()
    assert_same(bucket, before)


def test_strided_parameters_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states have their order of memory, on the host and in staging memory."""

    def make() -> Bucket:
        bucket = make_bucket(FORMATS[0], [(64, 50), (4, 3)])
        bucket.regular = False
        for name in ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
            setattr(bucket, name, [t.t() for t in getattr(bucket, name)])
        bucket.shadows = []
        return bucket

    bucket, expected = make(), make()
    device = FakeDevice(eager=["copy in"])
    states = streamed(device, monkeypatch)
    for step in range(2):
        grads = [torch.randn(p.shape, generator=generator(step)) for p in bucket.params]
        bucket.grads = expected.grads = grads
        states.run([bucket], launcher())
        launcher()(expected)
    states.synchronize()
    assert_same(bucket, expected)
    assert device.launches == 2 * 2
    assert bucket.exp_avgs[0].stride() == (1, 50)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_staging_memory_is_kept_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(eager=["copy in"])
    states = streamed(device, monkeypatch)
    bucket = make_bucket(FORMATS[1])
    other, expected = copy_of(bucket), copy_of(bucket)
    for step in range(3):
        for each in (bucket, other, expected):
            set_grads(each, step)
        states.run([bucket], launcher())
        states.run([other], launcher())  # of other tensors: in the same memory
        launcher()(expected)
        if step == 1:
            assert len(device.allocated) == 1
            states.release()
    states.synchronize()
    assert len(device.allocated) == 2
    assert_same(bucket, expected)
    assert_same(other, expected)


def test_staging_memory_holds_no_states_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    states = streamed(FakeDevice(eager=["copy in", "compute", "copy out"]), monkeypatch)
    bucket = make_bucket(FORMATS[1])
    set_grads(bucket, 0)
    states.run([bucket], launcher())
    state = weakref.ref(bucket.exp_avgs[4])
    del bucket
    assert state() is None


def test_a_row_that_is_too_large_makes_the_staging_memory_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of blocks are not cut, unless there is only one."""
    form = FORMATS[4]
    bucket, expected = (make_bucket(form, [(2, 5000)]) for _ in range(2))
    device = FakeDevice(eager=["copy in"])
    states = streamed(device, monkeypatch, nbytes=1024)
    for each in (bucket, expected):
        each.grads = [torch.randn(2, 5000, generator=generator(0))]
    states.run([bucket], launcher())
    launcher()(expected)
    states.synchronize()
    assert_same(bucket, expected)
    assert device.launches == 2
    assert device.allocated[0] > 1024


# ---- what is refused, and where nothing is streamed ------------------------------------------------------------------


def test_parameters_on_the_cpu_are_not_streamed() -> None:
    bucket = make_bucket(FORMATS[0])
    launched: list[Bucket] = []
    states = StateOffload()
    states.run([bucket], launched.append)
    assert len(launched) == 1
    assert launched[0] is bucket
    states.synchronize()
    states.release()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="offload_state is 'cpu' and a parameter is on meta"):
        StateOffload().run([replace(make_bucket(FORMATS[0]), device=torch.device("meta"))], launcher())


def test_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        StateOffload().run([replace(make_bucket(FORMATS[0]), device=torch.device("cuda", 0))], launcher())
