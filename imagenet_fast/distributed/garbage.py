"""Python's garbage collector, kept out of the steps."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Never again search what is alive now for garbage.

    torch and a model are some half a million objects, and a search through all of them takes 0.1 to 0.4 s. Each rank
    comes to it in another step, in which all others wait. What steps leave behind is still searched, in little time.
    """
    gc.collect()
    gc.freeze()
