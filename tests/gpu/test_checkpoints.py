"""What lies on a GPU is saved as it was when it was asked for. Run with `pytest tests/gpu` where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from imagenet_fast.checkpoint import CheckpointWriter, open_checkpoint
from imagenet_fast.checkpoint.tree import HostCopy
from tests.checkpoint.trees import ALONE, hostile, same, stamp

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def moved(tree: Any, device: torch.device) -> Any:
    match tree:
        case torch.Tensor():
            return tree.detach().resolve_conj().to(device)
        case dict():
            return {key: moved(value, device) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(moved(value, device) for value in tree)
        case _:
            return tree


def test_whatever_lies_on_a_gpu_comes_back_there_or_on_the_cpu(tmp_path: Path):
    tree = hostile()
    del tree["tied"]  # views, of which `moved` makes tensors of their own
    on_gpu = {"gpu": moved(tree, GPU), "cpu": moved(tree, CPU)}
    with CheckpointWriter(tmp_path, ALONE) as writer:
        writer.save(stamp(1), on_gpu, on_gpu)
        folder = writer.wait()
    assert same(open_checkpoint(folder).part(0, GPU), on_gpu)
    assert same(open_checkpoint(folder).shared, moved(on_gpu, CPU))


def test_saving_does_not_wait_for_the_stream(tmp_path: Path):
    weights = torch.zeros(1 << 26, device=GPU)
    with CheckpointWriter(tmp_path, ALONE, keep=9) as writer:
        for step in range(1, 4):
            torch.cuda._sleep(200_000_000)
            weights += 1
            writer.save(stamp(step), {"weights": weights})
            assert step > 1 or not torch.cuda.current_stream().query()
            weights.zero_().add_(step)
    for step in range(1, 4):
        (found,) = open_checkpoint(tmp_path / f"step-0000000{step}").shared.values()
        assert found.device == CPU
        assert (found == step).all()


def test_the_copy_lies_in_pinned_memory_which_is_kept():
    copy = HostCopy()
    copy.take({"weights": torch.ones(1000, device=GPU)})
    memory = copy._memory
    assert memory.is_pinned()
    copy.take({"weights": torch.ones(10, device=GPU), "step": torch.ones(())})
    assert copy._memory is memory
