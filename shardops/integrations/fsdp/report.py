"""What plugging in did to each parameter, and why not more; printable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# How a parameter's all-gathers get their input.
SHADOW = "shadow"
ELIDED = "shadow, copy-in elided"
MASTER = "exact master"
MASTER_FP32 = "exact master, float32 gradients"
STOCK = "stock"


@dataclass(frozen=True)
class Attachment:
    """One parameter.

    Attributes:
        name: from the model's root, or of its own module before FSDP knows the root.
        shape: of the whole parameter.
        path: ``"shadow"``: the step writes what all-gathers send. ``"shadow, copy-in elided"``: and nothing copies it
            once more. ``"exact master"``: the parameter is low-precision and sent as it is, the optimizer completes it
            to an exact fp32. ``"exact master, float32 gradients"``: and steps by what was reduced before it was rounded
            to the parameter's dtype. ``"stock"``: as torch makes it.
        why: why no more than that; empty where there is nothing more.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    why: str = ""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


def table(attachments: Iterable[Attachment]) -> str:
    """Attachments in one line for each path and reason, the parameters' names at its end."""
    lines: dict[tuple[str, str], list[Attachment]] = {}
    for attachment in attachments:
        lines.setdefault((attachment.path, attachment.why), []).append(attachment)
    if not lines:
        return "no parameters"
    texts = []
    for (path, why), members in sorted(lines.items()):
        names = ", ".join(member.name for member in members[:3]) + (", ..." if len(members) > 3 else "")
        elements = sum(member.numel for member in members)
        reason = f": {why}" if why else ""
        counts = f"{len(members)} parameter{'s'[: len(members) != 1]}, {elements:,} element{'s'[: elements != 1]}"
        texts.append(f"{path}: {counts} ({names}){reason}")
    return "\n".join(texts)
