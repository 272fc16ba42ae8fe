"""What users and their tools read of the project beside the code."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import yaml

import imagenet_fast

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = re.findall(r"^## \[(.+?)\](?: - (\S+))?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == citation["version"] == imagenet_fast.__version__
    assert versions[0] == ("Unreleased", "")
    assert (citation["version"], str(citation["date-released"])) in versions
    assert citation["license"] == PROJECT["license"]


def test_the_command_is_there_and_the_types_are_marked():
    assert callable(EntryPoint("imagenet-fast", PROJECT["scripts"]["imagenet-fast"], "console_scripts").load())
    assert (ROOT / "imagenet_fast" / "py.typed").is_file()
