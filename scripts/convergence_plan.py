"""The runs of docs/convergence.md: their order, the learning rates that are tried, and each run's command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "runs/convergence"
HELD_OUT = f"{FOLDER}/held-out"
"""Where nine tenths of CIFAR-10's training images are for training, and a tenth for judging rates."""

BATCHES = (256, 1024, 2048, 4096, 8192, 16384)
TUNED = (256, 2048, 8192)
"""Batches at which rates are tried; the others take the rate of the nearest one, by the scaling rule."""
SEEDS = (1, 2, 3)
EPOCHS = 8
IMAGES, LEFT = 50_000, 45_000
"""Training images, and those that are left while rates are tried."""
IMAGES_PER_S, START_S = 1550, 20
"""Speed of the network on two cores, and the time to start and to evaluate; only for the hours of the list."""
SMALL_S = 700
"""About the time of a run of ResNet-18, by README's first run."""

NETWORK = (
    f"epochs={EPOCHS}", "micro_batch=128", f"first_eval={EPOCHS}", "target_top1=100", "target_mirrored=false",
    "ema_decay=0", "schedule.warmup_epochs=2", "schedule.start_lr=0",
)  # fmt: skip
"""Changes of cifar10-93 for every batch. Two ranks of 128 images: batch norm sees as many, and so the batch never
changes what it computes. No EMA of weights, because it would span another time at each batch."""
OPTIMIZERS = {
    "sgd": '{{kind="sgd", lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
    "lars": '{{kind="lars", lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
    "larc": '{{kind="lars", clip=true, trust_coefficient=0.1, lr={rate:g}, momentum=0.9, weight_decay=1.33e-3}}',
}
RATES: dict[str, dict[int, tuple[float, ...]]] = {
    "sgd": {256: (0.125, 0.25, 0.5), 2048: (0.5, 1, 2), 8192: (2, 4, 8)},
    "lars": {256: (1, 2, 4), 2048: (12, 24, 48), 8192: (6, 12, 24)},
    "larc": {256: (0.125, 0.25, 0.5), 2048: (0.5, 1, 2), 8192: (2, 4, 8)},
}
"""Rates that are tried first. SGD's middle one at 256 is that of cifar10-93 in its effect on a constant gradient."""
MOST_RATES = 6
"""Rates that are tried at most: beyond the best one, while it is the smallest or the largest."""
SPARSE = 'kind="sparse", sparsity=0.875, chunk=4096'
ENGINES = {
    "int8": '{kind="lazy", wire="int8"}',
    "fp8": '{kind="lazy", wire="fp8"}',
    "powersgd": '{kind="powersgd", rank=4}',
    "sparse": f"{{{SPARSE}, dense_epochs=0, ramp_epochs=0}}",
    "sparse, warm-up": f"{{{SPARSE}, dense_epochs=2, ramp_epochs=1}}",
    "sparse, correction": f"{{{SPARSE}, dense_epochs=0, ramp_epochs=0, momentum_correction=true}}",
    "sparse, correction, warm-up": f"{{{SPARSE}, dense_epochs=2, ramp_epochs=1, momentum_correction=true}}",
}
"""Engines that are not exact, each with SGD at ``ENGINES_AT``."""
ENGINES_AT = 8192
CURVES = ("sgd", "lars")
"""Optimizers with a run at each of ``TUNED`` that is evaluated after every epoch; evaluations change no weights."""
SMALL = {
    "mild": (
        "epochs=8", "first_eval=8", "data.sizes=[[1, 32], [4, 36], [5, 40], [6, 44], [7, 48]]", 'loss="bce"',
        "label_smoothing=0.08", "ema_decay=0.99309", 'model.blurpool="conv_maxpool"',
        'model.init=["kaiming_normal", "bn_uniform", "linear_log_constant_bias"]', "eval_mirror=true",
        "target_top1=100",
    ),
    "probe": ("epochs=1", "first_eval=1", "data.sizes=[]", "schedule.warmup_epochs=0.5", "target_top1=100"),
    "plain": ("data.sizes=[]", "eval_mirror=true", "target_top1=100"),
}  # fmt: skip
"""Changes of cifar10-resnet18. ``probe`` times an epoch of ``plain``, which then trains as long as ``mild``."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training of the table."""

    group: str
    """Part of the page: ``rates``, ``batches``, ``curves``, ``engines`` or ``small``."""
    case: str
    """Optimizer, engine or recipe."""
    seed: int = 1
    batch: int = 256
    rate: float | None = None
    """Rate that is tried; None: the chosen one."""

    @property
    def name(self) -> str:
        words = [self.group, self.case.replace(", ", "-"), str(self.batch)]
        return "-".join([*words, f"rate{self.rate:g}" if self.rate is not None else f"seed{self.seed}"])

    @property
    def seconds(self) -> float:
        """About the time that it takes."""
        if self.group == "small":
            return SMALL_S / 8 if self.case == "probe" else SMALL_S
        return EPOCHS * (LEFT if self.group == "rates" else IMAGES) / IMAGES_PER_S + START_S


def plan(rows: Sequence[Row] = ()) -> list[Run]:
    """Return all runs in order of importance.

    Rates come before their use. One seed of everything is followed by the optimizers' other seeds, and then the
    engines'. Before these come all seeds of what README and the engines' pages compare: LARS at eight times the least
    batch, int8 beside bf16, mild beside plain.
    """

    def tried(case: str) -> Iterator[Run]:
        return (Run("rates", case, 1, batch, rate) for batch in TUNED for rate in rates(rows, case, batch))

    def batches(case: str, seed: int) -> Iterator[Run]:
        return (Run("batches", case, seed, batch) for batch in BATCHES)

    def small(seed: int) -> Iterator[Run]:
        return (Run("small", case, seed) for case in SMALL if case != "probe" or seed == 1)

    def others(seed: int) -> Iterator[Run]:
        yield from (Run("engines", case, seed, ENGINES_AT) for case in ENGINES)
        yield from small(seed)

    first = [run for case in ("sgd", "lars") for run in (*tried(case), *batches(case, 1))]
    for seed in SEEDS:
        first += [Run("batches", "lars", seed, batch) for batch in (BATCHES[0], 8 * BATCHES[0])]
        first += [Run("batches", "sgd", seed, ENGINES_AT), Run("engines", "int8", seed, ENGINES_AT)]
        first += small(seed)
    first += [*others(1), *tried("larc"), *batches("larc", 1)]
    later = [run for seed in SEEDS[1:] for case in OPTIMIZERS for run in batches(case, seed)]
    rest = [run for seed in SEEDS[1:] for run in others(seed)]
    curves = [Run("curves", case, 1, batch) for case in CURVES for batch in TUNED]
    return list(dict.fromkeys(first + later + rest + curves))


def tried_rates(rows: Iterable[Row], case: str, batch: int) -> dict[float, float]:
    """Return top-1 on the held-out images by rate; a run that diverged has 0."""
    here = [row for row in rows if (row["group"], row["case"], row["batch"]) == ("rates", case, batch)]
    return {row["rate"]: row["top1"] or 0.0 for row in here}


def rates(rows: Sequence[Row], case: str, batch: int) -> list[float]:
    """Return the rates to try, in order: those of ``RATES``, and more where the best so far is at an end."""
    found, tried = list(RATES[case][batch]), tried_rates(rows, case, batch)
    while len(found) < MOST_RATES and tried.keys() >= set(found):
        best = max(found, key=lambda rate: tried[rate])
        if best == found[0]:
            found.insert(0, best / 2)
        elif best == found[-1]:
            found.append(best * 2)
        else:
            break
    return found


def rate_for(rows: Sequence[Row], case: str, batch: int) -> float | None:
    """Return the rate of an optimizer at a batch; None while rates that it follows from have not been tried."""
    near = min(reversed(TUNED), key=lambda tuned: max(batch / tuned, tuned / batch))
    tried = tried_rates(rows, case, near)
    if not tried.keys() >= set(rates(rows, case, near)):
        return None
    ratio = batch / near
    return max(tried, key=lambda rate: tried[rate]) * (math.sqrt(ratio) if case == "lars" else ratio)


def plain_epochs(rows: Iterable[Row]) -> int | None:
    """Return the epochs in which the plain recipe trains at least as long as mild does; None: not known yet."""
    seconds = {row["case"]: row["train_s"] for row in rows if row["group"] == "small" and row["seed"] == 1}
    return math.ceil(seconds["mild"] / seconds["probe"]) if {"mild", "probe"} <= seconds.keys() else None


def command(run: Run, rows: list[Row]) -> str | None:
    """Return the command of a run; None if it follows from runs that are missing."""
    data: list[str] = []
    if run.group == "small":
        recipe, changes = "cifar10-resnet18", list(SMALL[run.case])
        if run.case == "plain":
            if (epochs := plain_epochs(rows)) is None:
                return None
            changes += [f"epochs={epochs}", f"first_eval={epochs}"]
    else:
        recipe, optimizer = "cifar10-93", "sgd" if run.group == "engines" else run.case
        rate = rate_for(rows, optimizer, run.batch) if run.rate is None else run.rate
        if rate is None:
            return None
        network = [change.replace(f"first_eval={EPOCHS}", "first_eval=1") for change in NETWORK]
        changes = [f"global_batch={run.batch}", *(network if run.group == "curves" else NETWORK)]
        changes.append(f"optim={OPTIMIZERS[optimizer].format(rate=rate)}")
        if run.group == "engines":
            changes.append(f"sync={ENGINES[run.case]}")
        if run.group == "rates":
            data = ["--data", HELD_OUT]
    words = ["imagenet-fast", "train", "--recipe", recipe, "--nproc", "2", "--seed", str(run.seed), *data]
    return shlex.join([*words, *(word for change in changes for word in ("--set", change))])
