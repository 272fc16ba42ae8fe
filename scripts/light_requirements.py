"""Print what imagenet-fast needs besides the packages NVIDIA's PyTorch image brings in builds of its own.

pip would take the image's torch, a pre-release by its version, for too old and pull a second one.
"""

import re
import tomllib
from pathlib import Path

IN_THE_IMAGE = {"torch", "torchvision", "nvidia-dali-cuda130"}

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"] + project["optional-dependencies"]["demo"]:
    if re.split(r"[<>=!~;\s]", requirement)[0] not in IN_THE_IMAGE:
        print(requirement)
