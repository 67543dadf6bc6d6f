"""``shardops bench``: runs a checkout's benchmarks, one child process for each suite, and keeps a JSON file of each.

Exit code 0 if all suites came to their end without a failure; 1 if not, with the end of what the suite printed; 2 if
there is nothing to run; 130 or 143 if it was interrupted or terminated, which ends the suite, too. No network is used.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SUITES = ("sharded_adam", "grad_norm", "cast_gather", "flatten_shard", "update_path")
# Of pytest's -v with console_output_style=count: "benchmarks/bench_x.py::test[1e+03-1] PASSED  [ 3/24]".
_DONE = re.compile(r"::(?P<test>.+) (?:PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b.*\[ *(?P<done>\d+)/(?P<all>\d+)\]")
_TAIL = 25  # lines of a failed suite's output that are shown
_GRACE = 5.0  # seconds that an interrupted suite gets to end by itself

# Tells how far a suite is: tests done, tests in all, the last one's name.
Tell = Callable[[int, int, str], None]


def add_parser(subparsers: Any) -> None:
    """Adds the command's options to ``argparse``'s subparsers."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the primitives and the update path beside torch, other libraries and the bandwidth limit",
        description="Runs benchmarks/ of a checkout and writes DIR/SUITE.json for each suite, and what it printed into "
        "DIR/SUITE.log; `shardops report DIR` makes a page of them. Quiet cores give better figures.",
    )
    parser.add_argument("--quick", action="store_true", help="three sizes and fewer rounds: minutes instead of tens")
    parser.add_argument(
        "--passes",
        type=_passes,
        default=1,
        metavar="N",
        help="measure everything so often, minutes apart: what `shardops report` needs to tell a change from the "
        "difference between two runs, three at least (default: 1)",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="(default: runs/bench)")
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, metavar="NAME", help=f"these suites only, of {', '.join(SUITES)}"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where torch finds one"
    )
    parser.add_argument("--scale", choices=("tiny", "quick", "full"), help=argparse.SUPPRESS)  # tiny: for tests


def _passes(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}; everything is measured once at least")
    return value


def run(options: argparse.Namespace) -> int:
    """Runs the suites in turn and returns the exit code."""
    folder = benchmarks_folder()
    reason = _cannot_run(folder)
    if reason is not None:
        print(f"shardops bench: error: {reason}", file=sys.stderr)
        return 2
    scale = options.scale or ("quick" if options.quick else "full")
    out = options.out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"shardops bench: error: --out {options.out} cannot be a folder: {error}", file=sys.stderr)
        return 2
    failed: list[Path] = []
    names = [name for name in SUITES if options.only is None or name in options.only]
    # Each pass measures all of them, so that passes of one suite lie apart in time.
    turns = [(number, name) for number in range(1, options.passes + 1) for name in names]
    for name in names:
        for path in out.glob(f"{name}.pass*"):  # of an earlier run of more passes
            path.unlink()
    with _ended_by_sigterm(), _progress(len(turns)) as begin:
        for number, name in turns:
            began = time.monotonic()
            stem = name if number == 1 else f"{name}.pass{number}"
            tell = begin(stem)
            rest = ["--scale", scale, "--device", options.device, "--pass", str(number)]
            code = run_suite(folder, name, out, rest, tell, stem=stem)
            if code != 0:
                failed.append(out / f"{stem}.log")
            tell(-1, -1, f"{'done' if code == 0 else f'failed, exit code {code}'} in {time.monotonic() - began:.0f} s")
    for log in failed:
        lines = log.read_text(errors="replace").splitlines()
        said = (f"\nshardops bench: {log.stem} failed; the last lines of {log}:", *lines[-_TAIL:])
        print(*said, sep="\n", file=sys.stderr)
    written = sorted(
        path.name for name in names for path in (*out.glob(f"{name}.json"), *out.glob(f"{name}.pass*.json"))
    )
    print(f"{', '.join(written) or 'nothing'} in {options.out}; `shardops report {options.out}` makes a page of it")
    return 1 if failed else 0


def benchmarks_folder() -> Path:
    """``benchmarks/`` beside the package, whether or not it is there."""
    return Path(__file__).resolve().parents[2] / "benchmarks"


def _cannot_run(folder: Path) -> str | None:
    """Why there is nothing to run, and the remedy; None if all is there."""
    if not (folder / "_suite.py").is_file():
        return (
            f"{folder} holds no benchmarks: they are not part of the installed package; clone the repository and run "
            "`python -m shardops bench` in it, with shardops installed from there (pip install -e .)"
        )
    wanted = {"pytest": "pytest", "pytest_benchmark": "pytest-benchmark"}
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; pip install {' '.join(missing)}"
    return None


def run_suite(
    folder: Path, name: str, out: Path, arguments: Sequence[str], tell: Tell, *, stem: str | None = None
) -> int:
    """Runs one suite in a child process.

    Args:
        folder: ``benchmarks/`` of a checkout.
        name: of ``SUITES``.
        out: gets ``stem.json``, complete or not at all, and ``stem.log``.
        arguments: more of pytest's.
        tell: is called after each test.
        stem: of the files; None: the suite's name.

    Returns:
        The child's exit code, or 1 if it measured nothing.
    """
    stem = stem or name
    result = out / f"{stem}.json"
    result.unlink(missing_ok=True)
    scratch = out / f".{stem}.json.new"
    scratch.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", str(folder / f"bench_{name}.py"), f"--benchmark-json={scratch}"]
    # Workers would measure beside one another. The order is the file's, so that runs compare.
    command += ["-v", "--color=no", "-o", "console_output_style=count", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", *arguments]
    # A pytest that called us, perhaps as a worker, is not this one's business: pytest-benchmark would measure nothing.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**kept, "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with (out / f"{stem}.log").open("w") as log:
        child = subprocess.Popen(
            command,
            cwd=folder.parent,
            env=environment,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                log.write(line)
                log.flush()
                found = _DONE.search(line)
                if found is not None:
                    tell(int(found["done"]), int(found["all"]), found["test"].strip())
            code = child.wait()
        except BaseException:  # an interrupt, above all: nothing may go on measuring
            _stop(child)
            scratch.unlink(missing_ok=True)
            raise
    if scratch.is_file() and scratch.stat().st_size > 0:
        os.replace(scratch, result)
        return code
    scratch.unlink(missing_ok=True)
    return code or 1


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes a SIGTERM an exception, as an interrupt is: a process that it kills leaves its suite measuring."""
    if threading.current_thread() is not threading.main_thread():  # no other may set a handler
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(child: subprocess.Popen[str]) -> None:
    """Interrupts a suite, which then ends the ranks that it started; kills it if that takes long."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[str], Tell]]:
    """Shows how far the suites are: by bars where rich is installed and the output is a terminal, else by lines."""
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():

        def begin_lines(name: str) -> Tell:
            print(f"{name} ..", flush=True)

            def tell(done: int, total: int, text: str) -> None:
                # A line at the end, and at every tenth of the way.
                if done < 0:
                    print(f"{name} {text}", flush=True)
                elif done * 10 // total != (done - 1) * 10 // total:
                    print(f"{name} {done}/{total}", flush=True)

            return tell

        yield begin_lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<19}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    with Progress(*columns) as bars:
        everything = bars.add_task("suites", total=count, last="")

        def begin_bar(name: str) -> Tell:
            bar = bars.add_task(name, total=None, last="starting")

            def tell(done: int, total: int, text: str) -> None:
                if done < 0:
                    bars.update(bar, last=text)
                    bars.stop_task(bar)
                    bars.advance(everything)
                else:
                    bars.update(bar, completed=done, total=total, last=text)

            return tell

        yield begin_bar
