"""Tests of the pager, its memory and its prefetch."""
