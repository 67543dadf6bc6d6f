"""Data flows one way: public API -> integrations -> optim -> plan and collectives -> ops -> backends. Imports say so.

Read from the source with ast, so that imports under TYPE_CHECKING, inside functions and by name count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardops

ROOT = Path(shardops.__file__).parent

# From the bottom up; a module imports its own layer and those below. Whatever is not named is the public API, on top.
LAYERS = (
    ("backends",),
    ("ops",),
    ("plan", "collectives", "reductions", "gradients", "shadow"),
    ("optim",),
    ("integrations",),
)
# Below them all, and importing nothing of the package: integers, and the compiled host module.
LEAVES = ("layout", "_host")
LOW = (*LEAVES, "backends", "ops")
# What a backend may import beside itself and the leaves: the ops' overloads that the C++ library implements.
BACKEND_IMPORTS = ("shardops.ops._library",)
COMPILED = ("shardops._host",)  # has no source to be listed by
FSDP = ("torch.distributed.fsdp", "torch.distributed._composable")
FSDP_IMPORTER = "shardops.integrations.fsdp"


def read_package() -> dict[str, str]:
    """Module name -> source; a folder's own module is ``folder.__init__``, so that relative imports count alike."""
    sources = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        sources[".".join(parts)] = path.read_text()
    return sources


def part(module: str) -> str:
    """The part of the package that a module belongs to: ``shardops.ops.grad_norm`` -> ``ops``; itself: ``""``."""
    return [*module.removesuffix(".__init__").split("."), ""][1]


def layer(module: str) -> int:
    return next((i for i, parts in enumerate(LAYERS) if part(module) in parts), len(LAYERS))


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of nested attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return None


def imports(module: str, source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported; ``from . import x`` names x where that is a module."""
    nodes = list(ast.walk(ast.parse(source)))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *base.split(".")] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                known = full in modules or full in COMPILED or not base.startswith("shardops")
                yield node.lineno, full if known else base
        elif isinstance(node, ast.Call) and (dotted(node.func) or "").endswith("import_module") and node.args:
            name = node.args[0]
            first = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).rstrip(".")
        elif (
            isinstance(node, ast.Attribute) and id(node) not in inner
        ):  # torch.distributed.all_reduce after `import torch`
            name = dotted(node)
            if name is not None and name.startswith(("torch.distributed", "torch.nn")):
                yield node.lineno, name


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def violation(module: str, name: str) -> str | None:
    """Why ``module`` may not import ``name``; None if it may."""
    if within(name, "shardops"):
        if part(module) in LEAVES:
            return f"{part(module)} imports nothing of the package"
        if part(name) in LEAVES:
            return None
        if part(module) == "backends":
            own = ".".join(module.removesuffix(".__init__").split(".")[:3])
            if not within(name, own) and name not in BACKEND_IMPORTS:
                return f"a backend imports itself, {', '.join((*LEAVES, *BACKEND_IMPORTS))}"
        elif layer(name) > layer(module):
            return "that is an upward import"
        return None
    if part(module) in LOW and part(module):
        if within(name, "torch.distributed") or name.endswith(".DTensor"):
            return "nothing below the plan knows process groups or DTensors"
        if name == "torch.nn" or (within(name, "torch.nn") and not within(name, "torch.nn.functional")):
            return "nothing below the plan knows modules"
        if name.split(".")[0] in ("fsdp", "torchtitan"):
            return "nothing below the plan knows frameworks"
    if any(within(name, prefix) for prefix in FSDP) and not within(module, FSDP_IMPORTER):
        return f"{FSDP_IMPORTER} is the only importer of torch's FSDP"
    return None


def violations(sources: dict[str, str]) -> list[str]:
    found = []
    modules = {module.removesuffix(".__init__") for module in sources}
    for module, source in sources.items():
        for line, name in imports(module, source, modules):
            reason = violation(module, name)
            if reason is not None:
                found.append(f"{module}, line {line}: imports {name}; {reason}")
    return found


def test_no_import_goes_up() -> None:
    assert violations(read_package()) == []


def test_every_import_was_looked_at() -> None:
    """The reader sees the package's modules and their imports of each other."""
    sources = read_package()
    modules = {module.removesuffix(".__init__") for module in sources}
    assert {"shardops", "shardops.layout", "shardops.ops._registry", "shardops.backends.cpp"} <= modules
    seen = {(m.removesuffix(".__init__"), n) for m, source in sources.items() for _, n in imports(m, source, modules)}
    assert ("shardops.ops.flatten_shard", "shardops.layout") in seen
    assert ("shardops.ops.flatten_shard", "shardops.ops._checks") in seen
    assert ("shardops.backends.cpp", "shardops.ops._library") in seen
    assert ("shardops.ops._registry", "shardops.backends") in seen  # by name, at run time
    assert ("shardops", "shardops.ops") in seen


BAD = [
    ("shardops.layout", "from . import ops", "layout imports nothing of the package"),
    ("shardops.layout", "from .plan import UpdatePlan", "layout imports nothing of the package"),
    ("shardops.backends.reference.new", "from ...ops import _checks", "a backend imports itself"),
    ("shardops.backends.reference.new", "from ..cpp import KERNELS", "a backend imports itself"),
    ("shardops.backends.triton.new", "import shardops", "a backend imports itself"),
    ("shardops.backends.triton.new", "import torch.distributed as dist", "nothing below the plan"),
    ("shardops.ops.new", "from .. import plan", "that is an upward import"),
    ("shardops.ops.new", "from ..optim.adam import FusedShardedAdam", "that is an upward import"),
    ("shardops.ops.new", "import shardops.collectives", "that is an upward import"),
    ("shardops.ops.new", "def f():\n    from shardops.optim import adam", "that is an upward import"),
    (
        "shardops.ops.new",
        "import importlib\nimportlib.import_module(f'shardops.optim.{x}')",
        "that is an upward import",
    ),
    ("shardops.ops.new", "from torch.distributed.tensor import DTensor", "nothing below the plan knows process groups"),
    (
        "shardops.ops.new",
        "import torch\ntorch.distributed.all_reduce(x)",
        "nothing below the plan knows process groups",
    ),
    ("shardops.ops.new", "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup", "nothing below the plan"),
    ("shardops.ops.new", "from torch import nn", "nothing below the plan knows modules"),
    ("shardops.ops.new", "import torch\nx: torch.nn.Module", "nothing below the plan knows modules"),
    ("shardops.plan", "from .optim import state", "that is an upward import"),
    ("shardops.plan", "from .integrations import fsdp", "that is an upward import"),
    ("shardops.collectives", "from shardops import FusedShardedAdam", "that is an upward import"),
    ("shardops.optim.new", "from ..integrations import fsdp", "that is an upward import"),
    ("shardops.optim.new", "from torch.distributed.fsdp import FSDPModule", "is the only importer of torch's FSDP"),
    ("shardops.integrations.zero", "import torch.distributed.fsdp", "is the only importer of torch's FSDP"),
    ("shardops.cli", "import torch\ntorch.distributed.fsdp.fully_shard(m)", "is the only importer of torch's FSDP"),
]

GOOD = [
    ("shardops.backends.triton.new", "from ...layout import align_up\nfrom ._math import adam_update"),
    ("shardops.backends.cpp.__init__", "from ...ops import _library"),
    ("shardops.backends.reference.__init__", "from .grad_norm import grad_norm"),
    (
        "shardops.ops.new",
        "import torch\nfrom .. import layout\nfrom . import _checks\ntorch.nn.functional.pad(x, (0, 1))",
    ),
    ("shardops.plan", "from .collectives import local_tensor\nfrom .ops import _checks\nfrom . import layout"),
    ("shardops.optim.host", "from .._host import same_items\nfrom .. import _host"),
    ("shardops.optim.new", "from ..plan import UpdatePlan\nfrom torch.distributed.tensor import DTensor"),
    ("shardops.integrations.fsdp", "from torch.distributed.fsdp import FSDPModule\nfrom ..optim import adam"),
    ("shardops.__init__", "from . import ops\nfrom .optim import FusedShardedAdam"),
    ("shardops.cli", "from . import backends"),
]


def with_module(module: str, source: str) -> dict[str, str]:
    """The package with one module added or replaced, and what else is to exist for its imports."""
    others = ("plan", "collectives", "optim.__init__", "optim.adam", "integrations.__init__", "integrations.fsdp")
    return {**{f"shardops.{name}": "" for name in others}, **dict.fromkeys(read_package(), ""), module: source}


@pytest.mark.parametrize(("module", "source", "reason"), BAD, ids=[f"{m}: {s}" for m, s, _ in BAD])
def test_a_bad_import_is_caught(module: str, source: str, reason: str) -> None:
    (found,) = violations(with_module(module, source))
    assert reason in found
    assert found.startswith(f"{module}, line ")


@pytest.mark.parametrize(("module", "source"), GOOD, ids=[m for m, _ in GOOD])
def test_a_good_import_is_not(module: str, source: str) -> None:
    assert violations(with_module(module, source)) == []
