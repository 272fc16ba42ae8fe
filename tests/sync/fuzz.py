"""Random user loops, by pool and by hand: `python -m tests.sync.fuzz --seeds 0:500 --ranks 2 --engines all`.

Each seed is a model, an optimizer and a loop (:mod:`tests.sync.fuzz_programs`), which every engine carries out.

- Engines that average in fp32 come to the weights of the loop by hand: to the bit on two ranks, nearly on more, where
  sums are rounded in another order.
- Under every engine the ranks have the same bits, weights are finite, nothing hangs and nothing raises.
- Under engines that round or keep a part back, weights are those of the loop without its dropped steps, its failures
  and its looks at the weights.

A failing program is printed, with as much left out as can be. ``--without fail,peek`` leaves operations out of all.
"""

from __future__ import annotations

import argparse
import faulthandler
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from imagenet_fast.distributed.forkserver import start_fork_server
from tests.ranks import run
from tests.sync.fuzz_loops import ENGINES, EXACT, INEXACT, SPARSE, Broken, ByHand, Loop, Pooled, Record
from tests.sync.fuzz_programs import Program, parts, program_of
from tests.sync.loops import unmeasured

LIMIT_S = 15.0
"""For a program under one engine; mostly it takes some hundredths of a second."""


@dataclass(frozen=True)
class Case:
    """A program under an engine."""

    program: Program
    engine: str


@dataclass(frozen=True)
class Failure:
    """What is wrong with it."""

    kind: str
    text: str

    @property
    def cause(self) -> str:
        """What failures with one cause have in common, mostly."""
        return f"{self.kind}: {re.sub(r'[0-9.]+|(?<=line ).*', '#', self.text.strip().splitlines()[-1])[:150]}"


def run_all(cases: Sequence[Case], ranks: int, limit_s: float = LIMIT_S) -> Iterator[tuple[Case, Failure | None]]:
    """Each case and what is wrong with it. Ranks that hang or end are started anew, for the cases that are left."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            broken = ""
            try:
                run(ranks, work, left, folder, limit_s)
            except AssertionError as error:
                broken = str(error) or "a rank ended"
            verdicts = _read(Path(folder) / "verdicts-0")
            yield from zip(left, verdicts, strict=False)
            left = left[len(verdicts) :]
            if broken and left:
                yield left.pop(0), _failure_of(Path(folder), ranks, broken)


def _read(path: Path) -> list[Any]:
    values = []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    values.append(pickle.load(file))
                except EOFError:
                    break
    return values


def _failure_of(folder: Path, ranks: int, broken: str) -> Failure:
    hangs, errors = [], []
    for rank in range(ranks):
        if (error := folder / f"broken-{rank}").exists():
            errors.append(f"rank {rank}, {error.read_text()}")
        if (hang := folder / f"hang-{rank}").exists() and (text := hang.read_text()):
            frames = [line for line in text.splitlines() if "/imagenet_fast/" in line or "/tests/" in line]
            hangs.append("\n".join([f"rank {rank} is in:", *frames[:8][::-1]]))
    # One rank's end ends the others, whose connections are closed.
    errors = [_shortened(error) for error in errors]
    own = [error for error in errors if not re.search("[Cc]onnection|gloo|peer", error.splitlines()[-1])]
    if own:
        return Failure("error", own[0])
    return Failure("hang", "\n".join(hangs)) if hangs else Failure("error", (errors or [broken])[0])


def _shortened(error: str) -> str:
    """Without frames of torch's and Python's."""
    lines, kept = error.splitlines(), []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  File") and not re.search("/(imagenet_fast|tests)/", line):
            continue
        if not line.startswith("    ") or (kept and kept[-1].startswith("  File") and line != after):
            kept.append(line)
    return "\n".join(kept)


def work(cases: Sequence[Case], folder: str, limit_s: float) -> None:
    """What each rank does: all cases, one after the other."""
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    by_hand: tuple[Program, list[Record] | None] | None = None
    with (
        unmeasured(),
        Path(folder, f"verdicts-{rank}").open("wb", buffering=0) as verdicts,
        Path(folder, f"hang-{rank}").open("w") as hang,
    ):
        optim.SGD([torch.zeros(1)])  # has torch import much, which takes seconds
        for case in cases:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=hang)
            try:
                if by_hand is None or by_hand[0] != case.program:
                    by_hand = case.program, _records_by_hand(case.program)
                failure = _try(case, by_hand[1])
            except Broken as error:
                Path(folder, f"broken-{rank}").write_text(str(error))
                raise
            verdicts.write(pickle.dumps(failure))
            faulthandler.cancel_dump_traceback_later()


def _records_by_hand(program: Program) -> list[Record] | None:
    """None where it comes to no finite weights. Raises :class:`Broken` where it is an error in plain torch, too."""
    loop = Loop(program, ByHand)
    try:
        loop.run()
    except Broken as error:
        raise Broken(f"by hand, too: {error}") from error
    finite = all(t.isfinite().all() for t in loop.records[-1].tensors)
    return loop.records if finite else None


def _try(case: Case, expected: list[Record] | None) -> Failure | None:
    program, engine = case.program, case.engine
    loop = _run(program, engine)
    failures = [Failure("not refused", violation) for violation in loop.violations[:1]]
    if expected is not None:
        failures += _not_finite(loop.records, expected)
        if engine in EXACT:
            failures += _differing(loop.records, expected, program.ranks)
        core = program.core
        if core is not None and engine in INEXACT | SPARSE and not failures:
            other = _run(core, engine).records[-1]
            if not _alike(loop.records[-1].tensors, other.tensors):
                text = f"weights differ by {_distance(loop.records[-1].tensors, other.tensors):.2g} from those without"
                failures.append(Failure("a trace", text))
    failures += _parted(program, loop.records)
    everyone: list[list[Failure]] = [[] for _ in range(program.ranks)]
    dist.all_gather_object(everyone, failures)
    found = [failure for failures in everyone for failure in failures]
    order = ("ranks", "weights", "not finite", "not refused", "a trace")
    return min(found, key=lambda failure: order.index(failure.kind), default=None)


def _run(program: Program, engine: str) -> Loop:
    loop = Loop(program, lambda model: Pooled(model, engine, program.guarded))
    loop.run()
    loop.sync.close()
    return loop


def _not_finite(records: list[Record], expected: list[Record]) -> list[Failure]:
    for record in records:
        if record.shared and not all(t.isfinite().all() for t in record.tensors):
            return [Failure("not finite", f"{_place(record)}: not finite")]
    return []


def _differing(records: list[Record], expected: list[Record], ranks: int) -> list[Failure]:
    """From the loop by hand."""
    for record, other in zip(records, expected, strict=True):
        exact = ranks <= 2
        if len(record.tensors) != len(other.tensors):
            text = f"{_place(record)}: {len(record.tensors)} tensors, {len(other.tensors)} by hand"
            return [Failure("weights", text)]
        if not (_alike if exact else _close)(record.tensors, other.tensors):
            text = f"{_place(record)}: {_distance(record.tensors, other.tensors):.2g} from those by hand"
            return [Failure("weights", text)]
    return []


def _parted(program: Program, records: list[Record]) -> list[Failure]:
    """Ranks from each other."""
    shared = [(record, _bytes(record.tensors)) for record in records if record.shared]
    ours = {(record.line, record.number): digest for record, digest in shared}
    everyone: list[Any] = [None] * program.ranks
    dist.all_gather_object(everyone, ours)
    for record, digest in shared:
        if any(theirs.get((record.line, record.number), digest) != digest for theirs in everyone):
            return [Failure("ranks", f"{_place(record)}: ranks differ")]
    return []


def _place(record: Record) -> str:
    return f"line {record.line}, {record.what}"


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [t.contiguous().view(-1).numpy().tobytes() for t in tensors]  # type: ignore[misc]


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(_numbers(a), _numbers(b)) for a, b in zip(some, others, strict=True))


def _close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(
        torch.allclose(_numbers(a), _numbers(b), rtol=1e-3, atol=1e-4) for a, b in zip(some, others, strict=True)
    )


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    return max(
        (float((_numbers(a) - _numbers(b)).abs().max()) for a, b in zip(some, others, strict=True) if a.numel()),
        default=0.0,
    )


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.float().nan_to_num(nan=12345.0)  # a loss scaled to infinity may make some


def shrink(case: Case, failure: Failure, ranks: int, seconds: float = 60.0) -> tuple[Case, Failure]:
    """Leave out what can be while it still fails, in the same way."""
    until = time.monotonic() + seconds
    tried: set[Program] = set()
    while time.monotonic() < until:
        smaller = [Case(case.program.without(part), case.engine) for part in parts(case.program)]
        smaller = [c for c in smaller if c.program.lines and c.program not in tried]
        limit_s = 3.0 if failure.kind == "hang" else LIMIT_S
        for other, found in run_all(smaller, ranks, limit_s):
            tried.add(other.program)
            if found is not None and _same(found, failure):
                case, failure = other, found
                break
            if time.monotonic() > until:
                break
        else:
            return case, failure
    return case, failure


def _same(one: Failure, other: Failure) -> bool:
    return one.kind == other.kind and (one.kind not in ("error", "not refused") or one.cause == other.cause)


def cases_of(seeds: Sequence[int], ranks: int, engines: Sequence[str], left_out: Set[str] = frozenset()) -> list[Case]:
    """All engines of a seed one after the other: the loop by hand is theirs together."""
    programs = [program_of(seed, ranks).lacking(left_out) for seed in seeds]
    return [
        Case(p, engine) for p in programs if p.lines and not (p.scaled and "scaled" in left_out) for engine in engines
    ]


def describe(case: Case, failure: Failure) -> str:
    """For whoever has to find the cause."""
    again = (
        f"python -m tests.sync.fuzz --seeds {case.program.seed} --ranks {case.program.ranks} --engines '{case.engine}'"
    )
    return f"{case.engine}: {failure.kind}: {failure.text}\n{case.program}\nagain: {again}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sync.fuzz", description="Random user loops, by pool and by hand."
    )
    parser.add_argument("--seeds", default="0:500", help="one, some with commas between, or FIRST:LAST+1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", default="all", help=f"all, exact, inexact, sparse, or of: {', '.join(ENGINES)}")
    parser.add_argument(
        "--without", default="", help="names of operations to leave out of all programs: fail,peek,scaled"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a program under an engine")
    parser.add_argument("--shrink", type=int, default=3, help="how many failing programs of each kind to make smaller")
    parser.add_argument("--show", action="store_true", help="print the programs, and run nothing")
    chosen = parser.parse_args()
    seeds, engines = _seeds(chosen.seeds), _engines(chosen.engines)
    if chosen.show:
        print(*(program_of(seed, chosen.ranks) for seed in seeds), sep="\n\n")
        return
    left_out = set(chosen.without.split(",")) - {""}
    start_fork_server("tests.forked")
    begun, causes, failed = time.monotonic(), Counter[str](), set[int]()
    for some in (seeds[n : n + 10] for n in range(0, len(seeds), 10)):
        found: dict[tuple[int, str], list[tuple[Case, Failure]]] = {}
        for case, failure in run_all(cases_of(some, chosen.ranks, engines, left_out), chosen.ranks, chosen.limit):
            if failure is not None:
                found.setdefault((case.program.seed, failure.cause), []).append((case, failure))
        for (seed, cause), cases in found.items():
            failed.add(seed)
            causes[cause] += 1
            (case, failure), names = cases[0], ", ".join(case.engine for case, _ in cases)
            print(f"FAILED seed {seed}: {failure.kind}: {failure.text.strip().splitlines()[-1]} ({names})", flush=True)
            if causes[cause] <= chosen.shrink:
                print(describe(*shrink(case, failure, chosen.ranks)), end="\n\n", flush=True)
    seconds = time.monotonic() - begun
    print(f"{len(seeds)} seeds, {len(engines)} engines, {chosen.ranks} ranks: {len(failed)} seeds failed", end=", ")
    print(f"{seconds:.0f} s, {seconds / len(seeds):.2f} s a seed")
    for cause, count in causes.most_common():
        print(f"{count:5}  {cause}")
    sys.exit(1 if failed else 0)


def _seeds(text: str) -> Sequence[int]:
    first, colon, last = text.partition(":")
    return range(int(first), int(last)) if colon else [int(part) for part in text.split(",")]


def _engines(text: str) -> list[str]:
    families = {"all": ENGINES, "exact": EXACT, "inexact": INEXACT, "sparse": SPARSE}
    return list(families[text]) if text in families else [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    main()
