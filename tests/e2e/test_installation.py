"""The Dockerfile: its install step, and the command that it installs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import torch
from dockerfile_parse import DockerfileParser

from tests.e2e.command import outcome_of
from tests.pages import ROOT
from tests.root import as_user

DOCKERFILE = DockerfileParser(path=str(ROOT / "Dockerfile"))
PATH = {"PATH": "/usr/bin:/bin"}


def instructions(name: str) -> list[str]:
    """The values of each instruction of that name in the Dockerfile."""
    return [step["value"] for step in DOCKERFILE.structure if step["instruction"] == name]


def test_the_image_runs_the_command_as_somebody_who_needs_no_name():
    order = [step["instruction"] for step in DOCKERFILE.structure]
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", DOCKERFILE.baseimage)
    assert [json.loads(value) for value in instructions("ENTRYPOINT")] == [["imagenet-fast"]]
    assert not {"RUN", "COPY", "ADD"} & set(order[order.index("USER") :]), "finished while it is root"
    (user,) = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "numbers, which need no entry in the image's passwd"


def test_the_documented_docker_command_shares_what_the_image_needs():
    shown = re.search(r"docker run(?:.*\\\n)*.*", "\n".join(instructions("COMMENT")))
    documented = shlex.split(shown[0].replace("\\\n", ""))
    assert documented[documented.index("--user") + 1] == "$(id -u):$(id -g)"
    assert f"$PWD:{instructions('WORKDIR')[-1]}" in documented
    assert "--ipc=host" in documented, "loaders and NCCL need more shared memory than docker's 64 MB"
    assert "--out" not in documented, "runs/ is in the directory itself"


def inside(folder: Path, text: str) -> str:
    return re.sub(r"(?<!\S)/(?=(home|tmp|here)\b)", f"{folder}/", text)


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
    variables = {
        "PATH": f"{folder / 'env' / 'bin'}:{PATH['PATH']}", "HOME": str(folder), "PIP_COMPILE": "0",
        "PIP_CONSTRAINT": str(folder / "constraint.txt"), "PIP_CACHE_DIR": str(Path("~/.cache/pip").expanduser()),
    }  # fmt: skip
    for step in instructions("RUN"):
        done = ended(["bash", "-euc", inside(folder, step)], cwd=ROOT, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def ended(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, "env": PATH, **options})


@pytest.mark.weekly
def test_the_install_step_brings_the_command_and_the_licence_but_no_torch(image: Path):
    command = image / "env" / "bin" / "imagenet-fast"
    installed = ended([image / "env" / "bin" / "pip", "list"]).stdout
    assert "imagenet-fast" in installed
    assert not re.search(r"^(torch|torchvision|nvidia-\S+) ", installed, re.M)
    assert "resnet50-512gpu" in ended([command, "recipes"], cwd="/").stdout
    wrong = ended([command, "train", "--recipe", "x"], cwd="/")
    assert (wrong.returncode, wrong.stderr[:6]) == (2, "error:")
    (about,) = image.glob("env/lib/python*/site-packages/imagenet_fast-*.dist-info")
    metadata = Parser().parsestr((about / "METADATA").read_text())
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("MIT", ["LICENSE"])
    assert (about / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


@pytest.mark.weekly
def test_a_program_that_imports_it_is_checked_against_its_types(image: Path, tmp_path: Path):
    (tmp_path / "program.py").write_text(
        "from imagenet_fast.recipe.load import load_recipe as load\nreveal_type(load('demo').global_batch)\nload(1)\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    checked = ended([*mypy, "--python-executable", image / "env" / "bin" / "python", "program.py"], cwd=tmp_path).stdout
    assert 'program.py:2: note: Revealed type is "int"' in checked.replace("builtins.", ""), checked
    assert 'program.py:3: error: Argument 1 to "load_recipe"' in checked
    assert "Found 1 error in 1 file" in checked


@pytest.mark.weekly
def test_unknown_user_trains_in_the_image(image: Path, tmp_path: Path):
    """Beside a torch from elsewhere, as in the image. Who may not become somebody else tries it as who they are."""
    (site,) = image.glob("env/lib/python*/site-packages")
    (site / "image.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    somebody = 12345 if os.geteuid() == 0 else os.geteuid()
    become = as_user(somebody) if os.geteuid() == 0 else []
    os.chown(tmp_path, somebody, -1)
    variables = {name: inside(image, value) for name, value in DOCKERFILE.envs.items()}
    short = ("train", "--recipe", "smoke", "--set", "data.train_images=32", "--nproc", "1")
    for arguments in (("data", "fetch", "digits"), short):
        command = [*become, image / "env" / "bin" / "imagenet-fast", *arguments]
        done = ended(command, cwd=tmp_path, env=PATH | {"OMP_NUM_THREADS": "1"} | variables)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome_of(run)["status"] == "finished"
    home = Path(variables["HOME"])
    assert (home / ".cache" / "imagenet-fast" / "digits" / "val").is_dir()
    assert {path.stat().st_uid for folder in (tmp_path, home) for path in folder.rglob("*")} == {somebody}
