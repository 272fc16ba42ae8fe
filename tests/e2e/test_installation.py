"""What is installed works: the command, its help, and the Dockerfile's install step."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.command import imagenet_fast

ROOT = Path(__file__).parents[2]


def test_help_needs_neither_torch_nor_pydantic():
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "imagenet_fast", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()}
    assert "imagenet_fast.cli" in modules
    assert not modules & {"torch", "pydantic", "numpy", "rich.live"}
    for command in ("train", "recipes", "report", "bench", "data"):
        assert command in imported.stdout


def test_recipes_are_listed_and_shown():
    table = imagenet_fast("recipes", COLUMNS="80").stdout
    assert re.search(r"alexnet-512gpu +alexnet_bn +lars +lazy +512 +65536 +95 +58.7 %", table)
    assert imagenet_fast("recipes", "show", "demo").stdout == (ROOT / "recipes" / "demo.toml").read_text()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without torch, put up by the Dockerfile's own RUN line."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder / "env", with_pip=True)
    steps = re.search(r"^RUN (python scripts/light.*?[^\\])$", (ROOT / "Dockerfile").read_text(), re.M | re.S)
    assert steps is not None
    command = steps.group(1).replace("\\\n", " ").replace("/tmp/light.txt", str(folder / "light.txt"))
    done = subprocess.run(
        ["bash", "-euc", command], cwd=ROOT, text=True, capture_output=True, check=False,
        env={"PATH": f"{folder / 'env' / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "PIP_COMPILE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "env"


def test_the_dockerfiles_install_step_pulls_no_torch_and_gives_a_working_command(image: Path):
    installed = subprocess.run([image / "bin" / "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^(torch|torchvision|nvidia-\S+) ", installed, re.M)
    command = str(image / "bin" / "imagenet-fast")
    listed = subprocess.run([command, "recipes"], capture_output=True, text=True, check=True, cwd="/").stdout
    assert "resnet50-512gpu" in listed
    wrong = subprocess.run([command, "train", "--recipe", "x"], capture_output=True, text=True, check=False, cwd="/")
    assert (wrong.returncode, wrong.stderr[:6]) == (2, "error:")


def test_beside_the_images_torch_it_trains(image: Path, tmp_path: Path):
    """As in the image, torch comes from elsewhere: here from the environment that runs the tests."""
    (site,) = image.glob("lib/python*/site-packages")
    (site / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [image / "bin" / "imagenet-fast", "train", "--recipe", "smoke", "--set", "data.train_images=32"]
    done = subprocess.run(
        [*command, "--nproc", "1", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_keeps_its_promises():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM \S*nvidia/pytorch:", text, re.M)
    assert re.search(r"^USER (?!root)", text, re.M)
    assert 'ENTRYPOINT ["imagenet-fast"]' in text
