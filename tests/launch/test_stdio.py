"""What is printed, wherever it leads, changes nothing about what is done; and text files are UTF-8."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from imagenet_fast.recipe.load import find_file
from tests.e2e.command import COMMAND, environment, events_of, outcome_of

ROOT = Path(__file__).parents[2]
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LOST = (
    "error: the output could not be written (No space left on device); see to where it goes, and run the command "
    "again\n"
)
START = "from imagenet_fast.launch.stdio import *; import os, sys; keep_printing()"
LINES = "for _ in range(20000): print('a line')\nrefuse_if_lost()"
LIGHT = (sys.executable, "-S", "-c")
"""Without the folders of installed packages: what it imports is ours, and starts in no time."""


def printing(program: str, shell: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """What a process with our streams does, whose stdout and stderr lead where ``shell`` says."""
    words = ["sh", "-c", f'exec "$0" "$1" "$2" "$3" {shell}', *LIGHT, f"{START}\n{program}"]
    clean = environment(PYTHONPATH=str(ROOT), **more)
    return subprocess.run(words, capture_output=True, check=False, timeout=60, env=clean)


MANY = "for _ in range(20000): print('–')\nprint('–', file=sys.stderr, flush=True)\nsys.exit(4)"
TEXT = r"'a \u2013 \xb7 \u6570 \udcff'"
IN_TEXT = f"print({TEXT}); print({TEXT}, file=sys.stderr)"
AS_UTF_8 = "a – · 数 ".encode() + b"\xff\n"
DASHES = "–\n".encode()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("program", "shell", "settings", "ended"),
    [
        *(
            (MANY, shell, {"PYTHONUNBUFFERED": unbuffered}, (4, DASHES * 20000 * reads, DASHES * reads))
            for shell, reads in ((">/dev/full 2>&1", 0), (">&- 2>&-", 0), ("", 1), ("</dev/null", 1))
            for unbuffered in ("", "1")
        ),
        *(
            (IN_TEXT, "", locale, (0, AS_UTF_8, AS_UTF_8))  # bytes of paths stay
            for locale in (ASCII, {"PYTHONIOENCODING": "latin-1"}, {})
        ),
        (f"{LINES}; sys.exit(3)", "| head -n 1; exit 0", {}, (0, b"a line\n", b"")),  # a reader leaves
        (f"os.set_blocking(1, False)\n{LINES}", "| (sleep 0.3; wc -l)", {}, (0, b"20000\n", b"")),
        # A file takes no closed stream's number.
        *(
            ("f = open('/dev/zero', 'rb'); assert f.fileno() > 2; os.write(1, b'a'); print('b')", shell, {},
             (0, b"", b""))
            for shell in (">&- 2>&-", "<&- >&- 2>&-")
        ),
    ],
)  # fmt: skip
def test_prints_succeed_wherever_they_lead_and_are_utf_8_in_any_locale(
    program: str, shell: str, settings: dict[str, str], ended: tuple[int, bytes, bytes]
):
    done = printing(program, shell, **settings)
    assert (done.returncode, done.stdout, done.stderr) == ended


@pytest.mark.ci
def test_a_terminal_is_still_one_and_may_go_away():
    program = (
        f"{START}\nprint(sys.stdout.isatty(), flush=True); sys.stdin.readline()\n"
        "for _ in range(1000): print('a line')\nsys.exit(5)"
    )
    terminal, shown = os.openpty()
    clean = environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen([*LIGHT, program], stdin=subprocess.PIPE, stdout=shown, stderr=shown, env=clean)
    os.close(shown)
    assert os.read(terminal, 100).split() == [b"True"]
    os.close(terminal)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 5


@pytest.mark.ci
@pytest.mark.parametrize("words", [("recipes",), ("recipes", "show", "smoke"), ("--help",)])
def test_a_result_that_could_not_be_printed_is_an_error_and_no_traceback(words: tuple[str, ...]):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60)
    assert (done.returncode, done.stderr.decode()) == (2, LOST)


@pytest.mark.usefixtures("subprocesses")
def test_an_interrupted_import_leaves_the_exit_code_as_it_is(tmp_path: Path):
    """Where an interrupt has passed through ``exec``, as of a dataclass that is made, Python itself ends by SIGINT."""
    text = f"{START}\ntry: exec('raise KeyboardInterrupt')\nexcept KeyboardInterrupt: exit_now(SystemExit(4))"
    (tmp_path / "interrupted.py").write_text(text)
    words, clean = [sys.executable, "-S", "-m", "interrupted"], environment(PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert subprocess.run(words, check=False, env=clean).returncode == 4


@pytest.mark.weekly
def test_a_run_ends_as_ever_without_anybody_to_read_what_it_says(tmp_path: Path):
    """Into a pipe that nobody reads and on a full device, in an ASCII locale; its recipe is UTF-8."""
    recipe, out = tmp_path / "größe.toml", tmp_path / "run"
    recipe.write_text(f"# Größe – 数\n{find_file('recipe', 'smoke').read_text(encoding='utf-8')}", encoding="utf-8")
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


@pytest.mark.usefixtures("subprocesses")
def test_all_text_files_and_pipes_are_utf_8():
    folders = [ROOT / name for name in ("imagenet_fast", "scripts")]
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--preview", "--select", "PLW1514"]
    done = subprocess.run([*ruff, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert not [path for path, text in texts.items() if re.search(r"text=True(?!, encoding=)", text)]
