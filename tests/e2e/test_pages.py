"""Each command on each page is run: here, or by the test or CI step that is named for it.

What runs here prints what its page shows, but for the figures. Commands of one page share a directory and are run in
order, as a reader does it. Some are made small by options that are added at their end.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from imagenet_fast.cli.main import app
from imagenet_fast.recipe.load import find_recipe, load_recipe, to_toml
from tests.data.prepare.replica import official_tars, small_imagenet
from tests.e2e.command import COMMAND, environment
from tests.pages import PAGES, ROOT, Command, name_of, python_blocks, shown_commands
from tests.ranks import run


@dataclass(frozen=True)
class Here:
    """Run by this file: in the suite, or among the ``long`` tests if ranks have to start."""

    more: tuple[str, ...] = ()
    long: bool = False


@dataclass(frozen=True)
class By:
    """Run by a test, in small, or by CI; or why it is only checked by `tests/test_docs.py`."""

    where: str


REACHED = ("--set", "target_top1=12")
PLANNED = By("tests/test_docs.py::test_every_command_is_understood")
"""For trainings on GPUs or of days: recipe, keys, ranks and batch are checked, nothing is trained."""

RUN_BY: tuple[tuple[str, Here | By], ...] = (
    (r"imagenet-fast --version", Here()),
    (r"imagenet-fast recipes\b", Here()),
    (
        r"imagenet-fast launch \w+ \.\.\.",
        By("tests/launch/test_cluster_job.py::test_the_commands_of_the_documents_print_jobs"),
    ),
    (r"imagenet-fast launch ", Here()),
    (r"imagenet-fast data fetch digits", Here()),
    (
        r"imagenet-fast data prepare .*--format ",
        By("tests/e2e/test_data.py::test_tars_are_prepared_verified_and_trained_on"),
    ),
    (r"imagenet-fast data prepare ", Here(("--subset",))),
    (r"imagenet-fast data (verify|cache) ", Here()),
    (r"imagenet-fast data fetch cifar10", By("tests/data/test_datasets.py")),
    (r"imagenet-fast train --recipe my\.toml --out", Here(REACHED, long=True)),
    (r"imagenet-fast train --recipe demo\b", Here(REACHED, long=True)),
    (r"imagenet-fast train --recipe smoke\b", Here(long=True)),
    (
        r".*imagenet-fast train .*--nodes \d+:\d+",
        By("tests/faults/test_elastic.py::test_nodes_that_join_or_are_told_to_leave_cost_no_step"),
    ),
    (
        r"(?!srun).*imagenet-fast train .*--nodes",
        By("tests/launch/test_rendezvous.py::test_two_nodes_meet_by_address_and_share_a_folder"),
    ),
    (r"srun ", By("tests/launch/test_slurm.py::test_several_tasks_a_node_are_ranks")),
    (
        r"imagenet-fast train .*--init-from",
        By("tests/e2e/test_weights.py::test_a_run_starts_from_weights_that_rank_0_alone_can_read"),
    ),
    (r".*imagenet-fast train ", PLANNED),
    (r"imagenet-fast compare --recipe demo --sync [\w,]+ --out", Here(REACHED, long=True)),
    (
        r"imagenet-fast compare .*--rate",
        By("tests/e2e/test_compare.py::test_engines_are_compared_over_a_network_of_ones_own"),
    ),
    (r"imagenet-fast compare .*--layout", By("tests/e2e/test_compare.py::test_compare_layouts_in_one_table")),
    (
        r"imagenet-fast compare .*--recipe demo",
        By("tests/e2e/test_compare.py::test_compare_shows_finished_runs_after_a_failure"),
    ),
    (r"imagenet-fast compare ", PLANNED),
    (
        r"imagenet-fast report .*--reference",
        By("tests/metrics/test_reference.py::test_the_command_prints_a_line_a_run_and_the_source"),
    ),
    (r"imagenet-fast report .*runs/(first|slower)", Here(long=True)),
    (r"imagenet-fast timeline .*\.json", By("tests/metrics/test_timeline.py::test_the_picture_s_areas_are_the_times")),
    (
        r"imagenet-fast timeline ",
        By(
            "tests/metrics/test_timeline.py::test_the_step_of_median_length_is_taken_and_a_run_has_its_directory_s_name"
        ),
    ),
    (r"imagenet-fast plan .*--(rows|validate)", By("tests/plan/test_command.py::test_published_rows_as_json")),
    (r"imagenet-fast plan .*--(sweep|png)", By("tests/plan/test_command.py::test_rows_and_picture_of_a_sweep")),
    (r"imagenet-fast plan ", Here()),
    (r"imagenet-fast report ", By("tests/e2e/test_compare.py")),
    (
        r"imagenet-fast eval ",
        By("tests/e2e/test_weights.py::test_three_ranks_judge_a_run_as_it_judged_itself_to_the_image"),
    ),
    (r"imagenet-fast export ", By("tests/e2e/test_weights.py::test_exported_program_gives_the_networks_results")),
    (
        r"imagenet-fast doctor ",
        By("tests/e2e/test_doctor.py::test_what_fails_is_told_with_the_rest_and_the_exit_code_says_so"),
    ),
    (
        r"imagenet-fast bench sync --count",
        By("tests/bench/test_comm_volume.py::test_there_is_a_row_an_engine_and_number_of_ranks_with_every_figure"),
    ),
    (
        r"imagenet-fast bench sync .*--(ladder|batches)",
        By("tests/bench/test_presets.py::test_every_step_is_told_beside_the_one_it_is_added_to"),
    ),
    (
        r"imagenet-fast bench sync .*--ranks-per-host",
        By("tests/bench/test_engines.py::test_bytes_of_hosts_of_several_ranks_are_a_hosts"),
    ),
    (r"imagenet-fast bench sync ", By("tests/bench/test_engines.py::test_there_is_a_row_an_engine_with_every_figure")),
    (
        r"imagenet-fast bench collectives ",
        By("tests/bench/test_collectives.py::test_there_is_a_row_a_size_and_collective_with_nccl_tests_figures"),
    ),
    (r"imagenet-fast bench pipeline ", By("tests/bench/test_pipeline.py::test_rows_by_schedule_and_micro_batches")),
    (
        r"imagenet-fast bench step .*--checkpoint-every",
        By("tests/bench/test_one_rank.py::test_what_checkpoints_cost_is_timed_beside_the_same_loop_without"),
    ),
    (r"imagenet-fast bench step", By("tests/bench/test_one_rank.py::test_a_step_is_timed_beside_the_plain_loop")),
    (
        r"imagenet-fast bench kernels",
        By("tests/bench/test_one_rank.py::test_an_optimizers_operators_do_not_grow_with_the_tensors"),
    ),
    (
        r"imagenet-fast bench data",
        By("tests/bench/test_dataloaders.py::test_every_loader_is_timed_in_one_run_and_drawn"),
    ),
    (r"torchrun .*examples/own_engine\.py", By("tests/e2e/test_examples.py::test_own_engine_is_exact_and_timed")),
    (
        r"torchrun .*examples/train_imagenet\.py",
        By("tests/e2e/test_examples.py::test_train_imagenet_learns_random_images"),
    ),
    (r"tensorboard --logdir ", By("tests/e2e/test_train.py::test_the_run_directory_is_complete")),
    (r"scripts/(test|docs|demo)\.sh", By(".ci/run")),
    (r"scripts/benchmarks\.sh", By("tests/test_benchmarks.py::test_measuring_rewrites_rows_and_keeps_the_declaration")),
    (
        r"python scripts/convergence\.py",
        By("tests/test_convergence.py::test_runs_that_are_missing_are_trained_and_a_stopped_one_is_not_recorded"),
    ),
    (r"scripts/gpu-check\.sh", By("tests/e2e/test_gpu_check.py::test_a_dry_run_writes_every_section_and_none_fails")),
    (r"\.ci/run", By(".ci/run")),
    (r"(git clone|cd|python3 -m venv|source|pip install) ", By("scripts/environment.sh")),  # CI begins with it
)
"""By what a command begins with, who runs it; the first that fits."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_has_somebody_who_runs_it(page: Path):
    for command in shown_commands(page):
        if isinstance(place := place_of(command), By):
            file, _, test = place.where.partition("::")
            text = (ROOT / file).read_text()
            assert not test or f"def {test}(" in text, f"{command.place}: {place.where}"
            assert file != ".ci/run" or command.text.startswith(".ci") or command.text.split()[0] in text, command


def place_of(command: Command) -> Here | By:
    if command.place.startswith("docs/benchmarks.md"):  # measured for that page, by the hour
        return PLANNED
    for pattern, place in RUN_BY:
        if re.match(pattern, command.text):
            return place
    raise AssertionError(f"{command.place}: nothing runs `{command.text}`; add it to RUN_BY")


def run_here(page: Path, *, long: bool) -> list[tuple[Command, Here]]:
    """The commands of a page that run here, on pages where ranks have to start for some, or on the others."""
    found = [(command, place) for command in shown_commands(page) if isinstance(place := place_of(command), Here)]
    return found if any(place.long for _, place in found) == long else []


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, beside the downloads; absolute paths of the pages are below it."""
    official_tars(tmp_path / "downloads", small_imagenet(train=16, val=5))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def words_of(command: Command, here: Here, reader: Path) -> list[str]:
    return [re.sub(r"^/(downloads|data|nvme)\b", rf"{reader}/\1", word) for word in (*command.words, *here.more)]


@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page, long=False)], ids=name_of)
def test_what_needs_no_ranks_prints_what_the_page_shows(page: Path, reader: Path):
    for command, here in run_here(page, long=False):
        words = words_of(command, here, reader)
        if words[:2] in (["data", "verify"], ["data", "cache"]) and not (reader / "data").exists():
            source = ("--source", str(reader / "downloads"), "--out", str(reader / "data" / "imagenet"))
            CliRunner().invoke(app, ["data", "prepare", *source, "--subset"], catch_exceptions=False)
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, f"{command.place}: {done.output}"
        compare_with_page(command, done.stdout)


@pytest.mark.weekly
@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page, long=True)], ids=name_of)
def test_a_page_works_from_its_first_command_to_its_last(page: Path, reader: Path):
    for command, here in run_here(page, long=True):
        stop = "^C" in command.prints
        process = subprocess.Popen(
            [*COMMAND, *words_of(command, here, reader)], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=environment(COLUMNS="80", PYTHONPATH=str(ROOT), IMAGENET_FAST_CACHE=str(reader / "cache")),
        )  # fmt: skip
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if stop and line.startswith("epoch"):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                stop = False
        code = process.wait(timeout=120)
        assert code == (4 if "^C" in command.prints else 0), f"{command.place}: {''.join(printed)}"
        if redirected := re.search(r" > (\S+)$", command.text):
            Path(redirected[1]).write_text("".join(printed))
        compare_with_page(command, "".join(printed))


def compare_with_page(command: Command, printed: str) -> None:
    """Assert that each line that the page shows was printed, in this order, whatever its figures are."""
    lines = [without_figures(line) for line in printed.splitlines()]
    begun = 0
    for line in command.prints.splitlines():
        if line.strip() not in ("...", "^C", ""):
            assert without_figures(line) in lines[begun:], f"{command.place}: {line}\nis not in\n{printed}"
            begun += lines[begun:].index(without_figures(line))


def without_figures(line: str) -> str:
    """The line with 0 for each number, single spaces, and no directories before runs/ and data/."""
    line = re.sub(r"\S*/(?=(runs|data)/)", "", line)
    return " ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line).split())


def test_python_of_the_pages_runs(tmp_path: Path):
    recipe = tmp_path / "tiny.toml"
    changes = ("global_batch=8", "micro_batch=4", "data.train_images=16", "data.val_images=8")
    recipe.write_text(to_toml(load_recipe(find_recipe("smoke"), overrides=changes)))
    programs = {
        name_of(page): [block.text.replace('"demo"', repr(str(recipe))) for block in python_blocks(page)]
        for page in PAGES
    }
    assert sum(map(len, programs.values())) >= 7
    run(2, run_programs, programs, tmp_path)


def run_programs(programs: dict[str, list[str]], folder: Path) -> None:
    """Run the blocks of each page one after the other; what a reader has before the first is a model and batches."""
    os.chdir(folder)
    for page, blocks in programs.items():
        names: dict[str, Any] = {"torch": torch, "criterion": nn.functional.cross_entropy}
        names["batches"] = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(3)]
        for number, block in enumerate(blocks):
            if re.search(r"GradientPool\(model\)|attach\(model", block):
                torch.manual_seed(0)
                names["model"] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
            with redirect_stdout(io.StringIO()):
                exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
