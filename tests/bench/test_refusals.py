"""What `bench` refuses before it measures anything, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from typer.main import get_command

from imagenet_fast.cli.main import app

REFUSED = """
collectives --sizes 0 -> --sizes 0 is not a list of sizes above 0
collectives --sizes x -> --sizes x is not a list of sizes
collectives --sizes= -> is not a list of sizes
collectives --sizes 2KB..8KB:1 -> is not a list of sizes
collectives --sizes 4MB..2KB -> --sizes 4MB..2KB has a range that begins above its end
collectives --sizes 900GB -> GiB of memory
collectives --sizes 1GB --rate 1mbit -> take at least
collectives --collectives ring,rign -> there is no 'rign'; choose among native, ring
collectives --collectives hierarchical -> goes between hosts of several ranks
collectives --collectives hierarchical --rate 1gbit -> goes between hosts of several ranks
collectives --nodes 1 -> nobody to send to
collectives --rate fast -> such as 250mbit
collectives --device cuda --nodes 999 -> GPUs for 999 ranks
collectives --device cuda --rate 1gbit -> --device cuda does not go with --rate
count --ranks 8,60 -> --ranks 60 is no whole number of nodes of --nproc 8
count --ranks 0 -> --ranks 0 is not a list of whole numbers above 0
count --ranks many -> --ranks many is not a list of whole numbers above 0
count --link 0gbit -> '0gbit' is not a number with kbit, mbit or gbit
count --sync ddp -> --sync ddp is torch's and its calls can't be counted
count --sync lazy,auto -> --sync auto becomes one of the other engines
sync --nodes 1000 --nproc 1000 -> 1000000 ranks are as many processes, which take
sync --json /nowhere/rows -> --json /nowhere/rows: there is no directory /nowhere
published ladder --batches 16 -> `bench published` is now `python -m experiments.published`, in a checkout; write that
pipeline --micro-batches 1,x -> --micro-batches 1,x is not a list of whole numbers
pipeline --micro-batches 0 -> is not a list of whole numbers above 0
pipeline --micro-batches 3 --batch 8 -> --batch 8 does not make 3 equal micro-batches; take
pipeline --schedules gpipe,zbv -> there is no 'zbv'; choose among gpipe, 1f1b, interleaved
pipeline --schedules 1f1b --micro-batches 2 -> 1f1b has a micro-batch for each of 4 stages at least
pipeline --device cuda --stages 19 -> GPUs for 19 stages
pipeline --model alexnet --image-size 62 -> too small for alexnet
pipeline --model alexnet --stages 9 -> AlexNet makes 8 stages, not 9; lower parallel.pipeline or --stages
pipeline --model alexnet --stages 5 --schedules interleaved -> makes 8 stages, not 10
data --loaders dali,disk -> --loaders dali,disk: there is no 'disk'; choose among threads, pixels, dali
profile here.txt -> here.txt does not end in .json
profile here.json --batch 32,0 -> --batch 32,0 is not a list of whole numbers above 0
step --graph -> --graph replays steps from CUDA graphs, and there is no GPU; leave it out
step --sync lazy,ring,lazy -> --sync lazy,ring,lazy names lazy twice; leave one out
sync --sync lazy,lazy:bf16 -> names lazy:bf16 twice (lazy and lazy:bf16 are the same); leave one out
collectives --collectives ring,native,ring -> --collectives ring,native,ring names ring twice; leave one out
collectives --sizes 1MB,4KB,1m -> names 1m twice (1MB and 1m are the same); leave one out
data --data /nowhere -> there is no data directory /nowhere; give one with --data DIR
step --data /nowhere -> --data /nowhere is not read without a loader; give --loader threads, or leave --data out
step --loader threads --data /nowhere -> there is no data directory /nowhere; give one with --data DIR
"""
"""Options of `bench`, and what is said to them."""
COMMANDS = list(dict.fromkeys(re.findall(r"^\w+", REFUSED, re.MULTILINE)))

USUAL = {"collectives": ("--collectives", "ring"), "pipeline": ("--schedules", "gpipe")}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_measured(command: str, refusal: Callable[..., str]):
    """By a sentence that names only options that the command has."""
    for options, sentence in re.findall(rf"^{command} (.+) -> (.+)$", REFUSED, re.MULTILINE):
        words = [command, *options.split()]
        said = refusal("bench", command, *USUAL.get(command, ()), *words[1:])
        assert sentence in said, options
        called = get_command(app).commands["bench"].commands[command]  # type: ignore[attr-defined]
        assert set(re.findall(r"--[a-z-]+", said)) <= {option for known in called.params for option in known.opts}
