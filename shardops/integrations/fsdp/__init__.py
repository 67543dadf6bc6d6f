"""shardops under torch's FSDP: parameters whose all-gathers send what the step wrote, with no cast and no copy-in."""

from __future__ import annotations

from ...optim import attachers
from .attachments import PlugIn, attach_by_itself, disabled, plug_in, plug_in_of
from .copies import FusedCopies, use_fused_copies
from .report import Attachment

attachers.register(attach_by_itself)

__all__ = ["Attachment", "FusedCopies", "PlugIn", "disabled", "plug_in", "plug_in_of", "use_fused_copies"]
