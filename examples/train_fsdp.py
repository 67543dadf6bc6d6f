"""Train a small language model under FSDP2 with torch.optim.AdamW, with shardops, or with both.

    python examples/train_fsdp.py --compare --world-size 2
    torchrun --nproc-per-node 2 examples/train_fsdp.py --optimizer shardops

The text is what every Python carries; metrics, a picture and a table are left in `--out`.
"""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoint
import torch
from data import Corpus
from launch import World, choose_world_size, launch
from metrics import (
    MetricsLog,
    largest_loss_difference,
    plot_losses,
    print_table,
    summarise,
    write_summary,
)
from model import DecoderConfig
from training import UPDATES, Outcome, RunPlan, TrainConfig, train


@dataclass(frozen=True)
class Job:
    """All that the ranks need to know; it is pickled to spawned ones."""

    config: TrainConfig
    plans: dict[str, RunPlan]  # optimizer -> its run, in the order of running
    out: Path
    keep_metrics: bool  # a resumed run goes on with the file of the interrupted one


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=HelpFormatter,
    )
    run = parser.add_argument_group("what runs")
    run.add_argument("--optimizer", choices=sorted(UPDATES), default="shardops", help="the one to use")
    run.add_argument("--compare", action="store_true", help="run torch, then shardops, from the same weights")
    run.add_argument("--world-size", type=int, help="ranks; by default one a GPU, or 2 on a CPU")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of all ranks")
    run.add_argument(
        "--param-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="how parameters are stored; they are computed with in bf16 either way",
    )
    run.add_argument("--seed", type=int, default=0, help="of weights and batches")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run")
    training.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    training.add_argument("--sequence", type=int, default=64, help="bytes a sequence")
    training.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    training.add_argument("--held-out-batches", type=int, default=16, help="for the last loss")

    sizes = DecoderConfig()
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=sizes.dim, help="width")
    model.add_argument("--layers", type=int, default=sizes.layers, help="decoder blocks")
    model.add_argument("--heads", type=int, default=sizes.heads, help="attention heads a block")
    model.add_argument("--hidden", type=int, default=sizes.hidden, help="width inside SwiGLU")
    model.add_argument("--tied", action="store_true", help="use the embedding as the head")

    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, default=Path("runs/train_fsdp"), help="metrics, picture and summary")
    files.add_argument("--save", type=Path, metavar="DIR", help="where checkpoints go")
    files.add_argument("--save-every", type=int, metavar="N", help="save every N steps, not only last")
    files.add_argument("--resume", type=Path, metavar="DIR", help="continue the newest one in DIR")
    files.add_argument("--interrupt-at", type=int, metavar="N", help="save and stop after N steps")

    arguments = parser.parse_args()
    try:
        check_arguments(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what would fail later; fills in `device` and `world_size`."""
    for name in ("steps", "batch", "sequence", "held_out_batches", "save_every", "interrupt_at"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {value}, but it counts from 1: pass a positive number")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.world_size = choose_world_size(arguments.world_size, arguments.device)
    if arguments.batch % arguments.world_size:
        raise ValueError(
            f"--batch is {arguments.batch}, which {arguments.world_size} ranks cannot share "
            "equally: choose a multiple of the world size"
        )
    if arguments.save is None and (arguments.save_every or arguments.interrupt_at):
        raise ValueError(
            "--save-every and --interrupt-at write checkpoints, and there is no directory for them: add --save DIR"
        )
    if arguments.resume is not None and not arguments.resume.is_dir():
        raise ValueError(
            f"--resume is {arguments.resume}, which is not a directory: pass the directory that "
            "--save of the interrupted run was given"
        )


def plan_runs(arguments: argparse.Namespace) -> dict[str, RunPlan]:
    """One run an optimizer, with the checkpoint that it continues."""
    names = ["torch", "shardops"] if arguments.compare else [arguments.optimizer]
    found: dict[str, Path | None] = dict.fromkeys(names)
    if arguments.resume is not None:
        found = {name: checkpoint.newest(arguments.resume, name) for name in names}
        # In a comparison the second optimizer may not have begun when the run was interrupted.
        if not any(found.values()):
            raise SystemExit(
                f"--resume is {arguments.resume}, which holds no complete checkpoint of "
                f"{' or '.join(names)}: choose the optimizer that was saved there, or start anew "
                "without --resume"
            )
    for name in names:
        stale = arguments.save and checkpoint.newest(arguments.save, name)
        if stale and arguments.save != arguments.resume:
            raise SystemExit(
                f"--save is {arguments.save}, which holds {stale.relative_to(arguments.save)} of "
                f"another run: continue it with --resume {arguments.save}, or choose a directory "
                "of its own"
            )
    return {name: RunPlan(arguments.interrupt_at, arguments.save_every, arguments.save, found[name]) for name in names}


def run_job(job: Job, world: World) -> None:
    """All of one rank's work: every optimizer in turn, then the first rank's report."""
    corpus = Corpus.load()
    log = MetricsLog(job.out / "metrics.jsonl", job.keep_metrics) if world.is_first else None
    outcomes = {name: train(name, job.config, plan, corpus, world, log) for name, plan in job.plans.items()}
    if log is not None:
        report(job, outcomes, log, world.world_size)


def report(job: Job, outcomes: dict[str, Outcome], log: MetricsLog, world_size: int) -> None:
    """Print the table and write summary.json and loss.png, or say how to go on."""
    unfinished = {n: o.steps_done for n, o in outcomes.items() if o.steps_done < job.config.steps}
    if unfinished:
        for name, steps_done in unfinished.items():
            print(f"{name}: stopped after step {steps_done} of {job.config.steps}")
        print(f"go on with the same flags but --interrupt-at, and --resume {job.plans[name].save}")
        return
    summaries = {
        name: summarise(log.of(name), outcome.held_out_loss, outcome.state_bytes_per_param)
        for name, outcome in outcomes.items()
    }
    print_table(summaries)
    difference = math.nan
    if len(summaries) == 2:
        difference = largest_loss_difference(log, list(summaries))
        print(f"largest difference of the two losses in one step: {difference:.3g} nats/byte")
    settings = {**asdict(job.config), "world_size": world_size, "torch": torch.__version__}
    write_summary(job.out / "summary.json", settings, summaries, difference)
    print(plot_losses(job.out / "loss.png", log, summaries))
    print(f"metrics: {job.out / 'metrics.jsonl'}, summary: {job.out / 'summary.json'}")


def main() -> None:
    arguments = parse_arguments()
    config = TrainConfig(
        model=DecoderConfig(arguments.dim, arguments.layers, arguments.heads, arguments.hidden, arguments.tied),
        param_dtype=arguments.param_dtype,
        batch=arguments.batch,
        sequence=arguments.sequence,
        steps=arguments.steps,
        lr=arguments.lr,
        seed=arguments.seed,
        held_out_batches=arguments.held_out_batches,
    )
    job = Job(config, plan_runs(arguments), arguments.out, arguments.resume is not None)
    launch(functools.partial(run_job, job), arguments.world_size, arguments.device)


if __name__ == "__main__":
    main()
