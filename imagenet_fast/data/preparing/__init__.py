"""``imagenet-fast data prepare``: from ImageNet as people have it to what loaders read.

A source is a list of classes, and a class lists files by where their bytes lie, whatever holds them (``located.py``).
``preparation.py`` writes them as folders; whoever writes another format starts from the same list.
"""
