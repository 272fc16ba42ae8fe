"""``imagenet-fast data verify``: every file of a data set read and decoded, before a training run stumbles over one."""
