"""Numbers as people write them: amounts of memory, numbers of parameters and names of dtypes, read and shown.

GB is 10**9 bytes and GiB 2**30; both are accepted, and both are shown.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**16  # of both: sums of them stay within 64 bits
_NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)"
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def parse_size(size: str | int) -> int:
    """An amount of memory in bytes: ``"80GB"`` (80 * 10**9), ``"74GiB"`` (74 * 2**30), ``"512"`` or an int (bytes).

    Raises:
        ValueError: anything else, or nothing: an amount is at least one byte.
        TypeError: neither text nor an integer.
    """
    given = size
    if isinstance(size, str):
        match = re.fullmatch(_NUMBER + r"\s*([kmgt]i?|)b?", size.strip().replace("_", "").lower())
        if match is None:
            raise ValueError(f"{size!r} is no amount of memory; write 80GB (10**9 bytes), 74GiB (2**30) or bytes")
        value = float(match[1]) * _BYTES[match[2]]
        size = round(value) if value < _MOST else _MOST
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"the amount of memory is {size!r}; it is a number of bytes, or text as 80GB or 74GiB")
    if not 1 <= size < _MOST:
        raise ValueError(f"the amount of memory is {given!r}; it is at least one byte and less than {_MOST:.0e}")
    return size


def format_size(nbytes: int) -> str:
    """Bytes in both units: ``"208.0 GB (193.7 GiB)"``; of less than a gigabyte in MB and MiB, below that in kB."""
    for power, decimal, binary in ((3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if abs(nbytes) >= 10 ** (3 * power):
            return f"{nbytes / 10 ** (3 * power):,.1f} {decimal} ({nbytes / 2 ** (10 * power):,.1f} {binary})"
    return f"{nbytes} bytes"


def parse_count(count: str | int) -> int:
    """A number of parameters: ``"13B"``, ``"7.5B"``, ``"350M"``, ``"20k"``, ``"7.5e9"`` or an int.

    Raises:
        ValueError: anything else, or none: a model has at least one parameter.
    """
    given = count
    if isinstance(count, str):
        match = _match_count(count)
        if match is None:
            raise ValueError(f"{count!r} is no number of parameters; write 13B, 350M, 20k or an integer")
        value = float(match[1]) * _COUNTS[match[2]]
        count = round(value) if value < _MOST else _MOST
    if not 1 <= count < _MOST:
        raise ValueError(f"the number of parameters is {given}; it is at least 1 and less than {_MOST:.0e}")
    return count


def is_count(value: Any) -> bool:
    """Whether it is an integer, or text that is a number of parameters and not the path of a file."""
    if not isinstance(value, str):
        return isinstance(value, int) and not isinstance(value, bool)
    return _match_count(value) is not None


def _match_count(text: str) -> re.Match[str] | None:
    return re.fullmatch(_NUMBER + "([kmbt]?)", text.strip().replace("_", "").lower())


def parse_dtype(dtype: Any, name: str) -> torch.dtype:
    """float32, bfloat16 or float16, as a ``torch.dtype`` or its name.

    Args:
        dtype: as the caller got it.
        name: of the option, for the error.

    Raises:
        ValueError: anything else.
    """
    found = _DTYPES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ValueError(f"{name} is {dtype!r}; it is float32, bfloat16 or float16, as a torch.dtype or its name")
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """``torch.bfloat16`` -> ``"bfloat16"``, as in JSON."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
