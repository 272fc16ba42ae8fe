"""Whole checkpoints are found, read and kept; whatever happens to a file, never a wrong tree."""

from __future__ import annotations

import errno
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from imagenet_fast.checkpoint import newest, open_checkpoint
from imagenet_fast.checkpoint.folder import Manifest, read_manifest, retain, set_aside, survey
from imagenet_fast.errors import UserError
from tests.checkpoint.trees import found_step, is_that_of, names, same, saved, state
from tests.conftest import refusal_of
from tests.corruption import corrupted, with_another_value


def test_the_newest_is_found_and_says_of_what_it_is(tmp_path: Path):
    root = tmp_path / "a run [1] with ünusual * name" / "checkpoints"
    root.parent.mkdir()
    assert newest(root) is None
    saved(root, 20, 40, top1=71.25)
    found = newest(root)
    assert is_that_of(found, 40)
    assert names(found.folder) == ["manifest.json", "rank-00000.safetensors", "shared.safetensors"]
    assert found.folder == root / "step-00000040"
    assert (found.manifest.world, found.manifest.top1, found.manifest.number) == (1, 71.25, 2)
    assert found.part(1) is None
    assert same(dict(found.parts()), {0: state(40, rank=1)})


def test_the_newest_was_written_last_whatever_its_step_and_the_clock(tmp_path: Path):
    saved(tmp_path, 20, 40)
    saved(tmp_path, 30, 30)  # a run that went back, and saved twice at a step
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000030-2", "step-00000040"]
    assert found_step(tmp_path) == 30
    assert open_checkpoint(tmp_path / "step-00000030-2").manifest.number == 4


def test_the_newest_the_best_and_some_others_are_kept(tmp_path: Path):
    for number, (keep, top1s, left) in enumerate([
        (0, [None] * 4, [4]),
        (2, [None] * 4, [2, 3, 4]),
        (9, [None] * 4, [1, 2, 3, 4]),
        (0, [70.0, 72.0, 71.0, None], [2, 4]),
        (1, [70.0, 72.0, 71.0, None], [2, 3, 4]),
        (1, [72.0, 70.0, None, None], [1, 3, 4]),
        (0, [70.0, 71.0, 71.0, 70.0], [3, 4]),
        (1, [70.0, 71.0, 72.0, 73.0], [3, 4]),
        (0, [0.0, None, None, None], [1, 4]),
    ]):  # fmt: skip
        root = tmp_path / f"{number}"
        for step, top1 in enumerate(top1s, start=1):
            saved(root, step, keep=keep, top1=top1)
        assert names(root) == [f"step-{step:08}" for step in left]
        found = newest(root, best=True)
        assert (found.manifest.top1 if found else None) == max((x for x in top1s if x is not None), default=None)


def test_what_killed_ones_left_is_removed_and_what_is_not_ours_stays(tmp_path: Path):
    root = tmp_path / "checkpoints"
    saved(root, 1)
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, root / "notes", root / "step-analysis", root / ".step-00000005"):
        folder.mkdir()
    for file in (elsewhere / "thesis.txt", root / "step-by-step.txt", root / "final.safetensors"):
        file.touch()
    shutil.copytree(root / "step-00000001", root / "step-00000001-submitted")
    (root / "step-00000007").mkdir()
    (root / "step-00000007" / "rank-00000.safetensors").write_bytes(b"half of it is copied back by hand")
    (root / "step-00000000").symlink_to(elsewhere)
    saved(root, 2, keep=0)
    assert names(root) == [
        "final.safetensors", "notes", "step-00000000", "step-00000001-submitted", "step-00000002", "step-00000007",
        "step-analysis", "step-by-step.txt",
    ]  # fmt: skip
    assert names(elsewhere) == ["thesis.txt"]


def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path, 1, 2, 3, 4, top1=50.0)
    shared = tmp_path / "step-00000004" / "shared.safetensors"
    shared.write_bytes(shared.read_bytes()[:-1])
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    assert found_step(tmp_path) == 2
    size = shared.stat().st_size
    assert capsys.readouterr().err.splitlines() == [
        f"warning: checkpoint {shared.parent} is damaged: shared.safetensors has {size} bytes instead of {size + 1}; "
        "step-00000002 is taken instead",
        f"warning: checkpoint {tmp_path}/step-00000003 is damaged: rank-00000.safetensors cannot be read (No such file "
        "or directory); step-00000002 is taken instead",
    ]
    found = newest(tmp_path, best=True)
    assert found.manifest.step == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [("shared.safetensors", b""), ("manifest.json", b""), ("manifest.json", b"{"), ("manifest.json", None)],
)
def test_a_damaged_one_that_is_set_aside_displaces_none(file: str, content: bytes | None, tmp_path: Path, capsys):
    """Nor does the one that a run goes on from make room for it where the disk is full."""
    saved(tmp_path, 1, 2, top1=50.0)
    for again in ("", "-2"):
        path = tmp_path / "step-00000002" / file
        path.unlink() if content is None else path.write_bytes(content)
        found = newest(tmp_path)
        assert found.manifest.step == 1
        assert names(tmp_path)[-1] == "step-00000002", "whoever only reads renames none"
        assert capsys.readouterr().err.startswith(f"warning: checkpoint {path.parent} is damaged: {file} ")
        set_aside(found.damaged)
        retain(survey(tmp_path)[0], 0)
        assert found_step(tmp_path) == 1
        assert not capsys.readouterr().err
        assert f"damaged-step-00000002{again}" in names(tmp_path)
        saved(tmp_path, 2, top1=50.0)
    assert names(tmp_path)[2:] == ["step-00000001", "step-00000002"]


def test_where_all_are_damaged_that_is_said_rather_than_begun_anew(tmp_path: Path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    shared = tmp_path / "step-00000002" / "shared.safetensors"
    shared.write_bytes(b"x" * shared.stat().st_size)
    told = refusal_of(newest, tmp_path)
    for part in (
        f"no checkpoint in {tmp_path} can be read (step-00000001: manifest.json is no manifest that this version reads",
        "step-00000002: shared.safetensors has the CRC-32 ",
    ):
        assert part in told
    assert "remove" not in told, "what another version wrote is no worse for that"


def test_a_directory_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("file", "Not a directory"), ("loop", "Too many levels of symbolic links")):
        assert f"{tmp_path}/{name} cannot be read ({reason})" in refusal_of(newest, tmp_path / name)
    assert newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("file", ["manifest.json", "shared.safetensors"])
def test_storage_that_is_away_is_no_damage(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, 1, 2)
    opened, lost = Path.open, tmp_path / "step-00000002" / file

    def stale(path: Path, *how: Any, **also: Any) -> Any:
        if path == lost:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *how, **also)

    monkeypatch.setattr(Path, "open", stale)
    told = f"{lost} cannot be read (Stale file handle); put that right, or give another checkpoint"
    assert refusal_of(newest, tmp_path) == told


def test_what_is_no_manifest_is_said_to_be_none(tmp_path: Path):
    gone = "is damaged: manifest.json cannot be read (No such file or directory); give another checkpoint"
    assert gone in refusal_of(open_checkpoint, tmp_path)
    for text in ("", "[" * 100_000, '{\n  "format": 2,\n  "crc32": "0a"\n}\n', "\0" * 500):
        (tmp_path / "manifest.json").write_text(text)
        told = refusal_of(open_checkpoint, tmp_path)
        assert "is no manifest that this version reads (" in told
        assert ("(step: Field required)" in told) == ("format" in text)


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path):
    saved(tmp_path, 1)
    sound = read_manifest(tmp_path / "step-00000001")
    for name in ("../secret.safetensors", "/etc/passwd", "", ".", "a.safetensors\n"):
        forged = Manifest.model_construct(**{**dict(sound), "files": {name: sound.files["shared.safetensors"]}})
        forged.write(tmp_path / "step-00000001")
        assert "should match pattern" in refusal_of(open_checkpoint, tmp_path / "step-00000001")


def test_nothing_that_happens_to_a_checkpoint_gives_a_traceback_or_a_wrong_tree(tmp_path: Path, capsys):
    saved(tmp_path / "sound", 2, 3)
    fell_back: dict[bool, list[bool]] = {True: [], False: []}  # of files whose bytes are others, of wrecks
    for seed in range(120):
        chance = random.Random(seed)
        root = Path(shutil.copytree(tmp_path / "sound", tmp_path / f"{seed}"))
        last = root / "step-00000003"
        of_bytes = wreck(last, root / "step-00000002", chance)
        fell_back[of_bytes].append(False)
        with suppress(UserError):  # where files of both were exchanged none is whole
            fell_back[of_bytes][-1] = found_step(root) == 2
            if seed % 20 == 0:
                saved(root, 4)  # the run goes on
                assert found_step(root) == 4, seed
        for name, rank in (("shared", 0), ("part", 1)):  # by name there is no fall-back, and one may be whole alone
            with suppress(UserError):
                asked = open_checkpoint(last)
                tree = asked.shared if name == "shared" else asked.part(0)
                assert same(tree, state(asked.manifest.step, rank)), seed
        shutil.rmtree(root)
    assert sum(fell_back[True]) >= 0.95 * len(fell_back[True])  # all but changed blanks of a manifest
    assert sum(fell_back[False]) >= 0.8 * len(fell_back[False])
    assert all(line.startswith("warning: checkpoint ") for line in capsys.readouterr().err.splitlines())


def exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def wreck(last: Path, before: Path, chance: random.Random) -> bool:
    """The checkpoint ``last``, which has another one beside it; whether a file of it now has other bytes."""
    victim = chance.choice(sorted(last.iterdir()))
    manifest = last / "manifest.json"
    match chance.randrange(16):
        case 0:
            victim.unlink()
        case 1:
            victim.write_bytes(b"")
        case 2:
            exchange(victim, before / victim.name)
        case 3:
            exchange(last / "shared.safetensors", last / "rank-00000.safetensors")
        case 4:
            victim.unlink()
            to = chance.choice([before / victim.name, last, Path("nowhere"), Path(victim.name)])
            victim.symlink_to(to)
        case 5:
            victim.unlink()
            victim.mkdir()
        case 6:
            manifest.write_bytes(with_another_value(manifest.read_bytes(), chance))
        case 7:
            key = chance.choice(["step", "number", "world", "files"])
            more = f'"{key}": {chance.choice(["3", "{}", "[]"])},'
            text = manifest.read_text()
            manifest.write_text(text.replace("{", "{" + more, 1) if chance.random() < 0.5 else text[:-2] + more + "}")
        case _:
            victim.write_bytes(corrupted(victim.read_bytes(), chance))
            return True
    return False
