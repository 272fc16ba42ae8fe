"""Train the table of docs/convergence.md: does accuracy hold at large batches, and with engines that are not exact?

python -m experiments.convergence            list the runs, and which of them are in runs/convergence
python -m experiments.convergence run [N]    train the others again, at most N of them, one at a time
python -m experiments.convergence --page     write the page and its picture from the rows
python -m experiments.convergence --check    exit with 1 if the page is not up to date

Each row of docs/results/convergence.json has the command of its run, one `imagenet-fast train`, and is replaced when
that ends. Ctrl-C or SIGTERM stops the run at hand, which saves itself; the same command goes on with it.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

from experiments.convergence import page
from experiments.convergence.page import Row
from scripts import benchmarks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "convergence"
KEPT = ("status", "top1", "top1_mirror", "epochs", "steps", "train_s", "images_per_s", "sent_bytes_per_step")


def hold_out(images: Path, place: Path) -> None:
    """Make ``place`` of CIFAR-10's training images: every tenth of a class is for validation, by links."""
    if place.exists():
        return
    made = place.with_name(f"{place.name}.part")
    for folder in sorted((images / "train").resolve().iterdir()):
        for split in ("train", "val"):
            (made / split / folder.name).mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(sorted(folder.iterdir())):
            link = made / ("train" if number % 10 else "val") / folder.name / file.name
            if not link.is_symlink():
                link.symlink_to(file)
    made.rename(place)


def is_trained(row: Row) -> bool:
    """Return whether the run of a row has ended here."""
    outcome = outcome_of(row)
    return outcome.get("status") in ("reached", "finished") or outcome.get("wrong_from") is not None


def outcome_of(row: Row) -> Row:
    """Return what the run of a row has come to; nothing if it has not begun here."""
    file = FOLDER / row["run"] / "outcome.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def train(row: Row) -> tuple[int, Row]:
    """Train the run of a row, or go on with it; return the exit code, 0 if it ended, and the new row."""
    out = FOLDER / row["run"]
    _, *words = shlex.split(row["command"])
    process = subprocess.Popen(
        [sys.executable, "-m", "imagenet_fast", *words, "--out", str(out), "--resume", "auto"], cwd=ROOT
    )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while process.poll() is None:
        with suppress(KeyboardInterrupt):  # it gets that from the terminal itself, and needs a moment to save
            process.wait()
    code = process.returncode
    outcome = outcome_of(row)
    diverged = code == 1 and outcome.get("wrong_from") is not None
    if code not in (0, 3) and not diverged:
        return code, row
    new = row | {key: outcome.get(key) for key in KEPT} | ({"top1": None} if diverged else {})
    return 0, new | ({"curve": curve(out)} if "curve" in row else {})


def curve(folder: Path) -> list[float]:
    """Return top-1 after every epoch of a run."""
    events = map(json.loads, (folder / "events.jsonl").read_text(encoding="utf-8").splitlines())
    tops = {event["epoch"]: event["top1"] for event in events if event["event"] == "eval"}
    return [tops[epoch] for epoch in sorted(tops)]


def train_again(most: int) -> int:
    """Train at most ``most`` of the runs that have not ended here, and write rows and page; return the exit code.

    Those that have not ended anywhere come first.
    """
    import torch

    from imagenet_fast.data.download import fetch_dataset
    from imagenet_fast.distributed.init import computes_bf16

    if not computes_bf16(torch.device("cpu")):
        print("the table is of runs in bf16, and this CPU would compute in fp32; train on another", file=sys.stderr)
        return 2
    hold_out(fetch_dataset("cifar10", None, None), FOLDER / "held-out")
    result = benchmarks.read("convergence")
    rows = result.pop("rows")
    missing = [number for number, row in enumerate(rows) if not is_trained(row)]
    for number in sorted(missing, key=lambda number: "status" in rows[number])[:most]:
        print(f"$ {rows[number]['command']}", flush=True)
        code, row = train(rows[number])
        if code:
            print(f"{row['run']} ended with exit code {code}; the same command goes on with it", file=sys.stderr)
            return code
        about = {"date": date.today().isoformat(), "machine": benchmarks.machine()}
        rows[number] = row | about
        benchmarks.write({**result, **about, "versions": benchmarks.versions(), "rows": rows})
        page.main([])
    return 0


def main(arguments: Sequence[str]) -> int:
    """List, train, write or compare; return the exit code."""
    match arguments:
        case []:
            for row in benchmarks.read("convergence")["rows"]:
                print(f"{'here   ' if is_trained(row) else 'missing'}  {row['run']}")
        case ["run"]:
            return train_again(1000)
        case ["run", count] if count.isdecimal():
            return train_again(int(count))
        case ["--page" | "--check"]:
            return page.main(arguments)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
