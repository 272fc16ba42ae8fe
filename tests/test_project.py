"""What surrounds the code: workflows, templates, tested versions, citation, changelog."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def constraints() -> dict[str, Requirement]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def requirements() -> list[Requirement]:
    extras = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    found = map(Requirement, PROJECT["dependencies"] + extras)
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_scripts_that_exist(workflow: Path):
    steps = [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]
    called = [path for step in steps for path in re.findall(r"(?:scripts|\.ci)/[\w.-]+", step.get("run", ""))]
    assert called
    for path in called:
        assert os.access(ROOT / path, os.X_OK), path


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_may_only_read_and_has_time_limits(workflow: Path):
    content = loaded(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in content["jobs"].values())


def test_workflows_lint_test_document_and_package():
    assert set(loaded(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]) == {"lint", "suite", "docs", "wheel"}


def test_issue_forms_have_a_name_and_distinct_fields():
    forms = {form.stem: loaded(form) for form in FORMS if form.stem != "config"}
    assert set(forms) == {"bug", "feature", "results"}
    for form in forms.values():
        assert form["name"]
        assert form["description"]
        names = [field["id"] for field in form["body"]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_tested_version_is_in_the_range_of_pyproject(requirement: Requirement):
    tested = constraints()[canonicalize_name(requirement.name)]
    (version,) = tested.specifier
    assert version.operator == "=="
    assert requirement.specifier.contains(version.version, prereleases=True)


def test_pre_commit_has_the_tested_ruff():
    hooks = {repo["repo"].rpartition("/")[2]: repo for repo in loaded(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert "==" + hooks["ruff-pre-commit"]["rev"].removeprefix("v") == str(constraints()["ruff"].specifier)
    assert set(hooks) == {"pre-commit-hooks", "ruff-pre-commit", "local"}


def test_environment_is_made_again_when_tested_versions_change():
    script = (ROOT / "scripts" / "environment.sh").read_text()
    assert "--constraint constraints.txt" in script
    assert re.search(r"stamp=.*pyproject\.toml constraints\.txt \| cksum", script)


def test_citation_names_the_version_and_the_licence():
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert f"## [{citation['version']}] - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def test_changelog_has_the_usual_sections():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert PROJECT["version"] in versions
    sections = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
