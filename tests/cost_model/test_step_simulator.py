"""Step times that are predicted for given messages and networks, the least of them, and which messages are released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest

from imagenet_fast.cost_model.layer_profile import Timing, random_profile
from imagenet_fast.cost_model.messages import HIGH_PRIORITY, BucketChunk, Declaration
from imagenet_fast.cost_model.priority_schedule import Task, as_ready, plan_release_order
from imagenet_fast.cost_model.step_prediction import waits_for
from imagenet_fast.cost_model.step_simulator import CodecCost, LinkModel, SimMessage, simulated_step_s, step_lower_bound
from imagenet_fast.recipe.sync_table import Awaits, Collective

TIMING = Timing((0.8, 0.7, 0.4, 0.2, 0.0), 1.0, (0.1, 0.3, 0.8, 1.4, 2.0), 2.0)
MESSAGES = (20e6, 80e6, 2e6, 1e6, 1e6)
"""Bytes of five layers in pool order, last one first: two large ones whose gradients come early, three small ones."""
END = len(MESSAGES)
"""The event after the last slot's."""
SECOND = Timing((0.5, 0.0), 1.0, (0.5, 1.0), 1.0)
"""Two layers, a second each way."""
LAST, FIRST, BOTH = range(1), range(1, 2), range(2)
WIRE, LATE = LinkModel(0.0, 1e-6), LinkModel(0.25, 1e-6)
"""1 MB/s, without latency and with."""


def step_s(
    messages: Sequence[SimMessage], awaits: Literal["each", "backward", "read"], timing: Timing = TIMING,
    planned: bool = False,
) -> float:  # fmt: skip
    tasks, times = [message.task for message in messages], [*timing.ready, timing.backward_s]
    order = plan_release_order(tasks, times, messages[0].link.s_per_byte) if planned else as_ready(tasks, len(times))
    return simulated_step_s(messages, order, awaits, timing)


def sent(seconds: float, slots: range, link: LinkModel, event: int = 2, rank: int = 0, **more: Any) -> SimMessage:
    """A message in the step of two layers that takes so long at 1 MB/s."""
    return SimMessage(Task(event, 1e6 * seconds, (rank,)), slots, link, **more)


def one_by_one(link: LinkModel, pieces: int = 1) -> list[SimMessage]:
    """A message a layer, in pieces, ready with it; each layer's have a queue."""
    return [
        SimMessage(Task(slot, message / pieces, (0, -slot)), range(slot, slot + 1), link, queue=f"{slot}")
        for slot, message in enumerate(MESSAGES) for _ in range(pieces)
    ]  # fmt: skip


def test_a_deferred_step_takes_the_longer_of_compute_and_wire():
    for s_per_byte, busy in ((1e-9, 0.104), (1e-8, 1.04), (4e-8, 4.16)):
        step = step_s(one_by_one(LinkModel(1e-4, s_per_byte), 16), "read", planned=True)
        assert max(TIMING.compute_s, busy) <= step <= 1.12 * max(TIMING.compute_s, busy)


def test_a_fused_step_hides_what_backward_covers_and_no_more():
    fast, slow = LinkModel(0.0, 1e-9), LinkModel(0.0, 1e-7)
    assert step_s(one_by_one(fast), "backward") == pytest.approx(3.0, abs=2e-3)
    assert step_s(one_by_one(slow), "backward") == pytest.approx(1.0 + 0.1 + 10.4)
    at_once = [SimMessage(Task(4, sum(MESSAGES), (0,)), range(5), slow)]
    assert step_s(at_once, "backward") == pytest.approx(3.0 + 10.4)


def test_pieces_of_a_message_share_its_latency():
    for pieces in (1, 4):
        each = [
            SimMessage(Task(END, message / pieces, (0,)), range(slot, slot + 1), LinkModel(0.5, 1e-7),
                       range((slot - 1) * pieces, slot * pieces) if slot else ())
            for slot, message in enumerate(MESSAGES) for _ in range(pieces)
        ]  # fmt: skip
        assert step_s(each, "each") == pytest.approx(3.0 + 5 * 0.5 + 10.4)


def test_latencies_of_many_overlap_and_calls_do_not():
    def step_of_100(message: float, link: LinkModel) -> float:
        return step_s([SimMessage(Task(END, message, (0,)), range(5), link)] * 100, "backward")

    assert step_of_100(1.0, LinkModel(0.5, 0.0)) == pytest.approx(3.0 + 0.5)
    assert step_of_100(1.0, LinkModel(0.5, 0.0, 0.01)) == pytest.approx(3.0 + 0.5 + 100 * 0.01)
    hidden = 3.0 + 0.5 + 100 * 0.1  # behind the wire
    assert step_of_100(1e6, LinkModel(0.5, 1e-7, 0.01)) == pytest.approx(hidden)


def test_the_next_forward_stands_still_only_where_a_layer_is_missing():
    for slots, seconds, late in ((LAST, 0.4, 0.0), (LAST, 0.7, 0.2), (FIRST, 0.4, 0.4)):
        assert step_s([sent(seconds, slots, WIRE)], "read", SECOND) - 2.0 == pytest.approx(late)


def test_a_second_half_costs_a_latency_of_its_own_behind_the_firsts():
    second = SimMessage(Task(2, 0.1e6, (1,), after=0), BOTH, LATE, [0])
    assert step_s([sent(0.1, BOTH, LATE), second], "read", SECOND) == pytest.approx(2.0 + 2 * (0.1 + 0.25))


def test_what_others_wait_for_has_the_wire_to_itself():
    last, other = sent(0.1, FIRST, LATE), sent(0.1, LAST, LATE, rank=1, waits=[0])
    assert step_s([last, other], "read", SECOND) == pytest.approx(2.0 + 0.35)
    both = sent(0.1, LAST, LATE, rank=1, waits=[0, 1])
    assert step_s([last, last, both], "backward", SECOND) == pytest.approx(2.0 + 0.2 + 0.25 + 0.1 + 0.25)


def test_of_a_queue_so_many_are_under_way_at_a_time_and_pass_one_after_the_other():
    """So a latency is hidden behind the next message."""
    for abreast, after in ((4, 4 * 0.1 + 0.25), (2, 0.1 + 2 * (0.1 + 0.25)), (1, 4 * (0.1 + 0.25))):
        queued = [sent(0.1, BOTH, LATE, abreast=abreast)] * 4
        assert step_s(queued, "backward", SECOND) == pytest.approx(2.0 + after)


def test_queues_share_the_wire_however_many_of_theirs_are_under_way():
    for abreast in (1, 2, 4):
        others = [sent(0.2, LAST, WIRE, queue="others", abreast=abreast)] * 3
        urgent = sent(0.2, FIRST, WIRE, queue="own")
        assert step_s([urgent, *others], "read", SECOND) - 2.0 == pytest.approx(2 * 0.2)
        behind = sent(0.2, FIRST, WIRE, queue="others", abreast=abreast)
        assert step_s([*others, behind], "read", SECOND) - 2.0 == pytest.approx(4 * 0.2)


def chunk(layer: Any, collective: Collective = "pairwise", lane: str = "", after: int | None = None) -> Any:
    return BucketChunk([layer], slice(0, 1), collective, None, lane, Task(0, 1.0, (0,), after))


HALVES = [chunk(0), chunk(0, after=0), chunk(1), chunk(1, after=2)]
PIECES = [chunk(layer) for layer in (0, 0, 1, 2, 2)]
URGENT = [chunk(0), chunk(1, lane=HIGH_PRIORITY), chunk(2, lane=HIGH_PRIORITY), chunk(3)]
MIXED = [chunk(n % 4, kind) for n, kind in enumerate(["ring"] * 3 + ["butterfly"] * 2 + ["ring"])]
WAITS: list[tuple[str, Awaits, list[Any], list[list[int]], bool, list[list[int]]]] = [
    ("a second half for its first alone", "backward", HALVES, [[0], [2, 1, 3]], False, [[], [0], [], [2]]),
    ("all pieces of the bucket before", "each", PIECES, [[], [0, 1, 2, 3, 4]], False, [[], [], [0, 1], [2], [2]]),
    ("the last urgent one, at the end", "read", URGENT, [[0], [1, 2, 3]], False, [[], [], [], [2]]),
    ("before the end, urgent is only first", "read", URGENT, [[0], [1, 2], [3]], False, [[]] * 4),
    # What is needed last does not share the wire with what is needed first.
    ("collectives of a plan take turns", "read", MIXED, [[], [*range(6)]], True, [[], [], [], [1], [1], [3]]),
    ("without a plan they do not", "read", MIXED, [[], [*range(6)]], False, [[]] * 6),
    ("nor before the end", "read", MIXED, [[0, 1, 2, 3], [4, 5]], True, [[]] * 6),
]


def test_what_a_message_waits_for():
    for case, awaits, messages, releases, planned, expected in WAITS:
        engine = Declaration("fp32", awaits, prioritized=planned)
        assert waits_for(engine, messages, releases) == expected, case


def test_codec_time_overlaps_with_the_wire():
    for encode, decode, seconds in (  # none, faster than the wire, slower
        (0.0, 0.0, 1.0), (0.25, 0.25, 0.025 + 1.0 + 0.025), (2.0, 1.0, 10 * 0.3 + 0.1)
    ):  # fmt: skip
        coded = [sent(0.1, BOTH, WIRE, codec=CodecCost(encode * 1e-6, decode * 1e-6))] * 10
        assert step_s(coded, "backward", SECOND) - 2.0 == pytest.approx(seconds, rel=0.01 if encode > 1 else None)


@pytest.mark.parametrize("awaits", ["each", "backward", "read"])
def test_nothing_is_predicted_below_the_limit(awaits: Literal["each", "backward", "read"]):
    """Try random networks whose gradients travel in random pieces, whole and in halves, planned and not."""
    for seed in range(30):
        chance, profile = Random(seed), random_profile(seed)
        profile = replace(profile, layers=tuple(replace(one, shapes=((one.elements,),)) for one in profile.layers))
        timing, raw = profile.timing, chance.uniform(0.05, 3) * profile.compute_s
        link = LinkModel(chance.choice([0.0, 1e-3]), raw / profile.elements, chance.choice([0.0, 1e-4]))
        messages: list[SimMessage] = []
        for slot, layer in enumerate(reversed(profile.layers)):
            event = len(profile.layers) if awaits == "each" else slot
            before = range(len(messages)) if awaits == "each" else ()
            for _ in range(pieces := chance.randint(1, 5)):
                part, slots, number = layer.elements / pieces, range(slot, slot + 1), len(messages)
                first, second = (
                    Task(event, part / 2, (0, -slot)), Task(event, part / 2, (1, -slot), after=number)
                )  # fmt: skip
                messages += [
                    SimMessage(first, slots, link, before), SimMessage(second, slots, link, [*before, number])
                ]  # fmt: skip
        step = step_s(messages, awaits, timing, planned=awaits == "read" and chance.random() < 0.8)
        least = step_lower_bound(timing, profile.all_reduce_seconds(raw), awaits)
        assert step >= least * (1 - 1e-9)
        if awaits == "backward" and link.latency_s == 0.0 == link.call_s:
            assert step == pytest.approx(least), "as soon as it is ready is soonest"


def test_tasks_are_released_once_and_in_order():
    chance = Random(0)
    for _ in range(50):
        tasks: list[Task] = []
        for number in range(40):
            after = chance.choice([None, *range(number)])
            tasks.append(Task(chance.randrange(5), chance.uniform(0, 3e6), (chance.randrange(3),), after))
        times = sorted(chance.uniform(0, 1) for _ in range(6))
        order = [(event, n) for event, ns in enumerate(plan_release_order(tasks, times, 1e-8)) for n in ns]
        assert sorted(n for _, n in order) == list(range(40))
        position = {n: place for place, (_, n) in enumerate(order)}
        for event, n in order:
            assert event >= tasks[n].event
            assert tasks[n].after is None or position[tasks[n].after] < position[n]


def test_what_is_needed_sooner_overtakes_what_is_held_back():
    tasks = [Task(slot, message / 4, (0, -slot)) for slot, message in enumerate(MESSAGES) for _ in range(4)]
    releases = plan_release_order(tasks, [*TIMING.ready, TIMING.backward_s], 4e-8)
    flat = [n for event in releases for n in event]
    assert flat != sorted(flat, key=lambda n: tasks[n].event), "some large pieces are held back"
    small = [flat.index(n) for n, task in enumerate(tasks) if task.event >= 2]
    large = [flat.index(n) for n, task in enumerate(tasks) if task.event == 1]
    assert max(large) > max(small)


QUARTER = Timing(needed=(0.2, 0.1, 0.0), forward_s=0.25, ready=(0.25, 0.5, 0.75), backward_s=0.75)
"""Three layers in a second of compute, the last in forward first in the pool."""


def in_time(timing: Timing, seconds: list[float], period: float) -> bool:
    """Return whether the wire keeps a period if it always carries what is needed soonest: no order does better.

    A step's gradients are all due before the next backward begins, so steps do not meet on the wire.
    """
    releases = [timing.forward_s + ready for ready in timing.ready]
    deadlines = [period + needed for needed in timing.needed]
    left = list(seconds)
    now = min(releases)
    while any(left):
        ready = [n for n in range(len(left)) if left[n] and releases[n] <= now]
        coming = min((r for n, r in enumerate(releases) if left[n] and r > now), default=math.inf)
        if not ready:
            now = coming
            continue
        first = min(ready, key=lambda n: deadlines[n])
        carried = min(left[first], coming - now)
        now += carried
        left[first] = 0.0 if carried == left[first] else left[first] - carried
        if not left[first] and now > deadlines[first]:
            return False
    return period >= timing.compute_s


def course(random: Random, layers: int) -> tuple[Timing, list[float]]:
    forward, backward = ([random.uniform(0.01, 1) for _ in range(layers)] for _ in range(2))
    needed = tuple(reversed([sum(forward[:n]) for n in range(layers)]))
    ready = tuple(sum(backward[: n + 1]) for n in range(layers))
    seconds = [math.exp(random.gauss(-1, 1.5)) for _ in range(layers)]
    return Timing(needed, sum(forward), ready, sum(backward)), seconds


def test_a_perfect_order_keeps_it_and_nothing_shorter():
    random = Random(1)
    for layers in (1, 2, 3, 7, 20):
        for _ in range(10):
            timing, seconds = course(random, layers)
            least = step_lower_bound(timing, seconds, "read")
            assert in_time(timing, seconds, least * (1 + 1e-9))
            assert not in_time(timing, seconds, least * 0.999)


def test_what_bounds_a_step():
    for awaits, seconds, least in (
        ("each", [0.1, 0.2, 0.2], 1.5),
        ("backward", [0.1, 0.1, 0.1], 1.1),  # the first layer's gradient, after all compute
        ("backward", [2.0, 0.0, 0.0], 2.5),  # the wire, from when the first gradient is there
        ("read", [0.0, 0.0, 0.5], 1.5),  # ready last and needed first: nothing hides it
    ):
        assert step_lower_bound(QUARTER, seconds, awaits) == pytest.approx(least)
