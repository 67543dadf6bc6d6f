"""What the planner suggests: changes that do make the model fit, none of them in vain, the cheapest first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shardops.memory import Activations, plan, search
from shardops.memory.options import make_options
from shardops.memory.planner import read_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "13B": ("13B", "80GB", {"master": "fp32"}),
    "13B, exact masters": ("13B", "80GB", {}),
    "7B, fp32": ("7B", "80GB", {"param_dtype": "fp32"}),
    "8B on 8 ranks": (LLAMA, "16GB", {"world_size": 8, "zero": 3}),
    "8B replicated": (LLAMA, "100GB", {"world_size": 2, "master": "split24"}),
    "8B with activations": (LLAMA, "40GB", {"activations": Activations(1, 4096)}),
    "8B, stage 1": (LLAMA, "24GB", {"world_size": 16, "zero": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_suggestions_fit_and_nothing_of_them_is_in_vain(case: str) -> None:
    """Each is planned again as it says, and again without each of its changes."""
    model, device_memory, options = CASES[case]
    found = plan(model, device_memory=device_memory, **options)
    assert not found.fits
    assert found.suggestions
    for suggestion in found.suggestions:
        again = plan(model, device_memory=device_memory, suggest=False, **(found.options | suggestion.changes))
        assert again.fits
        assert again.per_rank["total"] == suggestion.total
        for name in suggestion.changes:
            fewer = {key: value for key, value in suggestion.changes.items() if key != name}
            try:
                without = plan(model, device_memory=device_memory, suggest=False, **(found.options | fewer))
            except ValueError:  # gradient release over replicas
                continue
            assert not without.fits, (suggestion.text, name)


@pytest.mark.parametrize("case", CASES)
def test_the_cheapest_is_first(case: str) -> None:
    """More ranks after offloading after a loss of precision after none."""
    model, device_memory, options = CASES[case]
    found = plan(model, device_memory=device_memory, **options)

    def kind(changes: dict[str, Any]) -> tuple[int, bool, bool]:
        loses = "state_dtype" in changes or changes.get("master") in ("split24", "stochastic")
        return changes.get("world_size", 0), "offload_state" in changes, loses

    kinds = [kind(suggestion.changes) for suggestion in found.suggestions]
    assert kinds == sorted(kinds)
    assert len(set(kinds)) == len(kinds)


def test_what_is_suggested_for_thirteen_billion() -> None:
    changes = [s.changes for s in plan("13B", master="fp32", device_memory="80GB").suggestions]
    assert changes[0] == {"state_dtype": "int8", "master": "split32", "gradient_release": True}
    assert changes[1] == {"offload_state": "cpu"}
    assert {"world_size": 2, "zero": 3, "state_dtype": "bfloat16"} in changes
    (first, *_) = plan("13B", master="fp32", device_memory="80GB").suggestions
    assert first.text == (
        "exact masters in 16 bits more (master='split32'), moments in 8 bits (state_dtype='int8'), gradient release "
        "(shardops.enable_gradient_release): 79.1 GB (73.7 GiB)"
    )


def test_what_is_suggested_is_accepted() -> None:
    """FSDP2 gives each gradient its parameter's dtype: with narrower ones its stage is no way out."""
    asked: dict[str, Any] = {"world_size": 8, "param_dtype": "float32", "grad_dtype": "bfloat16"}
    found = plan("7B", device_memory="60GB", **asked).suggestions
    assert found
    for suggestion in found:
        changed = plan("7B", device_memory="60GB", **{**asked, **suggestion.changes})
        assert (changed.fits, changed.per_rank["total"]) == (True, suggestion.total), suggestion.text
    low = plan("7B", device_memory="60GB", world_size=8, param_dtype="float16").suggestions
    assert all(suggestion.changes.get("master") not in ("split32", "split24", "stochastic") for suggestion in low)


def test_a_change_without_loss_is_taken_where_one_suffices() -> None:
    model: Any = LLAMA
    (first, *_) = plan(model, world_size=4, device_memory="130GB", master="fp32").suggestions
    assert first.changes == {"gradient_as_bucket_view": True}
    (first, *_) = plan(model, world_size=4, device_memory="60GB", master="fp32").suggestions
    assert first.changes == {"zero": 3}
    (first, *_) = plan(model, device_memory="120GB", master="fp32").suggestions
    assert first.changes == {"master": "split32"}
    (first, *_) = plan(model, device_memory="40GB", world_size=8, zero=3, activations=Activations(1, 4096)).suggestions
    assert first.changes["activations"]["checkpointing"] == "full"
    assert "full activation checkpointing" in first.text


@pytest.mark.parametrize("master", ["none", "stochastic", "fp32"])
def test_masters_are_not_suggested_where_there_are_none_to_change(master: str) -> None:
    """Of float16 parameters only fp32 masters and none are known; "none" and "stochastic" have nothing to give."""
    param_dtype = "float16" if master == "fp32" else "bfloat16"
    found = plan("13B", master=master, param_dtype=param_dtype, device_memory="60GB")
    assert found.suggestions
    assert all("master" not in suggestion.changes for suggestion in found.suggestions)


def test_nothing_fits() -> None:
    found = plan(LLAMA, device_memory="5GB")
    assert found.suggestions == []
    (note,) = found.notes
    least = min(
        plan(
            LLAMA,
            world_size=1024,
            zero=3,
            state_dtype="int8",
            gradient_release=True,
            master=master,
            offload_state=offload,
        ).per_rank["total"]
        for master, offload in itertools.product(("split32", "stochastic"), (None, "cpu"))
    )
    assert note.startswith("nothing that was tried fits 5.0 GB (4.7 GiB); the least is 1024 ranks")
    _, best = search.search(read_model(LLAMA), make_options({}), 5 * 10**9)
    assert best.total == least
    assert best.text in note


def test_nothing_is_looked_for_where_it_fits_or_nobody_asks() -> None:
    assert plan("1B", device_memory="80GB").suggestions == []
    assert plan("1B", device_memory="80GB").fits
    assert plan("13B").fits is None
    assert plan("13B").suggestions == []
    assert plan("13B", device_memory="80GB", suggest=False).suggestions == []
    limit = plan("13B").per_rank["total"]
    exact = plan("13B", device_memory=limit)
    assert exact.fits
    assert exact.verdict.endswith("fits, with 0 bytes left")
    assert not plan("13B", device_memory=limit - 1, suggest=False).fits


def test_what_a_count_assumes_is_said() -> None:
    assert any("has no shapes" in note for note in plan("13B", gradient_release=True).notes)
    assert any("has no shapes" in note for note in plan("13B", device_memory="80GB", master="fp32").notes)
    assert plan("13B").notes == ()
    assert plan(LLAMA, gradient_release=True).notes == ()
