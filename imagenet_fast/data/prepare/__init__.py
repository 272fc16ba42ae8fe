"""``imagenet-fast data prepare``: from ImageNet as people have it to what loaders read.

A source is a list of classes, and a class lists files by where their bytes lie, whatever holds them (``located.py``).
The result is made of pieces (``workshop.py``), in threads (``crew.py``): a class's folder (``class_folders.py``) or a
shard (``sharding.py``). ``preparation.py`` leads from one to the other.
"""
