"""Accelerators that there are not: a CPU whose copies are late, and its memory."""
