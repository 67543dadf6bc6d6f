"""The planner: published figures, exact shapes, formulas worked by hand, and what is refused.

That planned bytes are what is really live: test_memory_live.py; what it suggests: test_memory_search.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardops.memory import Activations, MemoryPlan, plan
from shardops.memory.configs import KNOWN
from shardops.memory.planner import read_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def total(model: Any, **options: Any) -> int:
    return plan(model, **options).per_rank["total"]


# ---- published figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "printed"), [(0, "120.0"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_the_zero_papers_example(zero: int, printed: str) -> None:
    """Rajbhandari et al. (2020), figure 1: 7.5 billion parameters over 64 devices."""
    assert f"{total('7.5B', world_size=64, zero=zero, master='fp32') / 1e9:.1f}" == printed


def test_thirteen_billion_do_not_train_on_80_gb() -> None:
    found = plan("13B", master="fp32", device_memory="80GB")
    assert found.per_rank == {
        "parameters": 26 * 10**9,
        "gradients": 26 * 10**9,
        "master": 52 * 10**9,
        "exp_avg": 52 * 10**9,
        "exp_avg_sq": 52 * 10**9,
        "activations": 0,
        "buffers": 0,
        "total": 208 * 10**9,
    }
    assert (found.fits, found.device_memory, found.bytes_per_parameter) == (False, 80 * 10**9, 16.0)
    assert found.verdict == (
        "208.0 GB (193.7 GiB) a rank on 80.0 GB (74.5 GiB), activations and buffers not counted: does not fit: "
        "128.0 GB (119.2 GiB) too much"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 14),
        ({"state_dtype": "int8"}, 8.0625),
        ({"state_dtype": "int8", "master": "split24"}, 7.0625),
        ({"state_dtype": "bfloat16", "master": "stochastic"}, 8),
        ({"state_dtype": "int8", "master": "none"}, 6.0625),
        ({"param_dtype": "float16"}, 16),
        ({"param_dtype": "float32"}, 16),
        ({"grad_dtype": "float32"}, 16),
        ({"amsgrad": True}, 18),
        ({"world_size": 8, "zero": 3}, 14 / 8),
    ],
)
def test_bytes_per_parameter_of_a_count(options: dict[str, Any], expected: float) -> None:
    assert plan(2**30, **options).bytes_per_parameter == expected


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA, 6_738_415_616),  # Llama 2 7B
        (LLAMA | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}, 8_030_261_248),
        (
            LLAMA | {"model_type": "mistral", "num_key_value_heads": 8, "intermediate_size": 14336},
            7_241_732_096,
        ),
        (
            LLAMA
            | {"model_type": "mixtral", "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8},
            46_702_792_704,
        ),
        (
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
            },
            7_615_616_512,
        ),
        (GPT2, 124_439_808),
    ],
    ids=["llama-2-7b", "llama-3-8b", "mistral-7b", "mixtral-8x7b", "qwen2-7b", "gpt2"],
)
def test_published_sizes(config: dict[str, Any], numel: int) -> None:
    assert plan(config).parameters == numel


# ---- configs and modules ---------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24}),
    ("mistral", {"head_dim": 32}),
    ("mixtral", {"num_local_experts": 6}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 100, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=[f"{kind} {more}" for kind, more in VARIANTS])
def test_shapes_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    content = json.loads(config.to_json_string(use_diff=False))
    if "head_dim" not in changes:  # older files lack it
        content.pop("head_dim", None)
    of_config, of_module = read_model(content), read_model(model)

    def shapes(group: Any) -> Counter[tuple[int, ...]]:
        return Counter({spec.shape: count for spec, count in group})

    assert of_config.numel == sum(param.numel() for param in model.parameters())
    assert shapes(of_config.root) == shapes(of_module.root)
    ((block, times),), ((theirs, their_times),) = of_config.blocks, of_module.blocks
    assert (shapes(block), times) == (shapes(theirs), their_times)
    assert of_module.decoder == of_config.decoder


def test_every_family_is_compared() -> None:
    assert {kind for kind, _ in VARIANTS} == set(KNOWN)


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    expected = plan(GPT2)
    assert plan(str(tmp_path / "config.json")) == plan(tmp_path) == expected


class Odd(nn.Module):
    """Tied, frozen, in blocks and out of them, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 130)
        self.layers = nn.ModuleList(nn.Linear(130, 40) for _ in range(3))
        self.head = nn.Linear(130, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.empty(7, 3), requires_grad=False)
        self.register_buffer("mean", torch.empty(11))


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Odd()
    numel = 50 * 130 + 3 * (40 * 130 + 40)
    found = plan(model, param_dtype=torch.bfloat16)
    assert found.parameters == numel + 21
    assert found.per_rank == {
        "parameters": 2 * (numel + 21),
        "gradients": 2 * numel,
        "master": 2 * numel,
        "exp_avg": 4 * numel,
        "exp_avg_sq": 4 * numel,
        "activations": 0,
        "buffers": 11 * 4 + 7 * 4,  # the mean, and the counters
        "total": 14 * numel + 42 + 72,
    }
    assert plan(model).per_rank["parameters"] == 4 * (numel + 21)  # its own dtype
    spec = read_model(model)
    assert [(times, sum(count for _, count in group)) for group, times in spec.blocks] == [(3, 2)]


def test_int8_keeps_short_rows_and_small_parameters_in_fp32() -> None:
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(32, 130), torch.empty(40, 127), torch.empty(10, 400), torch.empty(9000)])
    found = plan(model, state_dtype="int8", param_dtype="bf16").per_rank
    plain = 40 * 127 + 4000 + 9000
    # Of a row of 130, a block of 128 and one of 2, of two words each.
    assert found["exp_avg"] == 32 * 130 + 32 * 2 * 2 + 4 * plain
    assert found["exp_avg_sq"] == 32 * 130 + 32 * 2 * 6 + 4 * plain


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_padding_of_uneven_shards() -> None:
    """13 rows over 4 ranks are 4, 4, 4 and 1, 2 rows are 1, 1, 0 and 0; parameters and gradients are padded."""
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(13, 5), torch.empty(2, 3)])
    found = plan(model, world_size=4, zero=3, param_dtype="bfloat16", buffers=False, ranks=True)
    assert found.ranks is not None
    assert [rank["parameters"] for rank in found.ranks] == [2 * (4 * 5 + 3)] * 4
    assert [rank["gradients"] for rank in found.ranks] == [2 * (4 * 5 + 3)] * 4
    assert [rank["exp_avg"] for rank in found.ranks] == [4 * 23, 4 * 23, 4 * 20, 4 * 5]
    assert [rank["master"] for rank in found.ranks] == [2 * 23, 2 * 23, 2 * 20, 2 * 5]
    assert found.per_rank == found.ranks[0]
    assert "ranks" in found.to_json()
    assert "ranks" not in plan(model).to_json()


def test_a_count_is_cut_anywhere() -> None:
    found = plan(10, world_size=4, zero=3, param_dtype="fp32", ranks=True)
    assert found.ranks is not None
    assert [rank["exp_avg"] for rank in found.ranks] == [12, 12, 12, 4]


def test_gradient_release_holds_one_parameters_or_one_groups_gradients() -> None:
    with torch.device("meta"):
        model = Odd()
    options: dict[str, Any] = {"param_dtype": "bf16", "gradient_release": True}
    assert plan(model, **options).per_rank["gradients"] == 2 * 50 * 130
    two = plan(model, world_size=2, zero=3, **options).per_rank["gradients"]
    assert two == 2 * 25 * 130  # the root's; a block has 20 * 131


def test_a_number_of_parameters_is_planned_as_the_model_it_is_taken_for() -> None:
    """Gradient release and buffers of Llama 2, whose MLP is a hundredth wider."""
    exact = plan(LLAMA).parameters
    for options in (
        {"gradient_release": True},
        {"gradient_release": True, "world_size": 8, "zero": 3, "buffers": True},
        {"world_size": 8, "zero": 3, "buffers": True},
        {"world_size": 8, "buffers": True},
    ):
        count, config = (plan(model, **options).per_rank for model in (exact, LLAMA))  # type: ignore[arg-type]
        assert count["gradients"] == pytest.approx(config["gradients"], rel=0.01), options
        if "buffers" in options:
            assert count["buffers"] == pytest.approx(config["buffers"], rel=0.01), options


def test_what_is_not_counted_is_said() -> None:
    shadows: dict[str, Any] = {"world_size": 8, "zero": 3, "param_dtype": "fp32", "compute_dtype": "bf16"}
    found = plan("13B", device_memory="80GB", **shadows)
    assert found.per_rank["buffers"] > 0  # the shadows alone
    assert found.not_counted == ("activations", "buffers")
    assert "activations and buffers not counted" in found.verdict
    assert plan("13B", buffers=True, activations=0, **shadows).not_counted == ()
    assert plan("13B", buffers=False, activations=0).not_counted == ()
    exact = plan(LLAMA, device_memory="80GB", activations={"batch": 1, "sequence": 8})
    assert exact.not_counted == ()
    assert "counted" not in exact.verdict


def test_offloaded_states_are_on_the_host() -> None:
    found = plan(10**9, offload_state="cpu")
    assert found.host == 10 * 10**9
    assert [found.per_rank[name] for name in ("master", "exp_avg", "exp_avg_sq")] == [0, 0, 0]
    assert found.per_rank["buffers"] == 256 << 20
    assert found.per_rank["total"] == 4 * 10**9 + (256 << 20)
    assert total(1000, offload_state="cpu") == 4000 + 10_000  # no more than there is


def test_buffers() -> None:
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(100, 10)])

    def buffers(**options: Any) -> int:
        return plan(model, **options).per_rank["buffers"] - 4  # the counter

    assert buffers() == 0
    assert buffers(world_size=2) == 4000  # DDP's buckets
    assert buffers(world_size=2, gradient_as_bucket_view=True) == 0
    assert buffers(world_size=2, zero=1) == buffers(world_size=2, zero=2) == 2 * 4000
    assert buffers(world_size=2, zero=1, bucket_bytes=1000) == 2000
    assert buffers(compute_dtype="bf16") == 2000  # autocast's copy
    assert buffers(world_size=3, zero=3) == 4000 + 3 * 34 * 10 * 4  # a gradient and the reduce-scatter's input
    shadowed = plan(model, world_size=3, zero=3, compute_dtype="bf16").per_rank["buffers"]
    without = plan(model, world_size=3, zero=3, compute_dtype="bf16", shadows=False).per_rank["buffers"]
    assert shadowed - without == 34 * 10 * 2
    assert plan(model, world_size=3, zero=3, buffers=False).per_rank["buffers"] == 0
    assert plan("7B", world_size=3, zero=3).per_rank["buffers"] == 0
    assert plan("7B", world_size=3, zero=3, buffers=True).per_rank["buffers"] > 10**9


def test_blocks_are_gathered_two_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(5))
        model.head = nn.Linear(100, 20, bias=False)
    block, root = 100 * 100, 100 * 20
    found = plan(model, world_size=2, zero=3, param_dtype="bf16").per_rank["buffers"] - 6 * 4
    scattered = 4 * block + 4 * block // 2  # with the fp32 output, which is rounded yet
    assert found == 2 * root + 2 * root + 2 * 2 * block + 2 * block + scattered


# ---- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activations_of_gpt_by_korthikantis_formula(checkpointing: str) -> None:
    batch, sequence, hidden, heads, layers, vocabulary = 4, 1024, 768, 12, 12, 50257
    tokens = batch * sequence
    found = plan(
        GPT2, activations=Activations(batch, sequence, checkpointing=checkpointing, flash_attention=False)
    ).per_rank["activations"]
    layer = tokens * hidden * (34 + 5 * heads * sequence // hidden)
    expected = {
        "none": layers * layer,
        "selective": layers * 34 * tokens * hidden,
        "full": layers * 2 * tokens * hidden + layer,
    }[checkpointing]
    ends = 4 * tokens * hidden + 4 * tokens * vocabulary + tokens * hidden
    assert found == expected + ends


def test_activations_of_a_gated_decoder_with_flash_attention() -> None:
    config = LLAMA | {"num_key_value_heads": 8, "num_hidden_layers": 1}
    found = plan(config, activations={"batch": 2, "sequence": 512}).per_rank["activations"]
    tokens, hidden, heads = 1024, 4096, 32
    attention = 2 * tokens * (hidden + hidden + 2 * 1024 + hidden) + 4 * tokens * heads
    mlp = 2 * tokens * (hidden + 4 * 11008)
    assert found == attention + mlp + 4 * tokens * hidden + 4 * tokens * hidden + 4 * tokens * 32000
    fp32 = plan(config, param_dtype="fp32", activations={"batch": 2, "sequence": 512}).per_rank["activations"]
    assert fp32 - found == found - 4 * tokens * heads - 4 * tokens * 32000
    mixed = plan(config, param_dtype="fp32", compute_dtype="bf16", activations={"batch": 2, "sequence": 512})
    assert mixed.per_rank["activations"] == found
    assert plan("7B", activations=5 * 10**9).per_rank["activations"] == 5 * 10**9


def test_a_number_of_parameters_is_taken_for_a_decoder() -> None:
    """Llama 2 of 7 and of 13 billion comes out as it is."""
    thirteen = LLAMA | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
    thirteen |= {"num_key_value_heads": 40, "intermediate_size": 13824}
    for config, layers in ((LLAMA, "32 layers of width 4096"), (thirteen, "40 layers of width 5120")):
        run = {"batch": 2, "sequence": 1024}
        exact = plan(config, activations=run)
        guess = plan(exact.parameters, activations=run)
        assert guess.per_rank["activations"] == pytest.approx(exact.per_rank["activations"], rel=0.01)
        assert layers in " ".join(guess.notes)
        assert not exact.notes
    assert plan(1000, activations={"batch": 1, "sequence": 8}).per_rank["activations"] > 0
    assert not plan("7B", activations=5 * 10**9).notes
    tight = plan("70B", world_size=16, zero=3, device_memory="80GB", activations={"batch": 2, "sequence": 4096})
    assert tight.suggestions[0].changes["activations"]["checkpointing"] == "full"


def test_json() -> None:
    found = plan(GPT2, device_memory="1GiB", activations=Activations(1, 64), param_dtype=torch.bfloat16, buffers=False)
    content = json.loads(json.dumps(found.to_json()))
    assert set(content) == {
        "per_rank",
        "bytes_per_parameter",
        "parameters",
        "fits",
        "device_memory",
        "suggestions",
        "options",
        "host",
        "notes",
        "not_counted",
    }
    assert content["suggestions"]
    assert set(content["suggestions"][0]) == {"text", "changes", "total"}
    assert content["options"]["param_dtype"] == "bfloat16"
    again = plan(GPT2, device_memory=content["device_memory"], **content["options"])
    assert again == found
    assert isinstance(again, MemoryPlan)


def test_stages_that_are_not_there_yet_are_said_to_be_by_formula() -> None:
    assert [len(plan("7B", world_size=4, zero=zero).notes) for zero in (0, 1, 2, 3)] == [0, 1, 1, 0]
