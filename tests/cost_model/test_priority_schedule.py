"""The messages released at each event, with a plan and without."""

from __future__ import annotations

import random

from imagenet_fast.cost_model.priority_schedule import Task, as_ready, plan_release_order
from tests.cost_model.five import MESSAGES, TIMING


def test_tasks_are_released_once_and_in_order():
    chance = random.Random(0)
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


def test_without_a_plan_all_leave_as_soon_as_they_can():
    tasks = [Task(event, 1e6, (0,)) for event in (0, 2, 2, 3)]
    assert as_ready(tasks, 5) == [[0], [], [1, 2], [3], []]
