"""Save and read checkpoints: a training's state on disk, whole or not there.

A checkpoint is a directory of a run, written once and never changed:

    checkpoints/step-00001234/
        shared.safetensors       what all ranks hold alike, written by rank 0
        rank-00003.safetensors   what only that rank holds
        manifest.json            written last: if it is missing or disagrees with the files, there is no checkpoint

A file holds a tree of dicts, lists, tensors and plain values (`serialization.py`). The training thread copies it to
host memory (`staging.py`). A background thread writes that copy (`async_writer.py`), each file under another name
first, then synced and renamed (`manifest.write_durably`). The ranks exchange messages through the store they met at,
so no collective is issued and no stream is touched (`store_coordination.py`). This package does not know what is
trained.

torch.distributed.checkpoint would divide a tree over ranks and put it together for others. It is not used for these
reasons. Its metadata is a pickle, it writes what is no tensor with ``torch.save`` and reads it with
``weights_only=False``. Its planners use collectives that pickle. Its files have no checksums.
"""

from __future__ import annotations

from imagenet_fast.checkpoint.async_writer import CheckpointWriter
from imagenet_fast.checkpoint.manifest import NotSaved, Stamp
from imagenet_fast.checkpoint.reader import Checkpoint, chosen_checkpoint, newest, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "NotSaved",
    "Stamp",
    "chosen_checkpoint",
    "newest",
    "open_checkpoint",
]
