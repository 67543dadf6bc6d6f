"""hypothesis where it is installed; where it is not (a GPU machine without a network), its tests are skipped, alone."""

from __future__ import annotations

from typing import Any

import pytest

try:
    import hypothesis
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:

    class _Anything:
        """Stands for any strategy, made in any way; none is ever drawn from."""

        def __getattr__(self, name: str) -> _Anything:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
            return self

    st = _Anything()

    def given(*args: Any, **kwargs: Any) -> Any:
        return pytest.mark.skip(reason="hypothesis is not installed: pip install hypothesis")

else:
    hypothesis.settings.register_profile("shardops", derandomize=True, max_examples=60, deadline=None, database=None)
    hypothesis.settings.load_profile("shardops")

__all__ = ["given", "st"]
