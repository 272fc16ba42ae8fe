"""Prepare ImageNet, as it is downloaded, for the loaders: ``imagenet-fast data prepare``.

A source is a list of classes. A class lists files by where their bytes lie, in an archive or not (``source_files.py``).
The result is made of pieces (``staging_dir.py``), in threads (``worker_pool.py``). A piece is a class's folder or a
shard (``output_layout.py``; ``data/formats/shard_writer.py`` writes shards). ``prepare.py`` runs all steps.
"""
