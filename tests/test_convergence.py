"""scripts/convergence.py: the plan of runs, the rates that it chooses, and the page that it writes."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from imagenet_fast.data.imagefolder import scan
from imagenet_fast.recipe.batching import split_batch
from imagenet_fast.recipe.load import find_recipe, load_recipe
from imagenet_fast.recipe.schema import Recipe
from tests.pages import ROOT, import_script

convergence, plan = import_script("convergence"), import_script("convergence_plan")
PLAN = plan.plan()


def outcome(top1: float, train_s: float = 100.0) -> dict[str, Any]:
    counts = {"epochs": 8, "steps": 96, "sent_bytes_per_step": 1e6}
    return {"status": "finished", "top1": top1, "train_s": train_s, **counts}


def trained(runs: list[Any]) -> list[dict[str, Any]]:
    """Rows as if the runs had been trained in this order; the middle one of three rates is the best."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        text = plan.command(run, rows)
        assert text is not None, f"{run.name} comes before what it follows from"
        middle = run.rate is not None and run.rate == plan.RATES[run.case][run.batch][1]
        rows.append(convergence.row_of(run, text, outcome(80 + run.seed + middle, 90 if run.case == "probe" else 700)))
    return rows


ROWS = trained(PLAN)


def recipe_of(row: dict[str, Any]) -> Recipe:
    words = shlex.split(row["command"])
    overrides = [value for flag, value in pairwise(words) if flag == "--set"]
    return load_recipe(find_recipe(words[words.index("--recipe") + 1]), overrides=(*overrides, f"seed={row['seed']}"))


def test_page_is_current():
    assert convergence.main(["--check"]) == 0


def test_a_page_without_rows_says_that_nothing_was_trained():
    page = convergence.page([])
    assert "Nothing has been trained for this page yet." in page
    assert ".png" not in page
    cells = [cell.strip() for line in page.splitlines() if line.startswith("| ") for cell in line.split("|")[2:-1]]
    figures = [cell for cell in cells if re.search(r"\d\d\.\d\d", cell)]
    assert not figures
    assert cells.count("not run yet") >= 18 + 8


def test_the_plan_has_each_batch_optimizer_engine_and_seed_once():
    assert len({run.name for run in PLAN}) == len(PLAN) == 27 + 6 * 3 * 3 + 7 * 3 + 2 * 3 + 1 + 2 * 3
    compared = {("lars", 256), ("lars", 2048), ("sgd", 8192), ("int8", 8192), ("mild", 256), ("plain", 256)}
    assert {run.group for run in PLAN[-6:]} == {"curves"}
    others = [run for run in PLAN[:-6] if (run.case, run.batch) not in compared]
    kinds = [(run.seed > 1, run.group == "engines" and run.seed > 1, run.seed) for run in others]
    assert kinds == sorted(kinds), "one seed of everything, the optimizers' other seeds, the engines'"
    last = max(number for number, run in enumerate(PLAN[:-6]) if (run.case, run.batch) in compared)
    assert all(run.seed == 1 for run in PLAN[:last] if (run.case, run.batch) not in compared)


def test_every_command_is_a_recipe_whose_batch_norms_see_128_images():
    for row in ROWS:
        recipe = recipe_of(row)
        batching = split_batch(recipe, 2)
        assert (batching.micro_batch, batching.global_batch) == (128, row["batch"]), row["run"]
        assert recipe.evaluates_after(recipe.epochs)
        assert recipe.evaluates_after(1) == (row["group"] == "curves" or "probe" in row["run"])
        assert row["group"] == "small" or (recipe.epochs, recipe.ema_decay) == (8, 0)
        assert ("--data" in row["command"]) == (row["group"] == "rates"), "only rates are tried on held-out images"


def test_rates_follow_from_the_nearest_tuned_batch_by_the_scaling_rule():
    """All best tried rates are the middle ones here: 0.25, 1 and 4 for SGD and LARC, 2, 24 and 12 for LARS."""
    rates = {(row["case"], row["batch"]): recipe_of(row).optim.lr for row in ROWS if row["group"] == "batches"}
    for case in ("sgd", "larc"):
        expected = {256: 0.25, 1024: 0.5, 2048: 1.0, 4096: 2.0, 8192: 4.0, 16384: 8.0}
        assert {batch: rates[case, batch] for batch in expected} == pytest.approx(expected)
    expected = {256: 2.0, 1024: 24 / 2**0.5, 2048: 24.0, 4096: 12 / 2**0.5, 8192: 12.0, 16384: 12 * 2**0.5}
    assert {batch: rates["lars", batch] for batch in expected} == pytest.approx(expected, rel=1e-4)
    assert {recipe_of(row).optim.lr for row in ROWS if row["group"] == "engines"} == {4.0}


def test_a_rate_that_diverged_is_not_chosen():
    rows = [row | {"top1": None} if row["rate"] == 8 else row for row in ROWS]
    assert plan.rate_for(rows, "sgd", 8192) == 4
    assert plan.rate_for(rows[:2], "sgd", 256) is None


def tries(tops: dict[float, float]) -> list[dict[str, Any]]:
    return [{"group": "rates", "case": "sgd", "batch": 8192, "rate": rate, "top1": top} for rate, top in tops.items()]


def test_rates_beyond_the_best_one_are_tried_while_it_is_at_an_end():
    tops = {2.0: 70.0, 4.0: 63.0, 8.0: 60.0}
    for more, rate in ((70.5, 1.0), (70.2, 0.5)):
        assert plan.rates(tries(tops), "sgd", 8192)[0] == rate
        assert plan.rate_for(tries(tops), "sgd", 8192) is None
        tops[rate] = more
    assert plan.rates(tries(tops), "sgd", 8192) == [0.5, 1, 2, 4, 8]
    assert plan.rate_for(tries(tops), "sgd", 8192) == 1
    rising = {float(2**n): 70.0 + n for n in range(1, 7)}
    assert plan.rates(tries(rising), "sgd", 8192) == [2, 4, 8, 16, 32, 64], "no more than six"
    assert plan.rate_for(tries(rising), "sgd", 8192) == 64


def test_a_run_with_another_rate_than_the_chosen_one_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convergence, "ROOT", tmp_path)
    folders = [tmp_path / plan.FOLDER / run.name for run in PLAN]
    for folder in folders:
        folder.mkdir(parents=True)
    assert convergence.current(ROWS) == ROWS
    better = [row | {"top1": 99.0} if row["run"] == "rates-lars-2048-rate12" else row for row in ROWS]
    assert convergence.current(better) == better, "until a smaller rate has been tried"
    (tried,) = (run for run in plan.plan(better) if (run.case, run.batch, run.rate) == ("lars", 2048, 6))
    text = plan.command(tried, better)
    better.append(convergence.row_of(tried, text, outcome(80.0)))
    gone = [row for row in better if row not in convergence.current(better)]
    assert {(row["group"], row["case"]) for row in gone} == {("batches", "lars"), ("curves", "lars")}
    assert {row["batch"] for row in gone} == {1024, 2048}
    assert [folder.exists() for folder in folders] == [row not in gone for row in ROWS]


def test_the_plain_recipe_gets_no_less_time_than_mild():
    rows = [{"group": "small", "seed": 1, "case": "mild", "train_s": 700.0}]
    assert plan.plain_epochs(rows) is None
    assert plan.plain_epochs([*rows, {**rows[0], "case": "probe", "train_s": 90.0}]) == 8


def test_cells_have_mean_deviation_and_what_is_missing():
    rows = [{"top1": 90.0}, {"top1": 91.0}, {"top1": 92.5}]
    assert convergence.cell(rows) == f"91.17 ± {statistics.stdev([90, 91, 92.5]):.2f}"
    assert convergence.cell(rows[:1]) == "90.00 (1 of 3 seeds)"
    assert convergence.cell([{"top1": None}]) == "(1 of 3 seeds, 1 diverged)"
    assert convergence.cell([]) == "not run yet"
    exact = [{"seed": 1, "top1": 70.0}, {"seed": 2, "top1": 74.0}, {"seed": 3, "top1": None}]
    assert convergence.difference([{"seed": seed, "top1": 72.5} for seed in (1, 3)], exact) == "+2.50"
    assert convergence.difference([{"seed": 1, "top1": None}], exact) == ""
    page = convergence.page(ROWS)
    assert "not run yet" not in page
    assert "82.00 ± 1.00" in page


def test_the_page_says_where_runs_were_trained_and_at_which_learning_rates():
    places = ["2 cores (AMD EPYC), 23 GiB, no GPU", "2 cores (Intel(R) Xeon(R) Processor), 23 GiB, no GPU"]
    page = convergence.page([row | {"machine": places[row["seed"] == 2]} for row in ROWS])
    assert re.search(r"\d\d on 2 cores \(AMD EPYC\), \d\d on 2 cores \(Intel\(R\) Xeon\(R\) Processor\)\.\n", page)
    assert "| 256 | 96 | 0.25 | 2 | 0.25 |" in page
    assert "| 4096 | 96 | 2 | 8.49 | 2 |" in page


def test_the_plain_recipes_time_is_said():
    timed = {"mild": 700.0, "probe": 90.0, "plain": 770.0}
    rows = [{"group": "small", "seed": 1, "case": case, "train_s": s, "epochs": 8} for case, s in timed.items()]
    assert "the plain recipe had 10 % more time" in convergence.equal_time(rows)
    assert "%" not in convergence.equal_time(rows[:2])


def test_curves_are_top1_after_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = [{"event": "run"}, *({"event": "eval", "epoch": e, "top1": 10.0 * e} for e in (1, 2, 2, 3))]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert convergence.curve(tmp_path) == [10.0, 20.0, 30.0]
    monkeypatch.setattr(convergence, "PICTURE", tmp_path / "a.png")
    widths = []
    for rows in (ROWS[:30], [row | ({"curve": [10.0, 20.0]} if row["group"] == "curves" else {}) for row in ROWS]):
        convergence.draw(rows)
        widths.append(Image.open(tmp_path / "a.png").width)
    assert widths[0] < widths[1]


def test_held_out_images_are_a_tenth_of_each_class(tmp_path: Path):
    for split, images in (("train", 20), ("val", 3)):
        for name in ("a", "b"):
            folder = tmp_path / "all" / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(folder / f"{number:05}.png")
    for _ in range(2):
        convergence.hold_out(tmp_path / "all", tmp_path / "held-out")
    train, val = scan(tmp_path / "held-out")
    assert (len(train), len(val)) == (36, 4)
    assert {Path(val.name(n)).resolve().parent.parent.name for n in range(4)} == {"train"}
    names = [{(split.labels[n], Path(split.name(n)).name) for n in range(len(split))} for split in (train, val)]
    assert not names[0] & names[1]


def test_runs_that_are_missing_are_trained_and_a_stopped_one_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(convergence.benchmarks, "RESULTS", tmp_path)
    monkeypatch.setattr(convergence, "PAGE", tmp_path / "convergence.md")
    monkeypatch.setattr(convergence, "PICTURE", tmp_path / "convergence.png")
    monkeypatch.setattr(convergence, "hold_out", lambda *_: None)
    monkeypatch.setattr("imagenet_fast.data.download.fetch_dataset", lambda *_: tmp_path)
    monkeypatch.setattr("imagenet_fast.distributed.init.computes_bf16", lambda _: True)
    declared = {**json.loads((ROOT / "docs" / "results" / "convergence.json").read_text()), "rows": ROWS[:8]}
    convergence.benchmarks.write(declared)
    asked: list[str] = []

    def train(run: Any, text: str) -> tuple[int, dict[str, Any] | None]:
        asked.append(run.name)
        done = None if len(asked) == 3 else convergence.row_of(run, text, outcome(80.0))
        return (4, None) if done is None else (0, done)

    monkeypatch.setattr(convergence, "train", train)
    assert convergence.main(["run"]) == 4
    assert asked == [run.name for run in PLAN[8:11]]
    rows = convergence.benchmarks.read("convergence")["rows"]
    assert [row["run"] for row in rows] == [run.name for run in PLAN[:10]]
    assert (tmp_path / "convergence.png").stat().st_size > 1000
    assert "![Top-1" in (tmp_path / "convergence.md").read_text()
    assert convergence.main(["run", "1"]) == 0
    assert asked[3:] == [PLAN[10].name], "it goes on where it stopped"
    monkeypatch.setattr("imagenet_fast.distributed.init.computes_bf16", lambda _: False)
    assert convergence.main(["run"]) == 2
    assert len(asked) == 4, "its rows are of bf16, and here layers would compute in fp32"
