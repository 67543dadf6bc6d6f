"""Replacing kernels of torch's ``fsdp::`` operators in this process, and giving them back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch


def override(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Any:
    """Puts kernels in front of torch's.

    Args:
        kernels: (operator, dispatch key) -> kernel, as ``("chunk_cat", "CPU")``.

    Returns:
        The ``torch.library.Library`` that they live in: ``_destroy()`` uncovers what was there before.
    """
    library: Any = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns of the first override in a process; ours are meant.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for (operator, key), kernel in kernels.items():
            library.impl(operator, kernel, key, allow_override=True)
    return library
