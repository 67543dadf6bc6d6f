"""What is particular to sharded_adam's CUDA kernels, shown by their twins: bytes moved, launches, steps, grids, errors.

That the bits are those of the other backends, the primitives' own tests show.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import twin
from adam_modes import (
    FP32,
    MASTERS,
    MOMENTS,
    SPLIT24,
    SPLIT32,
    STOCHASTIC,
    Master,
    dither_table,
)
from reference import DTYPES, AdamLists, assert_bits_equal, generator, unaligned
from twin_lists import (
    ADAMW,
    BLOCK,
    assert_as_cpp,
    capacities,
    cut_from_buffers,
    cut_like,
    lists_in_training,
    options_of,
    traffic_of,
    zero_lists,
)

each_moments = pytest.mark.parametrize("moments", MOMENTS)
each_master = pytest.mark.parametrize("master", MASTERS, ids=str)


@pytest.fixture(autouse=True)
def _registered() -> None:
    twin.register()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of(moments: str, master: Master, grad: torch.dtype, shadow: torch.dtype | None, amsgrad: bool) -> Any:
    """Bytes an element that must be loaded and stored, by the arrays that hold them: (loads, stores)."""
    param = master.param_dtype.itemsize
    both: dict[str, float] = {}
    if master.masters != "fp32":
        both["param"] = param
    if master.masters is not None:
        both["master"] = {"fp32": 4, "split": 2, "split24": 1}[master.masters]
    size = {"fp32": 4, "bf16": 2, "int8": 1}[moments]
    both |= {"exp_avg": size, "exp_avg_sq": size}
    if moments == "int8":
        both["words"] = 8 / BLOCK
    if amsgrad:
        both["max_exp_avg_sq"] = 4
    loads, stores = {**both, "grad": grad.itemsize}, dict(both)
    if master.masters == "fp32":
        stores["param"] = param
    if shadow is not None:
        stores["shadow"] = shadow.itemsize
    return loads, stores


def wide_accesses(sizes: dict[str, float], moments: str, master: Master, numel: int) -> int:
    """Accesses of 8 bytes and more if a thread takes 4 elements of an array at a time, or 8 of no 32-bit state."""
    has_words = moments == "fp32" or master.param_dtype == torch.float32 or master.masters == "fp32"
    at_once = 8 if moments == "int8" or not has_words else 4
    per_array = [numel // at_once for name, size in sizes.items() if name != "words" and size * at_once >= 8]
    return sum(per_array) + (numel // BLOCK if "words" in sizes else 0)


ALL_KINDS = [
    {"grad_dtype": grad, "shadow_dtype": shadow, "amsgrad": amsgrad}
    for grad, shadow, amsgrad in itertools.product(DTYPES, (None, *DTYPES), (False, True))
]


@each_master
@each_moments
def test_no_byte_moves_twice(moments: str, master: Master) -> None:
    """Exactly what must be read and written, all of it by wide accesses, whatever is asked for."""
    for kinds in ALL_KINDS:
        lists = zero_lists([(2048,), (16, 128)], moments, master, **kinds)
        loads, stores = bytes_of(moments, master, *kinds.values())
        for scale, dithered in itertools.product((None, torch.tensor(3.0)), (False, True)):
            traffic = traffic_of(lists, grad_scale=scale, **options_of(lists, master, dithered))
            case = (kinds, scale, dithered)
            assert (traffic.loaded, traffic.stored) == (4096 * sum(loads.values()), 4096 * sum(stores.values())), case
            assert traffic.wide_loads == wide_accesses(loads, moments, master, 4096), case
            assert traffic.wide_stores == wide_accesses(stores, moments, master, 4096), case


@pytest.mark.parametrize(
    ("moments", "master", "shadow", "expected"),
    [
        ("fp32", FP32, None, (16, 12)),
        ("fp32", SPLIT32, None, (14, 12)),
        ("fp32", SPLIT32, torch.bfloat16, (14, 14)),
        ("bf16", STOCHASTIC, None, (8, 6)),
        ("int8", SPLIT24, None, (7 + 1 / 16, 5 + 1 / 16)),
    ],
    ids=str,
)
def test_the_table_of_bytes(moments: str, master: Master, shadow: torch.dtype | None, expected: Any) -> None:
    """The figures of the documentation, by hand; gradients in the parameters' dtype."""
    loads, stores = bytes_of(moments, master, master.param_dtype, shadow, amsgrad=False)
    assert (sum(loads.values()), sum(stores.values())) == expected


@each_master
@each_moments
def test_found_inf_moves_nothing(moments: str, master: Master) -> None:
    lists = zero_lists([(2048,), (3, 130)], moments, master, amsgrad=True, shadow_dtype=torch.bfloat16)
    traffic = traffic_of(lists, found_inf=torch.tensor(1.0), **options_of(lists, master))
    assert (traffic.loaded, traffic.stored) == (0, 0)
    assert lists.steps.tolist() == [0.0, 0.0]


@each_master
@each_moments
def test_unaligned_tensors_move_the_same_bytes(moments: str, master: Master) -> None:
    """One array that does not begin where wide accesses may is enough for narrow ones, of one element each."""
    kinds: dict[str, Any] = {"grad_dtype": torch.bfloat16, "shadow_dtype": torch.float16, "amsgrad": True}
    loads, stores = bytes_of(moments, master, *kinds.values())
    plain = zero_lists([(2048,)], moments, master, **kinds)
    for moved in [name for name, tensors in vars(plain).items() if name != "steps" and tensors]:
        lists = plain.clone()
        setattr(lists, moved, [unaligned(t) for t in getattr(plain, moved)])
        traffic = traffic_of(lists, **options_of(lists, master))
        assert (traffic.loaded, traffic.stored) == (2048 * sum(loads.values()), 2048 * sum(stores.values())), moved
        assert (traffic.wide_loads, traffic.wide_stores) == (0, 0), moved


@each_master
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_ragged_end_is_narrow_and_nothing_else(moments: str, master: Master) -> None:
    loads, stores = bytes_of(moments, master, torch.float32, None, amsgrad=False)
    lists = zero_lists([(2048 + 7,)], moments, master)
    traffic = traffic_of(lists, **options_of(lists, master))
    assert (traffic.loaded, traffic.stored) == (2055 * sum(loads.values()), 2055 * sum(stores.values()))
    assert traffic.wide_loads == wide_accesses(loads, moments, master, 2055)
    assert traffic.wide_stores == wide_accesses(stores, moments, master, 2055)


@each_master
def test_blocks_fewer_than_a_round_has_are_written_once(master: Master) -> None:
    """A round's threads without a block of their own read the last one once more, from the cache, and write nothing."""
    loads, stores = bytes_of("int8", master, torch.float32, None, amsgrad=False)
    lists = zero_lists([(13, 128)], "int8", master)
    traffic = traffic_of(lists, **options_of(lists, master))
    assert traffic.stored == 13 * 128 * sum(stores.values())
    assert traffic.loaded == 16 * 128 * sum(loads.values())


# ---- launches --------------------------------------------------------------------------------------------------------


def apart(count: int, moments: str, master: Master, **kinds: Any) -> AdamLists:
    """Tensors of one element, no two next to each other."""
    lists = cut_from_buffers(zero_lists([(1,)] * count, moments, master, **kinds), gap=1)
    lists.block_words = [t.clone() for t in lists.block_words]
    return lists


@pytest.mark.parametrize(
    ("moments", "master", "shadow", "amsgrad", "fields", "at_least"),
    [
        # Six are always there; then each list, a salt, two numbers of an index, the words of blocks and their columns.
        ("fp32", FP32, None, False, 6, 640),
        ("fp32", SPLIT32, torch.bfloat16, False, 6 + 2, 390),
        ("bf16", STOCHASTIC, None, True, 6 + 1 + 3, 390),
        ("int8", SPLIT24, None, False, 6 + 1 + 3 + 2, 320),
        ("int8", FP32, None, False, 6 + 1 + 2, 390),
    ],
    ids=str,
)
def test_one_launch_names_hundreds_of_tensors(
    moments: str, master: Master, shadow: torch.dtype | None, amsgrad: bool, fields: int, at_least: int
) -> None:
    words, _ = capacities()
    most = words // fields
    assert most >= at_least
    for count, launches in ((most, 1), (most + 1, 2)):
        lists = apart(count, moments, master, shadow_dtype=shadow, amsgrad=amsgrad)
        assert traffic_of(lists, **options_of(lists, master)).launches == launches
        assert lists.steps.eq(1).all()


def test_thousands_of_tensors() -> None:
    words, _ = capacities()
    lists = apart(5000, "fp32", FP32)
    for index, grad in enumerate(lists.grads):
        grad.fill_(index + 1)
    assert assert_as_cpp(lists).launches == -(-5000 // (words // 6))


def test_counters_on_the_device_cost_one_launch() -> None:
    """Each has its own, also those past the first launch that raises them; one that is not named stays."""
    lists = apart(8300, "bf16", STOCHASTIC)
    for grad in lists.grads:
        grad.fill_(1.0)
    lists.steps = torch.arange(8301).float() % 50
    options = {"dither": dither_table(lists, 3), "rounding": "stochastic"}
    index = torch.randperm(8301, generator=generator(1))[:8300]
    found = torch.tensor(0.0)
    few = AdamLists(*(getattr(lists, name)[:400] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")))
    few.steps = torch.zeros(400)
    few_options = {"dither": options["dither"][:400], "rounding": "stochastic"}
    assert assert_as_cpp(few, **few_options).launches == 1
    assert assert_as_cpp(few, **few_options, found_inf=found).launches == 2
    words, _ = capacities()
    launches = assert_as_cpp(lists, **options, step_index=index, found_inf=found).launches
    assert launches == 2 + -(-8300 // (words // 9))


@each_moments
def test_empty_tensors_cost_nothing(moments: str) -> None:
    master = {"fp32": FP32, "bf16": STOCHASTIC, "int8": SPLIT24}[moments]
    lists = zero_lists([(0,)] * 5, moments, master)
    assert traffic_of(lists, **options_of(lists, master)).launches == 0
    assert lists.steps.tolist() == [1.0] * 5
    words, _ = capacities()
    fields = {"fp32": 6, "bf16": 9, "int8": 12}[moments]
    shapes = [(1,), (0,)] * (words // fields)
    lists = cut_from_buffers(zero_lists(shapes, moments, master), gap=1)
    lists.block_words = [t.clone() for t in lists.block_words]
    assert traffic_of(lists, **options_of(lists, master)).launches == 1


# ---- neighbours in memory --------------------------------------------------------------------------------------------

MERGED = [(moments, master) for moments in ("fp32", "bf16") for master in MASTERS if master.masters != "split24"]
MERGED = [(moments, master) for moments, master in MERGED if master.rounding != "stochastic"]
WITH_ALL: dict[str, Any] = {"grad_dtype": torch.bfloat16, "shadow_dtype": torch.float16, "amsgrad": True}


@pytest.mark.parametrize(("moments", "master"), MERGED, ids=str)
def test_neighbours_are_one_tensor(moments: str, master: Master) -> None:
    """A thousand of five elements, of which most begin where no wide access may: one launch, wide accesses."""
    lists = lists_in_training([(5,)] * 1000, moments, master, 1, **WITH_ALL)
    lists = cut_from_buffers(lists)
    traffic = assert_as_cpp(lists, **options_of(lists, master, dithered=False))
    loads, stores = bytes_of(moments, master, *WITH_ALL.values())
    assert traffic.launches == 1
    assert (traffic.loaded, traffic.stored) == (5000 * sum(loads.values()), 5000 * sum(stores.values()))
    assert traffic.wide_loads == wide_accesses(loads, moments, master, 5000)
    assert traffic.wide_stores == wide_accesses(stores, moments, master, 5000)


EVERY_LIST = ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters", "shadows")


@pytest.mark.parametrize("gap", [1, 4, 64])
@pytest.mark.parametrize("name", EVERY_LIST)
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_neighbours_in_most_lists_are_not(moments: str, name: str, gap: int) -> None:
    """Three elements, fewer than a wide access has: one would show that two tensors were taken as one."""
    for master in (SPLIT32, Master(torch.float16, "fp32")):
        lists = lists_in_training([(3,)] * 40, moments, master, 2, **WITH_ALL)
        lists = cut_from_buffers(lists, gap=gap, only=name)
        traffic = assert_as_cpp(lists, dither=None)
        assert (traffic.wide_loads, traffic.wide_stores) == (0, 0)


@pytest.mark.parametrize(
    ("moments", "master", "dithered", "steps"),
    [
        ("fp32", FP32, False, [3.0, 4.0] * 20),
        ("fp32", FP32, False, "on the device"),
        ("bf16", FP32, True, [3.0] * 40),
        ("fp32", SPLIT24, True, [3.0] * 40),
        ("fp32", STOCHASTIC, True, [3.0] * 40),
        ("int8", FP32, False, [3.0] * 40),
    ],
    ids=str,
)
def test_neighbours_that_are_updated_otherwise_are_not(
    moments: str, master: Master, dithered: bool, steps: Any
) -> None:
    """By other steps, maybe other ones, other dither, or in blocks of their own."""
    lists = cut_from_buffers(lists_in_training([(3,)] * 40, moments, master, 3))
    lists.block_words = [t.clone() for t in lists.block_words]
    options = options_of(lists, master, dithered)
    if steps == "on the device":
        options["found_inf"] = torch.tensor(0.0)
        lists.steps = torch.arange(40).float()
    else:
        lists.steps = torch.tensor(steps)
    traffic = assert_as_cpp(lists, **options)
    assert (traffic.wide_loads, traffic.wide_stores) == (0, 0)


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moments", "master"), [("fp32", FP32), ("bf16", SPLIT24), ("int8", STOCHASTIC)], ids=str)
def test_more_steps_than_a_launch_carries(moments: str, master: Master) -> None:
    """Forty, interleaved, in the order of a permutation; the counters' place, and lr's, change no bit."""
    _, carried = capacities()
    lists = lists_in_training([(130,)] * 128, moments, master, 4)
    lists.steps = torch.full((135,), 77.0)
    index = torch.randperm(135, generator=generator(2))[:128]
    lists.steps[index] = (torch.arange(128) % 40).float() ** 2
    options = {**options_of(lists, master), "step_index": index}
    traffic = assert_as_cpp(lists, **options)
    assert carried == 16
    assert traffic.launches == 128 / carried
    assert assert_as_cpp(lists, **options, found_inf=torch.tensor(0.0)).launches == 2
    for dtype in (torch.float32, torch.float64):
        lr = torch.tensor(1e-2, dtype=dtype)
        assert assert_as_cpp(lists, **options, lr=lr).launches == 2
        results = [lists.clone() for _ in range(2)]
        for updated, extra in zip(results, ({}, {"found_inf": torch.tensor(0.0)}), strict=True):
            updated.update("cuda_twin", **{**ADAMW, **options, **extra, "lr": lr})
            raised = torch.zeros(135)
            raised[index] = 1.0
            assert_bits_equal(updated.steps, lists.steps + raised)
        results[0].assert_same(results[1])
        before = lists.clone()
        before.update("cuda_twin", **{**ADAMW, **options, "lr": lr, "found_inf": torch.tensor(1.0)})
        before.assert_same(lists)


# ---- grids -----------------------------------------------------------------------------------------------------------

SIZES = (1, 3, 4, 7, 8, 255, 1023, 1024, 1025, 4095, 4096, 4097, 16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1, 100_003)


def assert_any_grid(lists: AdamLists, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    expected = cut_like(lists).update("cpp", **ADAMW, **options)
    for multiprocessors in (1, 2, 132):
        monkeypatch.setenv("SHARDOPS_TWIN_MULTIPROCESSORS", str(multiprocessors))
        updated = cut_like(lists).update("cuda_twin", **ADAMW, **options)
        updated.assert_same(expected, f"{multiprocessors} multiprocessors: ")


@each_master
@each_moments
def test_any_grid_gives_the_same_bits(moments: str, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around the borders of accesses, rounds and chunks, which the size of the chip moves."""
    lists = lists_in_training([(size,) for size in SIZES], moments, master, 5, grad_dtype=torch.bfloat16)
    assert_any_grid(lists, monkeypatch, **options_of(lists, master))


@pytest.mark.parametrize("master", [SPLIT24, FP32], ids=str)
def test_any_grid_gives_the_same_blocks(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole and of broken blocks, in the same call: one kernel for each."""
    shapes = [(37, 127), (600, 128), (33, 129), (21, 256), (19, 300), (9, 128)]
    lists = lists_in_training(shapes, "int8", master, 6)
    assert_any_grid(lists, monkeypatch, **options_of(lists, master))
    assert traffic_of(lists, **options_of(lists, master)).launches == 2


def test_the_longest_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the grid that goes round its loop as often as any, and one element more or less than that."""
    rounds = 16 * 1024
    lists = lists_in_training([(n,) for n in (rounds - 1, rounds, rounds + 1, 500_000)], "fp32", SPLIT24, 7)
    assert_any_grid(lists, monkeypatch, **options_of(lists, SPLIT24))
