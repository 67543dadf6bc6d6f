"""What all tests share: the backends that they run over, and one thread unless a test asks for more."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, debug, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `import reference`

import twin

from shardops.ops import _registry

# Every backend that runs in this process. A missing C++ library makes tests fail, it does not skip them.
# "cuda_twin": the CUDA kernels, compiled for the CPU (twin.py).
BACKENDS = ("reference", "cpp", "cuda_twin")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda_twin":
        twin.register()
    return str(request.param)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder of this run of the tests that the workers of pytest-xdist have in common, so that one does for all."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the examples; they are forgotten after the test, as their names are too common to stay."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for path in EXAMPLES.glob("*.py"):
        # Set first, so that what is there at the end is undone whether or not it was there before.
        monkeypatch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]
    return importlib.import_module


@pytest.fixture
def dtensor() -> Iterator[torch.Tensor]:
    """Four ones as a DTensor over a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()
    # Results of DTensor ops come with the mesh that a cache holds, and thereby with groups that are gone.
    debug._clear_sharding_prop_cache()


@pytest.fixture(autouse=True)
def _registered_backends() -> Iterator[None]:
    """The twins are a backend for those tests only that ask for them."""
    before = _registry.BACKENDS
    yield
    _registry.BACKENDS = before


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
