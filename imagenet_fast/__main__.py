"""Run ``python -m imagenet_fast`` as the command ``imagenet-fast``."""

from imagenet_fast.cli.main import entry

entry()
