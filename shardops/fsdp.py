"""``shardops.fsdp``: plugging the optimizer into torch's FSDP. The names of ``integrations/fsdp``, where users look."""

from __future__ import annotations

from .integrations.fsdp import Attachment, FusedCopies, PlugIn, disabled, plug_in, plug_in_of, use_fused_copies

__all__ = ["Attachment", "FusedCopies", "PlugIn", "disabled", "plug_in", "plug_in_of", "use_fused_copies"]
