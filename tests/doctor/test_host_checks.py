"""A node looked at by itself."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagenet_fast.data.throughput import make_photos
from imagenet_fast.doctor import host_checks
from imagenet_fast.doctor.report import CheckResult
from imagenet_fast.models.compiler import check_compiler
from imagenet_fast.plan.devices import device_of
from tests.data.small import put

pytestmark = pytest.mark.usefixtures("subprocesses")


def examined(name: str, out: Path, data: Path | None = None, ranks: int = 1) -> CheckResult:
    (found,) = [finding for finding in host_checks.examine(data, out, ranks) if finding.about == name]
    return found


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str, available: bool = False, cuda: str | None = "13.0") -> None:
    """What torch sees; a card without a name does not answer."""

    def properties(number: int) -> SimpleNamespace:
        if not names[number]:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")
        return SimpleNamespace(name=names[number], total_memory=80 * 2**30)

    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.version.cuda", cuda)


def test_this_one_can_train_and_nothing_fails(tmp_path: Path):
    findings = host_checks.examine(None, tmp_path / "runs", 1)
    assert not [finding for finding in findings if finding.state == "fail"]
    assert {"python", "torch", "DALI", "compiler", "cores", "memory", "open files", "runs"} <= {
        finding.about for finding in findings
    }
    assert all(bool(finding.fix) == (finding.state != "ok") for finding in findings)


def test_untrainable_data_fails_with_trains_sentence(tmp_path: Path):
    data = tmp_path / "strange [name]"
    (data / "train" / "a").mkdir(parents=True)
    found = examined("data", tmp_path, data)
    assert found.state == "fail"
    assert "has no folder val" in found.said


@pytest.mark.ci
def test_images_are_timed_beside_the_gpu_that_trains_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_photos(tmp_path, 4)
    monkeypatch.setattr(host_checks, "_SECONDS", 0.0)
    found = examined("images", tmp_path, tmp_path)
    assert found.state == "ok"
    assert re.fullmatch(r"a rank is given [\d,]+ images/s of 224 pixels by \d+ threads?", found.said)
    assert device_of("NVIDIA H200 NVL").name == "h200"
    assert device_of("Voodoo 2") is None


def test_a_place_for_runs_need_not_exist_yet_and_more_ranks_than_cores_are_doubtful(tmp_path: Path):
    assert str(tmp_path) in examined("runs", tmp_path / "not" / "yet").said
    assert examined("cores", tmp_path, ranks=10_000).state == "warn"


def test_gpus_fail_unless_there_are_none_or_all_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "none").mkdir()
    put(tmp_path / "driver" / "dev", "nvidiactl", content=b"")
    put(tmp_path / "driver" / "sys/module/nvidia", "version", content=b"580.1\n")
    for cards, available, cuda, place, found, said in (
        ([], False, None, "none", {"GPU": "ok"}, "none; ranks train on the CPU"),
        ([], False, None, "driver", {"GPU": "fail"}, "there is one (driver 580.1), but this torch is a CPU build"),
        ([], False, "13.0", "driver", {"GPU": "fail"}, "driver 580.1 does not serve this torch's CUDA 13.0"),
        (["H100"] * 8, False, "13.0", "none", {"GPU": "fail"}, "the driver counts 8 GPUs, but driver unknown does not"),
        (["", "H100"], True, "13.0", "driver", {"GPU 0": "fail", "GPU 1": "ok"}, "unspecified launch failure"),
    ):
        gpus(monkeypatch, *cards, available=available, cuda=cuda)
        findings = list(host_checks._graphics(tmp_path / place))
        assert {finding.about: finding.state for finding in findings} == found
        assert said in findings[0].said
    gpus(monkeypatch)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        (hiding,) = host_checks._graphics(tmp_path / "driver")
        assert (hiding.state, hiding.said) == ("ok", "hidden by CUDA_VISIBLE_DEVICES; ranks train on the CPU")


def test_what_torchs_compiler_lacks_is_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examined("compiler", tmp_path)
    assert found.state == "warn"
    assert found.said.startswith("compile true needs a compiler, and there is no ")
    assert found.fix == "install one, or set compile to false"


def test_a_class_without_an_image_in_val_is_doubtful(tmp_path: Path):
    for place in ("train/a", "train/b", "train/c", "val/a"):
        put(tmp_path / place, "x.png")
    found = examined("data", tmp_path, tmp_path)
    assert (found.state, bool(found.fix)) == ("warn", True)
    assert "val has no images of 2 of the 3 classes, the first 'b'" in found.said


def test_a_place_for_runs_that_cannot_be_one_fails(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link", tmp_path / ("x" * 300)):
        found = examined("runs", out)
        assert found.state == "fail", found
        assert found.fix.endswith("give another --out"), found
    assert examined("runs", Path("/proc/runs")).state == "fail"  # root may write there, and cannot
