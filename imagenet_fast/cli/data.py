"""The commands that get, prepare and check data sets: `imagenet-fast data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from imagenet_fast.cli import options as opt
from imagenet_fast.cli.app import App
from imagenet_fast.errors import UserError
from imagenet_fast.units import parse_size

data_app = App(help="Get data sets, prepare and check them.", no_args_is_help=True)


def _shard_bytes(text: str) -> int:
    """Return the bytes of a size like 150MB; raise UserError if it is none."""
    if (size := parse_size(text)) is None:
        raise UserError(f"--shard-size {text} is no size above 0; write for example 150MB")
    return size


@data_app.command("fetch")
def fetch(
    dataset: Annotated[Literal["cifar10", "digits"], typer.Argument()],
    archive: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    out: opt.Directory[Path | None] = None,
) -> None:
    """Download or make a small data set, and put it where the recipes look for it.

    Args:
        dataset: Data set to get.
        archive: Take CIFAR-10 from this file instead of downloading: cifar-10-python.tar.gz.
        out: Directory to write to. Default: the cache directory.
    """
    from imagenet_fast.data.download import fetch_dataset

    print(f"{dataset} is in {fetch_dataset(dataset, out, archive)}")


@data_app.command("prepare")
def prepare(
    source: opt.Directory[Path],
    out: opt.Directory[Path],
    kind: Annotated[Literal["folder", "webdataset", "pixels"], typer.Option("--format")] = "folder",
    shard_size: Annotated[int | None, typer.Option(metavar="SIZE", parser=_shard_bytes)] = None,
    resize: Annotated[int | None, typer.Option(metavar="PIXELS", min=32)] = None,
    quality: Annotated[int | None, typer.Option(min=1, max=100)] = None,
    subset: bool = False,
    no_md5: bool = False,
    workers: opt.Count[int | None] = None,
) -> None:
    """Convert the downloaded ImageNet to what `train --data` reads.

    The tars are read directly; no space is needed to unpack them. Labels are
    the positions of the sorted class names (wnids), as in torchvision. train/
    and val/ appear in --out only when they are complete. If the command is
    stopped or killed, run it again to continue. Shards hold the training images
    in shuffled order.

    Args:
        source: What you downloaded: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz;
            or Kaggle's ILSVRC/ and LOC_val_solution.csv; or train/<class>/* and val/<class>/*; or Hugging Face's
            data/*.parquet.
        out: Directory to write train/<class>/* and val/<class>/* to, or shards.
        kind: Form of the output: image files, shards of them, or shards of decoded images. With --resize 256, pixels
            take some 330 GB, and are loaded several times as fast.
        shard_size: Size of each shard; 1MB is 1024 x 1024 bytes. Default: 150MB, of pixels 1GB.
        resize: Shrink images so that the short side has at most this length; 256 is usual. They take less space and
            are decoded faster; accuracy may be lower, since details are lost. 256 is too small for training at more
            than 224 pixels.
        quality: With --resize: quality of the JPEG files. Default: 95.
        subset: Accept fewer images or classes than all of ImageNet. No md5 is checked.
        no_md5: Accept tars that differ from those of image-net.org.
        workers: Number of classes or shards to work on at a time. Default: one per core.
    """
    from imagenet_fast.data.prepare.run import prepare as fill
    from imagenet_fast.data.prepare.run import report
    from imagenet_fast.data.prepare.write import SHRUNK_QUALITY, Settings

    if shard_size is not None and kind == "folder":
        raise UserError("--shard-size is of shards; give --format webdataset too, or leave it out")
    if quality is not None and (resize is None or kind == "pixels"):
        raise UserError("--quality is of the JPEG files that --resize makes; leave it out")
    settings = Settings(
        format=kind,
        resize=resize,
        quality=None if resize is None or kind == "pixels" else quality or SHRUNK_QUALITY,
        shard_size=None if kind == "folder" else shard_size or (2**30 if kind == "pixels" else 150 * 2**20),
    )
    prepared = fill(source, out, settings, subset=subset, md5=not no_md5, workers=workers)
    for line in report(prepared, out):
        print(line)


@data_app.command("verify")
def verify(
    data: opt.Directory[Path],
    json_file: opt.Json = None,
    workers: opt.Count[int | None] = None,
) -> None:
    """Check a data set: decode every image, in folders or shards.

    Files that no loader can read are listed in DIR/quarantine.json, and `train`
    and `eval` leave them out from then on: empty, truncated and damaged files,
    files that are not images, and images of other kinds.
    Duplicates are reported, but kept.

    Args:
        workers: Number of files to decode at a time. Default: one per core.
    """
    from imagenet_fast.data.folders import shown
    from imagenet_fast.data.verify import summary
    from imagenet_fast.data.verify import verify as examine_all

    found = examine_all(data, workers, must_list=json_file is None)
    for line in summary(found, data):
        print(shown(line))
    if json_file is not None:
        from imagenet_fast.metrics.tables import write_json

        write_json(found, json_file)
        print(f"written to {json_file}")
