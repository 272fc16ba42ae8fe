"""Named loops of users: each comes, under every engine, to the weights of the loop by hand, or is refused in words."""

from __future__ import annotations

from tests.sync.fuzz_programs import Program
from tests.sync.programs import failures, gradients, models, reads, steps, writes

PROGRAMS: list[Program] = [
    one for about in (steps, failures, reads, writes, gradients, models) for one in about.PROGRAMS
]
