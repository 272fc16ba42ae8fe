"""What is printed, wherever it leads, changes nothing about what is done; and text files are UTF-8."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagenet_fast.recipe.load import find_recipe
from tests.e2e.command import COMMAND, environment, events_of, outcome_of

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LATIN_1 = {"PYTHONIOENCODING": "latin-1"}
LOST = (
    "error: the output could not be written (No space left on device); see to where it goes, and run the command "
    "again\n"
)
ROOT = Path(__file__).parents[2]


def printing(program: str, shell: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """What a process with our streams does, whose stdout and stderr lead where ``shell`` says."""
    start = "from imagenet_fast.launch.stdio import *; import os, sys; keep_printing()"
    words = ["sh", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, f"{start}\n{program}"]
    return subprocess.run(words, capture_output=True, check=False, timeout=60, env=environment(**more))


@pytest.mark.parametrize("shell", [">/dev/full 2>&1", ">&-", ">&- 2>&-", "", "</dev/null"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_prints_succeed_wherever_they_lead_and_the_exit_code_stays(shell: str, unbuffered: str, tmp_path: Path):
    told = tmp_path / "told"
    program = (
        "for _ in range(20000): print('–')\n"
        f"print('–', file=sys.stderr, flush=True); open({str(told)!r}, 'w').write('done'); sys.exit(4)"
    )
    done = printing(program, shell, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, told.read_text()) == (4, "done")
    assert b"Error" not in done.stdout + done.stderr
    assert done.stdout in (b"", "–\n".encode() * 20000)


def test_a_terminal_is_still_one_and_may_go_away():
    program = (
        "print(sys.stdout.isatty(), flush=True); sys.stdin.readline()\n"
        "for _ in range(1000): print('a line')\nsys.exit(5)"
    )
    start = "from imagenet_fast.launch.stdio import *; import sys; keep_printing()"
    terminal, shown = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{start}\n{program}"],
        stdin=subprocess.PIPE,
        stdout=shown,
        stderr=shown,
        env=environment(),
    )
    os.close(shown)
    assert os.read(terminal, 100).split() == [b"True"]
    os.close(terminal)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 5


def test_a_reader_that_leaves_is_no_error():
    program = "for _ in range(20000): print('a line')\nrefuse_if_lost(); sys.exit(3)"
    done = printing(program, "| head -n 1; exit 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a line\n", b"")


def test_a_pipe_that_does_not_block_is_waited_for():
    program = "os.set_blocking(1, False)\nfor _ in range(30000): print('a line')\nrefuse_if_lost()"
    done = printing(program, "| { sleep 0.3; wc -l; }")
    assert (done.stdout.strip(), done.stderr) == (b"30000", b"")


def test_a_closed_stream_is_no_place_for_a_file_of_the_run(tmp_path: Path):
    program = f"file = open({str(tmp_path / 'x')!r}, 'wb'); assert file.fileno() > 2; os.write(1, b'a'); print('b')"
    assert printing(program, ">&- 2>&-").returncode == 0
    assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.parametrize(
    ("locale", "printed"),
    [(ASCII, b"a - * ? \xff\n"), (LATIN_1, b"a - \xb7 ? \xff\n"), ({}, "a – · 数 ".encode() + b"\xff\n")],
)
def test_what_an_encoding_lacks_is_replaced_and_bytes_of_paths_stay(locale: dict[str, str], printed: bytes):
    done = printing(
        r"print('a \u2013 \xb7 \u6570 \udcff'); print('a \u2013 \xb7 \u6570 \udcff', file=sys.stderr)", "", **locale
    )
    assert done.returncode == 0
    assert done.stdout == printed
    assert done.stderr in (printed, b"a - * ? \xff\n")


def test_a_result_that_could_not_be_printed_is_an_error_and_no_traceback():
    for words in (("recipes",), ("recipes", "show", "smoke"), ("--help",)):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60
            )
        assert (done.returncode, done.stderr.decode()) == (2, LOST)


def test_text_that_is_meant_for_a_file_is_utf_8_in_any_locale(tmp_path: Path):
    recipe = tmp_path / "a.toml"
    recipe.write_text(f"# Größe – 数\n{find_recipe('smoke').read_text(encoding='utf-8')}", encoding="utf-8")
    claims = ("--nodes", "1", "--image", "i", "--run-claim", "r")
    for words in (("recipes", "show", str(recipe)), ("launch", "k8s", "--recipe", str(recipe), *claims)):
        done = subprocess.run([*COMMAND, *words], capture_output=True, env=environment(**ASCII), timeout=60, check=True)
        assert "# Größe – 数\n" in done.stdout.decode()


@pytest.mark.weekly
def test_a_run_ends_as_ever_without_anybody_to_read_what_it_says(tmp_path: Path):
    """Into a pipe that nobody reads and on a full device, in an ASCII locale; its recipe is UTF-8."""
    recipe, out = tmp_path / "größe.toml", tmp_path / "run"
    recipe.write_text(f"# Größe – 数\n{find_recipe('smoke').read_text(encoding='utf-8')}", encoding="utf-8")
    settings = ("global_batch=8", "epochs=1", "data.train_images=32", "data.val_images=4", "log_every=1")
    words = ["train", "--recipe", str(recipe), "--nproc", "1", *(w for s in settings for w in ("--set", s))]
    readable, nobody = os.pipe()
    with Path("/dev/full").open("wb") as full:
        run = subprocess.Popen(
            [*COMMAND, *words, "--out", str(out)], stdout=nobody, stderr=full, env=environment(**ASCII)
        )
    os.close(readable)
    os.close(nobody)
    assert run.wait(timeout=240) == 0
    assert outcome_of(out)["status"] == "finished"
    assert len(events_of(out, "train")) == 4

    with Path("/dev/full").open("wb") as full:  # of an evaluation what is printed is all there is
        words = [*COMMAND, "eval", "--weights", str(out), "--nproc", "1"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=environment(**ASCII), timeout=240)
    assert (done.returncode, done.stderr.decode()) == (2, LOST)


def unspecified(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text in the locale's encoding."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        modes = [given["mode"]] if "mode" in given else []
        match call.func:
            case ast.Attribute(attr="read_text" | "write_text"):
                as_text = True
            case ast.Attribute(value=ast.Name(id="os" | "tarfile" | "Image")):
                as_text = False
            case ast.Name(id="open") | ast.Attribute(attr="open" | "fdopen"):
                modes += call.args[1:2] if isinstance(call.func, ast.Name) else call.args[:1]
                named = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
                as_text = not modes or any("b" not in mode for mode in named)
            case _:
                as_text = isinstance(given.get("text", given.get("universal_newlines")), ast.Constant)
        if as_text and "encoding" not in given:
            yield call


@pytest.mark.parametrize("folder", ["imagenet_fast", "scripts"])
def test_all_text_files_are_utf_8(folder: str):
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in unspecified(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "say encoding='utf-8'"


@pytest.mark.parametrize(
    "code", ["p.read_text()", "open(p)", "open(p, 'w')", "p.open()", "p.open('a')", "run(c, text=True)"]
)
def test_a_call_without_an_encoding_is_found(code: str):
    assert list(unspecified(ast.parse(code)))
    assert not list(unspecified(ast.parse(f"{code[:-1]}, encoding='utf-8')".replace("(,", "("))))
