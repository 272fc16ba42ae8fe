"""Disturb small runs on two ranks at random by signals, kills and damaged files; then let them end.

    .venv/bin/python scripts/fuzz_jobs.py [--count 50] [--seed 1] [--first 0] [--out DIR]

Each round must end with the bytes of an undisturbed run, or with a one-sentence error. If a round does not, its
program and faults are printed, its run and logs are kept in DIR, and the exit code is 1. Everything in a round is drawn
from SEED/NUMBER, except timing. A round takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.fuzzing import play
from tests.faults.programs import draw_program


def main() -> int:
    """Play the rounds and return the exit code."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--count", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0, help="The number of the first round.")
    options.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    chosen = options.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # raises, so that no job is left behind
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for number in range(chosen.first, chosen.first + chosen.count):
        program = draw_program(f"{chosen.seed}/{number}")
        begun = time.monotonic()
        played = play(out, program)
        wrong += bool(played.faults)
        said = "WRONG" if played.faults else "ok"
        print(f"{chosen.seed}/{number:<8}{time.monotonic() - begun:>6.1f} s  {said}", flush=True)
        if played.faults:
            print(f"  {program.setting}", *program.commands, *played.happened, *played.faults, sep="\n    ", flush=True)
    print(f"{chosen.count - wrong} of {chosen.count} rounds ended as they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
