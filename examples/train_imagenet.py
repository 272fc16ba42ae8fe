"""Train ResNet-50 on ImageNet with the parts of imagenet-fast: a recipe in code.

Start it with torchrun, one process per GPU, on any number of nodes:

    torchrun --nproc-per-node 8 examples/train_imagenet.py --data /data/imagenet
    torchrun --nproc-per-node 2 examples/train_imagenet.py --synthetic 512 --model resnet18 --size 64 --batch 16

The defaults are those of `recipes/resnet50-8gpu.toml` on 8 GPUs, but for the engine: `hybrid` here, `lazy` there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchvision import models

from imagenet_fast.data.build import build_loaders
from imagenet_fast.distributed.init import current_world
from imagenet_fast.distributed.reductions import average_batch_norms, broadcast_model
from imagenet_fast.recipe.batching import Batching
from imagenet_fast.recipe.data_config import ImageData, SyntheticData
from imagenet_fast.recipe.optim_config import Polynomial
from imagenet_fast.sync import DearSync, GradientPool, HybridSync, LazySync, RingSync
from imagenet_fast.training.evaluation import evaluate
from imagenet_fast.training.lr_schedule import learning_rate
from imagenet_fast.training.optimizers import LARS, param_groups

ENGINES = {"lazy": LazySync, "ring": RingSync, "hybrid": HybridSync, "dear": DearSync}


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    images = parser.add_mutually_exclusive_group(required=True)
    images.add_argument("--data", type=Path, help="directory with train/ and val/, or shards")
    images.add_argument("--synthetic", type=int, metavar="N", help="train on N random images instead")
    parser.add_argument("--loader", choices=("dali", "threads"), default="dali")
    parser.add_argument("--model", choices=("resnet18", "resnet50"), default="resnet50")
    parser.add_argument("--engine", choices=ENGINES, default="hybrid")
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=400, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=37)
    parser.add_argument("--warmup", type=float, default=2.0, help="epochs of linear warm-up")
    parser.add_argument("--lr", type=float, default=11.0, help="peak learning rate, for the batch of all ranks")
    parser.add_argument("--out", type=Path, default=Path("resnet.pt"), help="file for the final weights")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate after every epoch, and save the weights."""
    asked = options()
    world = current_world()  # torchrun's ranks, or this process alone
    dtype = torch.bfloat16 if world.bf16 else torch.float32  # some CPUs have no instructions for bf16
    torch.manual_seed(0)

    data: ImageData | SyntheticData
    if asked.synthetic:
        data = SyntheticData(
            loader="synthetic", image_size=asked.size, train_images=asked.synthetic, val_images=64, classes=10
        )
    else:
        data = ImageData(
            dataset="imagenet", loader=asked.loader, image_size=asked.size, resize=asked.size * 8 // 7,
            crop_area=(0.05, 1.0),
        )  # fmt: skip
    batching = Batching(world.size, asked.batch, accumulation=1)
    loaders = build_loaders(data, asked.data, batching, world.rank, world.cores, world.device, seed=0, dtype=dtype)
    steps_per_epoch = loaders.train_order.steps_per_epoch
    schedule = Polynomial(kind="polynomial", warmup_epochs=asked.warmup, power=2, end_lr=1e-4)

    model = models.get_model(asked.model, num_classes=loaders.classes)
    model = model.to(world.device, memory_format=torch.channels_last)
    broadcast_model(model)
    pool = GradientPool(model, ENGINES[asked.engine](wire="bf16"))  # last: it holds the model's gradients as it is now
    optimizer = LARS(param_groups(model), asked.lr, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.001)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    cast = torch.autocast(world.device.type, dtype, enabled=world.bf16)

    begun = time.perf_counter()
    for step in range(asked.epochs * steps_per_epoch):
        images, labels = next(loaders.train)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, asked.lr, step, steps_per_epoch, asked.epochs)
        pool.zero_grad()
        with cast:
            loss = criterion(model(images), labels)
        loss.backward()  # gradients are sent while backward runs
        pool.step(optimizer)  # hybrid and dear update each layer just before the next forward reads it

        if (step + 1) % steps_per_epoch == 0:
            pool.settle()  # carry out what was deferred
            average_batch_norms(model)
            accuracy = evaluate(model, loaders, cast, world)
            if world.is_main:
                epoch, seconds = (step + 1) // steps_per_epoch, time.perf_counter() - begun
                print(f"epoch {epoch}: loss {loss:.3f}, top-1 {accuracy.top1:.2f} %, {seconds:.0f} s", flush=True)
    if world.is_main:
        torch.save(model.state_dict(), asked.out)
    pool.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
