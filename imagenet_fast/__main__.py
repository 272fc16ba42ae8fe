from imagenet_fast.cli import entry

entry()
