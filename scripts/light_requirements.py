"""Print the requirements of imagenet-fast except packages that NVIDIA's PyTorch image has builds of its own of.

By its version the image's torch is a pre-release, so pip would consider it too old and install a second one.
"""

import re
import tomllib
from pathlib import Path

IN_THE_IMAGE = {"torch", "torchvision", "nvidia-dali-cuda130"}

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"] + project["optional-dependencies"]["demo"]:
    if re.split(r"[<>=!~;\s]", requirement)[0] not in IN_THE_IMAGE:
        print(requirement)
