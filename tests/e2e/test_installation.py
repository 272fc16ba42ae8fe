"""Installations: the command and the Dockerfile's install step."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.e2e.command import outcome_of
from tests.root import as_user

ROOT = Path(__file__).parents[2]
DOCKERFILE = DockerfileParser(path=str(ROOT / "Dockerfile"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the Dockerfile's own steps were taken, with an environment without torch as the image's Python.

    What the image has in /home, /tmp and /here lies in the folder. As NVIDIA's does, it holds pip to versions of its
    own, some too old for us.
    """
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder / "env", with_pip=True)
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    (folder / "constraint.txt").write_text("typer==0.12.0\npydantic==2.9.0\n")
    for step in instructions("RUN"):
        done = subprocess.run(
            ["bash", "-euc", inside(folder, step)], cwd=ROOT, text=True, capture_output=True, check=False,
            env={"PATH": f"{folder / 'env' / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "PIP_COMPILE": "0",
                 "PIP_CONSTRAINT": str(folder / "constraint.txt"),
                 "PIP_CACHE_DIR": str(Path("~/.cache/pip").expanduser())},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def instructions(name: str) -> list[str]:
    """Return the values of each instruction of that name in the Dockerfile."""
    return [step["value"] for step in DOCKERFILE.structure if step["instruction"] == name]


def inside(folder: Path, text: str) -> str:
    return re.sub(r"(?<!\S)/(?=(home|tmp|here)\b)", f"{folder}/", text)


@pytest.fixture(scope="module")
def command(image: Path) -> str:
    """The installed command. As in the image, torch comes from elsewhere: from the environment that runs the tests."""
    (site,) = image.glob("env/lib/python*/site-packages")
    (site / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(image / "env" / "bin" / "imagenet-fast")


@pytest.mark.weekly
def test_dockerfile_install_step_pulls_no_torch(image: Path):
    installed = subprocess.run(
        [image / "env" / "bin" / "pip", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"^(torch|torchvision|nvidia-\S+) ", installed, re.M)
    command = str(image / "env" / "bin" / "imagenet-fast")
    listed = subprocess.run([command, "recipes"], capture_output=True, text=True, check=True, cwd="/").stdout
    assert "resnet50-512gpu" in listed
    wrong = subprocess.run([command, "train", "--recipe", "x"], capture_output=True, text=True, check=False, cwd="/")
    assert (wrong.returncode, wrong.stderr[:6]) == (2, "error:")


@pytest.mark.weekly
def test_the_licence_comes_with_what_is_installed(image: Path):
    (about,) = image.glob("env/lib/python*/site-packages/imagenet_fast-*.dist-info")
    metadata = Parser().parsestr((about / "METADATA").read_text())
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert (about / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


@pytest.mark.weekly
def test_a_program_that_imports_it_is_checked_against_its_types(image: Path, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "from imagenet_fast.recipe.load import find_recipe, load_recipe\n"
        "reveal_type(load_recipe(find_recipe('demo')).ranks)\n"
        "load_recipe(1)\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [*mypy, "--python-executable", str(image / "env" / "bin" / "python"), program.name],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert 'program.py:2: note: Revealed type is "int"' in checked.stdout.replace("builtins.", ""), checked.stdout
    assert 'program.py:3: error: Argument 1 to "load_recipe"' in checked.stdout
    assert "Found 1 error in 1 file" in checked.stdout


SHORT = ("train", "--recipe", "smoke", "--set", "data.train_images=32", "--nproc", "1")


@pytest.mark.weekly
def test_unknown_user_trains_in_the_image(image: Path, command: str, tmp_path: Path):
    """Beside a torch from elsewhere, as in the image. Who may not become somebody else tries it as who they are."""
    somebody = 12345 if os.geteuid() == 0 else os.geteuid()
    become = as_user(somebody) if os.geteuid() == 0 else []
    os.chown(tmp_path, somebody, -1)
    variables = {name: inside(image, value) for name, value in DOCKERFILE.envs.items()}
    for arguments in (("data", "fetch", "digits"), SHORT):
        done = subprocess.run(
            [*become, command, *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **variables},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome_of(run)["status"] == "finished"
    home = Path(variables["HOME"])
    assert (home / ".cache" / "imagenet-fast" / "digits" / "val").is_dir()
    assert {path.stat().st_uid for folder in (tmp_path, home) for path in folder.rglob("*")} == {somebody}


def test_the_image_is_nvidias_with_the_command_as_its_entry():
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", DOCKERFILE.baseimage)
    assert [json.loads(value) for value in instructions("ENTRYPOINT")] == [["imagenet-fast"]]


def test_the_image_is_finished_before_it_stops_being_root():
    order = [step["instruction"] for step in DOCKERFILE.structure]
    assert order.count("USER") == 1
    assert not {"RUN", "COPY", "ADD"} & set(order[order.index("USER") :])
    (user,) = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "numbers, which need no entry in the image's passwd"


def test_documented_docker_command():
    shown = re.search(r"docker run(?:.*\\\n)*.*", "\n".join(instructions("COMMENT")))
    assert shown is not None
    documented = shlex.split(shown[0].replace("\\\n", ""))
    directory = instructions("WORKDIR")[-1]
    assert documented[documented.index("--user") + 1] == "$(id -u):$(id -g)"
    assert f"$PWD:{directory}" in documented
    assert "--ipc=host" in documented, "loaders and NCCL need more shared memory than docker's 64 MB"
    assert "--out" not in documented, "runs/ is in the directory itself"
