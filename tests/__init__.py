"""The project's tests, in packages named as those they test."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as `imagenet-fast` has it: no pages of C++ stack frames
