"""The picture of ``shardops plan --png``: bytes of a rank as stacked bars, one for each stage, and the device's limit.

Needs matplotlib. Colours are those of Okabe and Ito (2008), which colour-blind people tell apart; what is neither the
model's nor the optimizer's is hatched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Component -> colour, and what is drawn over it.
COMPONENTS = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#56B4E9", ""),
    "master": ("#E69F00", ""),
    "exp_avg": ("#009E73", ""),
    "exp_avg_sq": ("#F0E442", ""),
    "activations": ("#CC79A7", "//"),
    "buffers": ("#BBBBBB", ".."),
}
LIMIT = "#B03000"  # Okabe and Ito's vermillion, darker, to be read as text on white
STAGES = ("replicas", "states sharded", "and gradients", "and parameters\n(FSDP)")
_OPTIONS = {
    "amsgrad": "amsgrad",
    "gradient_release": "gradient release",
    "offload_state": "states in host memory",
}
Units = tuple[tuple[str, int], tuple[str, int]]  # names and bytes of a decimal and a binary unit
_INCHES, _DPI = (9.0, 5.6), 150


def draw_stages(path: str | Path, model: Any, keywords: Mapping[str, Any]) -> list[Any]:
    """Writes the picture.

    Args:
        path: of the file; its ending says which format, as ``.png`` or ``.svg``.
        model: as :func:`shardops.memory.plan` takes it.
        keywords: for that function; the stage among them is the one that is marked.

    Returns:
        The plan of each stage; the reason, as a text, for a stage that these options do not go with.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no stage goes with these options; an unknown ending.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("--png draws with matplotlib, which is not installed: pip install matplotlib") from error
    plans = [_plan(model, {**keywords, "zero": stage}) for stage in range(len(STAGES))]
    drawn = {stage: plan for stage, plan in enumerate(plans) if not isinstance(plan, str)}
    if not drawn:
        raise ValueError(f"no stage can be drawn: {plans[0]}")
    some = next(iter(drawn.values()))
    # Not pyplot: no window system is asked for, and nothing is left open.
    figure = matplotlib.figure.Figure(figsize=_INCHES, layout="constrained")
    axes: Any = figure.add_subplot()
    units = _units(max(*(plan.per_rank["total"] for plan in drawn.values()), some.device_memory or 0))
    bottoms = dict.fromkeys(drawn, 0.0)
    for name, (colour, hatch) in COMPONENTS.items():
        heights = {stage: plan.per_rank[name] / units[0][1] for stage, plan in drawn.items()}
        if not any(heights.values()):
            continue
        axes.bar(
            list(heights),
            list(heights.values()),
            bottom=list(bottoms.values()),
            width=0.62,
            color=colour,
            hatch=hatch,
            edgecolor="#444444",
            linewidth=0.6,
            label=name,
        )
        bottoms = {stage: bottoms[stage] + height for stage, height in heights.items()}
    _annotate(axes, plans, some, keywords.get("zero", 0), units)
    figure.savefig(path, dpi=_DPI)
    return plans


def _plan(model: Any, keywords: Mapping[str, Any]) -> Any:
    from ..memory import plan

    try:
        return plan(model, suggest=False, **keywords)
    except ValueError as error:
        return str(error)


def _units(largest: int) -> Units:
    """The largest units that an amount is at least one of."""
    power = 3 if largest >= 10**9 else 2 if largest >= 10**6 else 1
    names = {1: ("kB", "KiB"), 2: ("MB", "MiB"), 3: ("GB", "GiB")}[power]
    return (names[0], 10 ** (3 * power)), (names[1], 2 ** (10 * power))


def _annotate(axes: Any, plans: list[Any], some: Any, planned: int, units: Units) -> None:
    (unit, scale), (binary, binary_scale) = units
    limit = some.device_memory
    totals = [plan.per_rank["total"] for plan in plans if not isinstance(plan, str)]
    top = max(*totals, limit or 0) / scale
    for stage, plan in enumerate(plans):
        if isinstance(plan, str):
            axes.text(stage, 0.02 * top, "not with\nthese options", ha="center", va="bottom", color="#444444")
            continue
        total = plan.per_rank["total"]
        words = [f"{total / scale:,.1f} {unit}", f"{total / binary_scale:,.1f} {binary}"]
        if limit is not None:
            words.append("fits" if plan.fits else f"{(total - limit) / scale:,.1f} {unit} too much")
        # The limit's line may go through it.
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        place = {"ha": "center", "va": "bottom", "fontsize": 10, "zorder": 4, "bbox": box}
        axes.text(stage, total / scale + 0.015 * top, "\n".join(words), **place)
    if limit is not None:
        words_of_limit = f"device: {limit / scale:,.1f} {unit}\n({limit / binary_scale:,.1f} {binary})"
        axes.axhline(limit / scale, color=LIMIT, linestyle="--", linewidth=2, label=words_of_limit, zorder=3)
    axes.set_ylim(0, 1.2 * top)
    axes.set_xlim(-0.6, len(STAGES) - 0.4)
    axes.set_xticks(range(len(STAGES)), [f"ZeRO {stage}\n{text}" for stage, text in enumerate(STAGES)], fontsize=10)
    axes.get_xticklabels()[planned].set_fontweight("bold")
    exponent = {"kB": "10³", "MB": "10⁶", "GB": "10⁹"}[unit]
    axes.set_ylabel(f"{unit} ({exponent} bytes) on one rank", fontsize=11)
    axes.set_title(_title(some), fontsize=12, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#DDDDDD")
    handles, labels = axes.get_legend_handles_labels()
    pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0] not in COMPONENTS)
    # From the top of a bar to its foot, the limit above them.
    labels, handles = zip(*pairs[::-1], strict=True)
    axes.figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=10)


def _title(plan: Any) -> str:
    ranks, options = plan.options["world_size"], plan.options
    words = [f"{options['state_dtype']} moments", f"master {options['master']!r}"]
    if options["param_dtype"] is not None:
        words.insert(0, f"{options['param_dtype']} parameters")
    words += [text for name, text in _OPTIONS.items() if options[name]]
    count = f"{plan.parameters / 1e9:,.4g} billion" if plan.parameters >= 10**8 else f"{plan.parameters:,}"
    line = f"{count} parameters on {ranks} rank{'s' * (ranks > 1)}: what one rank holds"
    return f"{line}\n{', '.join(words)}; bold: as asked for"
