"""Random user loops, by pool and by hand: `python -m tests.sync.fuzz --seeds 0:500 --ranks 2 --engines all`.

Each seed is a model, an optimizer and a loop (:mod:`tests.sync.fuzz_programs`), which every engine carries out, as it
does the named programs of ``tests/sync/programs``.

- Engines that average in fp32 come to the weights of the loop by hand: to the bit on two ranks, nearly on more, where
  sums are rounded in another order.
- Under every engine the ranks have the same bits, weights are finite, nothing hangs and nothing raises.
- Under engines that round or keep a part back, weights are those of the loop without its dropped steps, its failures
  and its looks at the weights; ``sparse`` that defers its updates comes to those of ``sparse`` that does not.

Where the loop by hand is not finite, there is nothing to compare with: those are counted. A failing program is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imagenet_fast.netlab.forks import start_fork_server
from tests.ranks import run
from tests.sync.fuzz_loops import ENGINES, EXACT, INEXACT, SPARSE, Broken, Loop, Record, as_carried_out
from tests.sync.fuzz_programs import Program, program_of
from tests.sync.loops import unmeasured


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


def failure_of(case: Case) -> Failure | None:
    """What is wrong with a case, on ranks of their own."""
    try:
        return run(case.program.ranks, judge, case, fresh=case.program.abandons)[0]
    except AssertionError as error:
        return _of_ranks(str(error))


def _of_ranks(text: str) -> Failure:
    """The error of the rank that has begun: one rank's end ends the others, whose connections are closed."""
    errors = re.split(r"\n(?=rank \d)", text)
    own = [error for error in errors if not re.search("[Cc]onnection|gloo|peer", error.splitlines()[-1])]
    return Failure("error", (own or errors)[0])


def judge(case: Case) -> Failure | None:
    """What each rank of a case does; the first tells of all."""
    program, engine = as_carried_out(case.program, case.engine), case.engine
    with warnings.catch_warnings(), unmeasured():
        warnings.simplefilter("ignore")
        expected = _by_hand(program)
        loop = Loop(program, engine).run()
        failures = [Failure("not refused", violation) for violation in loop.violations[:1]]
        if not _is_finite(expected):
            failures += [Failure("not finite", "by hand")] if program.named else []
        else:
            failures += _not_finite(loop.records)
            if engine in EXACT:
                failures += _differing(loop, expected, program.ranks <= 2 and not program.nearly)
            if not failures and not program.nearly:
                failures += _traces(program, engine, loop.records[-1])
    shared = {(record.line, record.number): record for record in loop.records if record.shared}
    digests = {at: [t.contiguous().view(-1).numpy().tobytes() for t in one.tensors] for at, one in shared.items()}
    everyone: list[Any] = [None] * program.ranks
    dist.all_gather_object(everyone, (failures, digests))
    found = [failure for failures, _ in everyone for failure in failures]
    for place, own in digests.items():
        if any(theirs.get(place, own) != own for _, theirs in everyone):
            found.append(Failure("ranks", f"{_place(shared[place])}: ranks differ"))
    order = ("ranks", "weights", "not finite", "not refused", "a trace")
    return min(found, key=lambda failure: order.index(failure.kind), default=None)


@lru_cache(maxsize=4)
def _by_hand(program: Program) -> list[Record]:
    """Raises :class:`Broken` where it is an error in plain torch, too."""
    try:
        return Loop(program).run().records
    except Broken as error:
        raise Broken(f"by hand, too: {error}") from error


def are_finite(programs: Sequence[Program]) -> list[bool]:
    """On a rank: which programs have finite weights by hand, so that there is something to compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_is_finite(_by_hand(program)) for program in programs]


def _is_finite(records: list[Record]) -> bool:
    return all(t.isfinite().all() for t in records[-1].tensors)


def _traces(program: Program, engine: str, last: Record) -> list[Failure]:
    """What has left a trace that ought not, where the loop by hand does not tell."""
    twins = [("those of sparse", program, "sparse")] if engine == "sparse hybrid" else []
    # On more ranks the order of sums is a plan's, which measures.
    core = program.core(residual=engine not in EXACT)  # of another of its family, too, which may take its place
    if core is not None and engine in INEXACT | SPARSE | ({"hybrid": None} if program.ranks > 2 else {}):
        twins.append(("those without", core, engine))
    for what, other, under in twins:
        theirs = Loop(other, under).run().records[-1].tensors
        if differences := _differences(last.tensors, theirs, exact=True):
            return [Failure("a trace", f"weights are not {what}: {differences}")]
    return []


def _not_finite(records: list[Record]) -> list[Failure]:
    for record in records:
        if record.shared and not all(t.isfinite().all() for t in record.tensors):
            return [Failure("not finite", f"{_place(record)}: not finite")]
    return []


def _differing(loop: Loop, expected: list[Record], exact: bool) -> list[Failure]:
    """From the loop by hand."""
    for record, other in zip(loop.records, expected, strict=True):
        if differences := _differences(record.tensors, other.tensors, exact):
            return [Failure("weights", f"{_place(record)}, not as by hand: {differences}")]
    return []


def _place(record: Record) -> str:
    return f"line {record.line}, {record.what}"


def _differences(some: list[Tensor], others: list[Tensor], exact: bool) -> str:
    """In words; a loss scaled to infinity may make NaN of both."""
    rtol, atol = (0.0, 0.0) if exact else (1e-3, 1e-4)
    try:
        torch.testing.assert_close(some, others, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def describe(case: Case, failure: Failure) -> str:
    """For whoever has to find the cause."""
    text = f"{case.engine}: {failure.kind}: {failure.text}\n{case.program}"
    if case.program.named:
        return text
    again = f"--seeds {case.program.seed} --ranks {case.program.ranks} --engines '{case.engine}'"
    return f"{text}\nagain: python -m tests.sync.fuzz {again}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sync.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="FIRST:LAST+1, or one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", default="all", help=f"all, or with commas between: {', '.join(ENGINES)}")
    chosen = parser.parse_args()
    first, _, end = chosen.seeds.partition(":")
    seeds, failed = range(int(first), int(end or int(first) + 1)), 0
    engines = list(ENGINES) if chosen.engines == "all" else chosen.engines.split(",")
    start_fork_server("tests.forked")
    for case in (Case(program_of(seed, chosen.ranks), engine) for seed in seeds for engine in engines):
        if (failure := failure_of(case)) is not None:
            failed += 1
            print(describe(case, failure), end="\n\n", flush=True)
    print(f"{failed} of {len(seeds) * len(engines)} cases failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
