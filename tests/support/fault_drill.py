"""Let everything go wrong once, and check how it ends: `make fault-drill`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from support.commands import ROOT
from support.drill_faults import LIMIT_S, Fault, faults
from support.drill_program import BATCHES, WORLD_SIZE, Drill, go_on, run
from support.endings import REAPED_S, Ending, await_end, end_sessions, run_to_the_end
from support.left_behind import abandoned, of_sessions, shared_memory
from support.processes import ProcessFailedError, run_processes
from support.small_disk import may_mount, mount, unmount
from support.soak import soak

OUTPUT = ROOT / "build" / "fault-drill"
RESULT = ROOT / "build" / "fault-drill.json"
DISK_BYTES = 6 << 20
LAST_LINES = 4
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Truth:
    """What runs without a fault gave.

    Attributes:
        losses: of every batch, on one device.
        folders: with the checkpoint that two stages wrote, by how: "full" and "sharded".
    """

    losses: list[float]
    folders: dict[str, Path]


@dataclass
class Result:
    """How one fault ended.

    Attributes:
        fault: its name.
        place: where something went wrong.
        rank: on whom.
        seconds: from the fault to the end of the last process.
        limit_s: how many were allowed.
        statuses: exit status by rank; of a script, its own.
        last_lines: the end of what was printed.
        checks: what was asked, and whether it is so.
        why: what is wrong, in words.
    """

    fault: str
    place: str
    rank: int
    seconds: float = math.nan
    limit_s: float = LIMIT_S
    statuses: list[int | None] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything that was asked is so."""
        return bool(self.checks) and all(self.checks.values())

    def check(self, what: str, holds: bool, otherwise: str) -> None:
        """Note one of the checks."""
        self.checks[what] = holds
        if not holds:
            self.why.append(f"{what}: {otherwise}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when anything did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults with this in their name, or 'soak'")
    parser.add_argument("--at-once", type=int, default=2, help="faults side by side")
    asked = parser.parse_args(arguments)
    small_disks = may_mount()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    begin = time.monotonic()
    chosen = [fault for fault in faults() if not asked.only or any(only in fault.name for only in asked.only)]
    results: list[Result] = []
    if chosen:
        kinds = {"full", *("sharded" for fault in chosen if fault.sharded)}
        truth = make_truth(OUTPUT, sorted(kinds))
        for result in drill_all(chosen, truth, OUTPUT, asked.at_once, small_disks=small_disks):
            results.append(result)
            print(line(result, time.monotonic() - begin, f"{len(results)}/{len(chosen)}"), flush=True)
    soaked = None
    if not asked.only or "soak" in asked.only:
        soaked = soak(OUTPUT / "soak")
        print(f"{time.monotonic() - begin:5.0f} s  soak: {soaked['says']}", flush=True)
    print(table(results))
    write(results, soaked, disks="tmpfs" if small_disks else "file size limit")
    failed = [result for result in results if not result.passed]
    for result in failed:
        print(f"\n{result.fault}\n  " + "\n  ".join(result.why))
    return 1 if failed or (soaked is not None and not soaked["passed"]) else 0


def make_truth(folder: Path, kinds: Sequence[str]) -> Truth:
    """The losses of one device, and a checkpoint of two stages of each kind."""
    ((begin, losses),) = run_processes(go_on, 1, None, str(folder / "one device"))
    assert (begin, len(losses)) == (0, BATCHES)
    folders = {kind: folder / kind for kind in kinds}
    for kind, place in folders.items():
        run_processes(_undisturbed, WORLD_SIZE, Drill(str(place), sharded=kind == "sharded"))
    return Truth(losses, folders)


def _undisturbed(rank: int, drill: Drill) -> None:
    run(drill)


def drill_all(
    chosen: Sequence[Fault], truth: Truth, folder: Path, at_once: int, *, small_disks: bool
) -> Iterator[Result]:
    """Results in the order in which they are found, several faults side by side."""
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [
            pool.submit(drill, fault, truth, folder / f"{index:02}", small_disk=small_disks)
            for index, fault in enumerate(chosen)
        ]
        for job in as_completed(jobs):
            yield job.result()


def drill(fault: Fault, truth: Truth, folder: Path, *, small_disk: bool = False) -> Result:
    """Let one fault happen, and check how it ends.

    Args:
        fault: what is to happen, and what is expected.
        truth: of `make_truth`.
        folder: for what the program prints and saves.
        small_disk: whether a disk may be mounted.
    """
    result = Result(fault.name, fault.place or fault.damage, fault.rank, limit_s=fault.limit_s)
    saved = folder / "saved"
    saved.mkdir(parents=True)
    memory = shared_memory()
    mounted = small_disk and fault.place == "disk full"
    if mounted:
        mount(saved, DISK_BYTES)
    try:
        program = Drill(str(saved), fault.place, fault.rank, fault.sharded, fault.moment, fault.patience_s)
        if fault.damage:
            damaged = damage(fault, truth, folder / "damaged")
            program = Drill(str(saved), rank=fault.rank, sharded=fault.sharded, checkpoint=str(damaged))
        ending = _RUNS[fault.start](program, folder / "output", fault.limit_s)
        _check_ending(result, fault, ending)
        kept = program.saved if fault.saves else truth.folders["sharded" if fault.sharded else "full"] / "state.ckpt"
        (saved / "filler").unlink(missing_ok=True)
        _check_checkpoint(result, kept, truth, folder / "afterwards")
    except Exception as error:
        result.check("drill", holds=False, otherwise=f"{type(error).__name__}: {error}")
    finally:
        if mounted:
            unmount(saved)
    lost = abandoned(shared_memory() - memory)
    result.check("shared memory", not lost, ", ".join(sorted(lost)))
    return result


def _check_ending(result: Result, fault: Fault, ending: Ending) -> None:
    lines = [line for line in ending.output.splitlines() if line.strip()]
    result.seconds, result.statuses, result.last_lines = ending.seconds, ending.statuses, lines[-LAST_LINES:]
    result.check("in time", ending.seconds < fault.limit_s, f"{ending.seconds:.1f} s of {fault.limit_s:.0f} s")
    failed = all(status not in (None, 0) for status in ending.statuses)
    if fault.start == "processes" and fault.ends is not None:
        failed &= ending.statuses[fault.rank] == fault.ends
    result.check("statuses", failed, str(ending.statuses))
    last = "\n".join(result.last_lines)
    for pattern in (fault.says, *fault.names):
        expected = fault.expected(pattern)
        text, where = (last, "the last lines") if pattern == fault.says else (ending.output, "the output")
        found = re.search(expected, text) is not None
        result.check(f"says {expected!r}", found, f"not in {where}:\n    " + last.replace("\n", "\n    "))
    result.check("nothing left", not ending.left, "; ".join(ending.left))


def _check_checkpoint(result: Result, saved: Path, truth: Truth, folder: Path) -> None:
    """The last good checkpoint loads in a fresh process, and one device goes on from it as if nothing had happened."""
    try:
        ((begin, losses),) = run_processes(go_on, 1, str(saved), str(folder), timeout_s=120.0)
    except ProcessFailedError as error:
        result.check("checkpoint", holds=False, otherwise=str(error)[-1500:])
        return
    expected = truth.losses[begin:] if begin >= 0 else []
    same = len(losses) == len(expected) and all(abs(a - b) < TOLERANCE for a, b in zip(losses, expected, strict=True))
    result.check("checkpoint", same, f"from batch {begin}: {losses}, not {expected}")


def damage(fault: Fault, truth: Truth, folder: Path) -> Path:
    """A copy of a good checkpoint, with something wrong about it."""
    good = truth.folders["sharded" if fault.sharded else "full"] / "state.ckpt"
    folder.mkdir()
    bad = folder / good.name
    if good.is_dir():
        shutil.copytree(good, bad)
    else:
        shutil.copy(good, bad)
    parts = sorted((each for each in (bad, *bad.rglob("*")) if each.is_file()), key=lambda each: each.stat().st_size)
    content = bytearray(parts[-1].read_bytes())
    if fault.damage == "truncated":
        del content[int(fault.moment * len(content)) :]
    elif fault.damage == "flipped":
        content[_within_a_tensor(bad, parts[-1])] ^= 1
    else:
        for part in parts[:-1]:
            part.unlink()
        content = bytearray(random.Random(fault.rank).randbytes(len(content)))
    parts[-1].write_bytes(content)
    return bad


def _within_a_tensor(checkpoint: Path, part: Path) -> int:
    """Place of a byte of some tensor's values, in the file of one or the largest one of many."""
    if checkpoint.is_file():
        with zipfile.ZipFile(part) as archive:
            record = max(archive.infolist(), key=lambda each: each.file_size)
            return record.header_offset + record.file_size  # beyond its header, which is shorter
    stored = dcp.FileSystemReader(checkpoint).read_metadata().storage_data.values()
    largest = max((each for each in stored if each.relative_path == part.name), key=lambda each: each.length)
    return largest.offset + largest.length // 2


def _processes(program: Drill, output: Path, limit_s: float) -> Ending:
    return run_to_the_end(run, WORLD_SIZE, output, program, limit_s=limit_s)


def _script(program: Drill, output: Path, limit_s: float) -> Ending:
    """A script that starts its second rank itself."""
    command = [sys.executable, ROOT / "tests" / "support" / "drill_program.py", json.dumps(asdict(program))]
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=output.parent,
            start_new_session=True,
        )
    try:
        seconds = await_end([process.pid], output, limit_s)
        left = [f"process {pid}: {command}" for pid, command in of_sessions([process.pid]).items()]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAPED_S)
        status = process.returncode
    finally:
        end_sessions([process.pid])
        process.wait()
    text = output.read_text()
    assert seconds is not None, f"the program did not fail; status {status}\n{text}"
    return Ending([status], seconds, text, left)


_RUNS: dict[str, Any] = {"processes": _processes, "script": _script}


def line(result: Result, seconds: float, progress: str) -> str:
    """One line of progress."""
    verdict = "ok" if result.passed else "FAILED " + "; ".join(each.splitlines()[0][:100] for each in result.why)
    return f"{seconds:5.0f} s  {progress}  {result.fault}: {verdict}"


def table(results: Sequence[Result]) -> str:
    """All results, one a line."""
    rows = [("fault", "ended after", "statuses", "the last line", "")]
    for each in results:
        last = each.last_lines[-1] if each.last_lines else ""
        statuses = " ".join("-" if status is None else str(status) for status in each.statuses)
        verdict = "ok" if each.passed else "FAILED"
        rows.append((each.fault, f"{each.seconds:.1f} s", statuses, last.strip()[:60], verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write(results: Sequence[Result], soaked: dict[str, Any] | None, *, disks: str) -> None:
    """Keep all that was found."""
    RESULT.parent.mkdir(exist_ok=True)
    found = [{**asdict(each), "passed": each.passed} for each in results]
    RESULT.write_text(json.dumps({"disk_full_by": disks, "faults": found, "soak": soaked}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
