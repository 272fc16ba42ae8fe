"""Read and decode every file of a data set before a training run fails on one: ``imagenet-fast data verify``."""
