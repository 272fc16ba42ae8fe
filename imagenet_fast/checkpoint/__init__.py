"""Save and read checkpoints: a training's state on disk, whole or not there.

A checkpoint is a directory of a run, written once and never changed:

    checkpoints/step-00001234/
        shared.safetensors       what all ranks hold alike, written by rank 0
        rank-00003.safetensors   what only that rank holds, unless it is the same as rank 0's
        manifest.json            the sums of the files: if it disagrees with them, there is no checkpoint

A file holds a tree of dicts, lists, tensors and plain values (``tree.py``), which the training thread copies to host
memory. A background thread of each rank writes that copy (``writer.py``) into ``.step-00001234``, each file under
another name first, then synced and renamed. Each posts the sums of what it has written on a board in the store where
ranks met, so no collective is issued and no stream is touched. Rank 0 then writes the manifest, renames the directory
(``folder.py``), and posts the verdict. This package does not know what is trained.

torch.distributed.checkpoint would divide a tree over ranks and put it together for others. It is not used since it
keeps dense tensors only, without strides; what is no tensor is pickled, its files have no checksums, and writing them
in the background takes a process group of its own.
"""

from __future__ import annotations

from imagenet_fast.checkpoint.folder import Checkpoint, Stamp, newest, open_checkpoint
from imagenet_fast.checkpoint.writer import CheckpointWriter, NotSaved

__all__ = ["Checkpoint", "CheckpointWriter", "NotSaved", "Stamp", "newest", "open_checkpoint"]
