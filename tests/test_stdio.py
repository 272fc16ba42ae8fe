"""What is printed, wherever it leads, changes nothing about what is done; and text files are UTF-8."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from select import select

import pytest

from imagenet_fast.recipe.load import find_file
from tests.e2e.command import COMMAND, environment, events_of, outcome_of, wait_for

ROOT = Path(__file__).parents[1]
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LOST = (
    "error: the output could not be written (No space left on device); see to where it goes, and run the command "
    "again\n"
)
START = "from imagenet_fast.stdio import *; keep_printing(); import os, sys"
UNHURRIED = START.replace("()", "(waits=False)")
LINES = "for _ in range(20000): print('a line')\nrefuse_if_lost()"
LIGHT = (sys.executable, "-S", "-c")
"""Without the folders of installed packages: what it imports is ours, and starts in no time."""


def printing(program: str, shell: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """What a process with our streams does, whose stdout and stderr lead where ``shell`` says."""
    program = program if program.startswith(UNHURRIED) else f"{START}\n{program}"
    words = ["sh", "-c", f'exec "$0" "$1" "$2" "$3" {shell}', *LIGHT, program]
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
        (LINES, "| (sleep 4; wc -l)", {}, (0, b"20000\n", b"")),  # a pager, from a command whose result it shows
        (f"{UNHURRIED}\n{LINES}", "| (sleep 2; wc -l)", {"PYTHONUNBUFFERED": ""}, (0, b"20000\n", b"")),
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


UNREAD = f"""{UNHURRIED}
for number in range(30000): print(number)
print("all said", file=sys.stderr, flush=True); sys.stdin.readline()
print("again"); exit_now(SystemExit(5))"""


@pytest.mark.usefixtures("subprocesses")
@pytest.mark.parametrize("held", [False, True], ids=["pipe", "terminal"])
def test_what_nobody_reads_holds_nobody_up_and_is_counted(held: bool):
    """In a pipe, or on a terminal after Ctrl-S."""
    reader, shown = os.openpty() if held else os.pipe()
    os.write(reader, b"\x13") if held else None
    pipes = {"stdin": subprocess.PIPE, "stdout": shown, "stderr": subprocess.PIPE}
    clean = environment(PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    process = subprocess.Popen([*LIGHT, UNREAD], env=clean, **pipes)
    os.close(shown)
    assert process.stderr.readline() == b"all said\n"
    os.write(reader, b"\x11") if held else None
    shown = [int(line) for line in read(reader, 1.0).split()]
    assert shown == [*range(len(shown))]
    assert process.communicate(b"\n", timeout=20)[1] == b""
    assert process.returncode == 5
    left_out, again = read(reader, 1.0).splitlines()
    assert left_out.decode() == f"({30000 - len(shown)} lines that nobody read are left out)"
    assert again == b"again"


def read(reader: int, within_s: float) -> bytes:
    """What arrives, until nothing does for some seconds."""
    text = b""
    with suppress(OSError):  # nobody holds the terminal's other end any more
        while select([reader], [], [], within_s)[0] and (more := os.read(reader, 1 << 16)):
            text += more
    return text


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


@pytest.mark.ci
def test_a_run_goes_on_and_saves_though_nobody_reads_what_it_says(tmp_path: Path):
    """In a full pipe and on a full device, in an ASCII locale; its recipe is UTF-8."""
    recipe, out = tmp_path / "größe.toml", tmp_path / "run"
    recipe.write_text(f"# Größe – 数\n{find_file('recipe', 'smoke').read_text(encoding='utf-8')}", encoding="utf-8")
    settings = ("model={kind='cifarnet',widths=[4,5,6]}", "epochs=9999", "log_every=1", "timeout.step_s=9")
    train = [*COMMAND, "train", "--recipe", str(recipe), "--nproc", "2", "--out", str(out), *settings]
    evaluate = [*COMMAND, "eval", "--weights", f"{out}@newest", "--nproc", "1"]
    reader, shown = os.pipe()
    fcntl.fcntl(shown, fcntl.F_SETPIPE_SZ, 4096)
    with Path("/dev/full").open("wb") as full:
        run = subprocess.Popen(train, stdout=shown, stderr=full, env=environment(**ASCII))
        wait_for(lambda: (out / "events.jsonl").is_file() and len(events_of(out, "train")) > 200)
        run.terminate()
        assert run.wait(60) == 4
        os.close(reader)
        os.close(shown)
        assert outcome_of(out)["steps"] == events_of(out, "train")[-1]["step"]
        # Of an evaluation what is printed is all there is.
        done = subprocess.run(evaluate, stdout=full, stderr=subprocess.PIPE, env=environment(**ASCII), timeout=240)
    assert (done.returncode, done.stderr.decode()) == (2, LOST)


@pytest.mark.usefixtures("subprocesses")
def test_all_text_files_and_pipes_are_utf_8():
    folders = [ROOT / name for name in ("imagenet_fast", "scripts")]
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--preview", "--select", "PLW1514"]
    done = subprocess.run([*ruff, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    texts = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    assert not [path for path, text in texts.items() if re.search(r"text=True(?!, encoding=)", text)]
