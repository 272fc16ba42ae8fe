"""Prepare ImageNet, as it is downloaded, for the loaders: ``imagenet-fast data prepare``.

A source (``sources.py``) is a list of classes, and a class lists files by where their bytes lie, in an archive or not
(``files.py``). The images are divided into pieces, a class's folder or a shard each (``write.py``), which are made in
threads (``run.py``) in the directory to fill (``output.py``).
"""
