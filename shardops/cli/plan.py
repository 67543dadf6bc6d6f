"""``shardops plan``: bytes that a training run holds on each rank, whether they fit, and what would make them fit.

``shardops.memory`` computes; this reads options and prints. Exit code 0 if it fits or no limit was given, 1 if it does
not fit, 2 for options that make no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _show

if TYPE_CHECKING:
    from ..memory import Measurement, MemoryPlan

DTYPES = ("float32", "bfloat16", "float16")
# Options of the command line that are keyword arguments of shardops.memory.plan, as they are.
_PLAIN = (
    *("world_size", "zero", "device_memory", "param_dtype", "compute_dtype", "grad_dtype", "reduce_dtype"),
    *("state_dtype", "master", "amsgrad", "gradient_release", "gradient_as_bucket_view", "offload_state", "buffers"),
)
# What of them means something in one process.
_MEASURABLE = ("device_memory", "param_dtype", "state_dtype", "master", "amsgrad", "gradient_release", "activations")
_RUN = ("batch", "sequence", "checkpointing", "flash_attention")  # fields of shardops.memory.Activations


def add_parser(subparsers: Any) -> None:
    """Adds the command's options to ``argparse``'s subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="what a training run holds in memory, whether it fits, and what would make it fit",
        description="Bytes that each rank of a training run holds, by component. GB is 10^9 bytes, GiB 2^30; both are "
        "accepted. Exit code: 0 if it fits or there is no --device-memory, 1 if it does not fit, 2 for options that "
        "make no sense.",
    )
    parser.add_argument(
        "model",
        metavar="SIZE_OR_CONFIG",
        nargs="?",
        help="number of parameters (13B, 350M), or a Hugging Face style config.json, which is exact",
    )
    _add_training(parser)
    _add_activations(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON and nothing else")
    output.add_argument("--png", metavar="FILE", help="draw the stages 0 to 3 side by side, with the device's limit")
    output.add_argument(
        "--measure",
        metavar="MODULE:FACTORY",
        help="run one real step of what FACTORY() of MODULE returns, in this process, and print planned beside "
        "measured: a module, (module, loss), (module, batch) or (module, batch, loss); without SIZE_OR_CONFIG that "
        "model is what is planned",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is trained")
    group.add_argument("--world-size", type=int, metavar="N", help="ranks; default 1")
    group.add_argument("--zero", type=int, choices=range(4), help="stage: 0 replicas (default), 3 FSDP")
    group.add_argument("--device-memory", metavar="SIZE", help="of one rank, as 80GB or 74GiB")
    for name, text in (
        ("param", "of the parameters; default bfloat16"),
        ("compute", "of what a layer computes with; default: the parameters'"),
        ("grad", "of the gradients that the optimizer reads; default: the parameters'"),
        ("reduce", "of FSDP2's reduce-scatter; default float32"),
    ):
        group.add_argument(f"--{name}-dtype", choices=DTYPES, help=text)
    group.add_argument("--state-dtype", choices=("float32", "bfloat16", "int8"), help="of the moments; default float32")
    group.add_argument(
        "--master",
        choices=("auto", "fp32", "split32", "split24", "stochastic", "none"),
        help="how masters of low-precision parameters are kept; default auto: exact, in 16 bits more",
    )
    group.add_argument("--amsgrad", action="store_true", default=None, help="with amsgrad's maximum")
    group.add_argument("--gradient-release", action="store_true", default=None, help="step in backward, free at once")
    group.add_argument("--offload-state", choices=("cpu",), help="states in host memory")
    group.add_argument(
        "--gradient-as-bucket-view", action="store_true", default=None, help="DDP's gradients lie in its buckets"
    )
    group.add_argument("--bucket-size", metavar="SIZE", help="of ZeRO's buckets, at stages 1 and 2; default 25MiB")
    group.add_argument(
        "--buffers",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="count what communication takes; default: where shapes are known",
    )


def _add_activations(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("activations (left out unless asked for)")
    group.add_argument("--batch", type=int, metavar="N", help="sequences of one microbatch of a rank")
    group.add_argument("--sequence", type=int, metavar="N", help="tokens of each")
    group.add_argument(
        "--checkpointing",
        nargs="?",
        const="full",
        choices=("none", "selective", "full"),
        help="default none; without a value: full",
    )
    group.add_argument(
        "--flash-attention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="scores are never in memory (default)",
    )
    group.add_argument("--activations", metavar="SIZE", help="bytes that were measured, in place of the formula")


def run(options: argparse.Namespace) -> int:
    """Plans, prints, and returns the exit code; errors of the planner are one line on stderr."""
    from .. import memory  # on demand: other commands do without

    try:
        keywords = _keywords(options)
        measured = _measure(options, keywords) if options.measure is not None else None
        plan = measured.planned if measured and options.model is None else memory.plan(_model(options), **keywords)
        if options.png is not None:
            from ._picture import draw_stages

            draw_stages(options.png, _model(options), keywords)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"shardops plan: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if options.json:
        _show.print_json(plan.to_json() | ({"measured": measured.to_json()} if measured else {}))
    else:
        _show_plan(plan)
        if measured is not None:
            _show_measured(measured)
    return 1 if plan.fits is False else 0


def _model(options: argparse.Namespace) -> str:
    if options.model is None:
        needed = "; --png draws that" if options.measure else ""
        raise ValueError(f"SIZE_OR_CONFIG is missing; give a number of parameters, as 13B, or a config.json{needed}")
    return str(options.model)


def _measure(options: argparse.Namespace, keywords: Mapping[str, Any]) -> Measurement:
    """One real step of the factory's model; whatever is printed meanwhile goes to stderr."""
    from ..memory import measure

    if os.getcwd() not in sys.path:  # as for `python -m`, whichever way this command was started
        sys.path.insert(0, os.getcwd())
    if options.model is not None:  # that is planned for as many ranks as it likes, this runs on one
        keywords = {name: value for name, value in keywords.items() if name in _MEASURABLE}
        if isinstance(keywords.get("activations"), Mapping):  # by the formula of that model
            del keywords["activations"]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return measure(options.measure, **keywords)
        except (ValueError, TypeError):
            raise
        except Exception as error:  # of the factory, or of the model that it made
            traceback.print_exc()
            raise ValueError(f"--measure {options.measure!r} failed: {type(error).__name__}: {error}") from error


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of :func:`shardops.memory.plan`: those that were given, so that defaults are the planner's."""
    from ..memory import parse_size

    given = {name: getattr(options, name) for name in _PLAIN if getattr(options, name) is not None}
    if options.bucket_size is not None:
        given["bucket_bytes"] = parse_size(options.bucket_size)
    run = {name: getattr(options, name) for name in _RUN if getattr(options, name) is not None}
    if run and not {"batch", "sequence"} <= run.keys():
        flags = ", ".join(_flag(name) for name in run)
        raise ValueError(f"{flags} without both --batch and --sequence; activations follow from the two: give them")
    if run and options.activations is not None:
        raise ValueError("--activations and --batch are both given; one is a measured amount, the other its formula")
    if run:
        given["activations"] = run
    elif options.activations is not None:
        given["activations"] = 0 if options.activations.strip() == "0" else parse_size(options.activations)
    return given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags(changes: Mapping[str, Any]) -> str:
    """Changed keyword arguments of the planner as options of this command."""
    words = []
    for name, value in changes.items():
        if name == "activations" and isinstance(value, Mapping):
            words.append(f"--checkpointing {value['checkpointing']}")
        elif value is True:
            words.append(_flag(name))
        else:
            words.append(f"{_flag(name)} {value}")
    return " ".join(words)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _show_plan(plan: MemoryPlan) -> None:
    from ..memory import format_size

    rows = []
    for name, nbytes in plan.per_rank.items():
        share = f"{100 * nbytes / plan.per_rank['total']:.1f} %"
        row = [name, f"{nbytes:,}", format_size(nbytes), f"{nbytes / plan.parameters:.2f}", share]
        if name in plan.not_counted:  # what nobody asked for is not nothing; shadows are a part of the buffers
            row = [f"{name}, in part", *row[1:]] if nbytes else [name, "not counted", "", "", ""]
        rows.append(row)
    ranks = plan.options["world_size"]
    _show.table(
        f"{plan.parameters:,} parameters, ZeRO stage {plan.options['zero']}, {ranks} rank{'s' * (ranks > 1)}",
        ["on one rank", "bytes", "size", "bytes a parameter", "share"],
        rows,
        numbers=(1, 2, 3, 4),
        is_last_total=True,
    )
    if plan.host:
        _show.say(f"In host memory, for each rank: {format_size(plan.host)} of states.")
    what = "Parameters and gradients" if plan.host else "Parameters, gradients and states"
    _show.say(f"{what}: {plan.bytes_per_parameter:.2f} bytes a parameter.")
    _show.say(plan.verdict)
    if plan.suggestions and plan.device_memory is not None:
        rows = [[s.text, flags(s.changes), format_size(plan.device_memory - s.total)] for s in plan.suggestions]
        _show.table(
            "The cheapest changes that make it fit", ["change: bytes a rank", "options", "left"], rows, numbers=(2,)
        )
    for note in plan.notes:
        _show.say(f"note: {note}")


def _show_measured(measured: Measurement) -> None:
    from ..memory import format_size

    rows = []
    for name, found in measured.measured.items():
        planned = measured.planned.per_rank[name]
        difference = f"{100 * (found - planned) / planned:+.2f} %" if planned else "none planned" if found else ""
        rows.append([name, f"{planned:,}", f"{found:,}", format_size(found), difference])
    what = "one step, forward and backward" if measured.has_backward else "one step, of gradients that were made up"
    header = ["bytes of live tensors", "planned", "measured", "size", "difference"]
    _show.table(f"Measured in this process: {what}", header, rows, numbers=(1, 2, 3, 4))
