"""What a training run holds in memory, before it runs: by component and rank, and what would make it fit.

``plan`` computes, ``measure`` runs one real step and puts what is live beside it.
"""

from __future__ import annotations

from .activations import Activations
from .measure import Measurement, live_nbytes, measure
from .planner import MemoryPlan, plan
from .search import Suggestion
from .sizes import format_size, parse_count, parse_size

__all__ = [
    "Activations",
    "Measurement",
    "MemoryPlan",
    "Suggestion",
    "format_size",
    "live_nbytes",
    "measure",
    "parse_count",
    "parse_size",
    "plan",
]
