"""Keeps what is imported out of collections, in this process and in those forked from it: preloaded as the last module.

Else each child looks through the objects of torch and transformers in its collections, and copies their pages.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
