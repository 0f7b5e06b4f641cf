"""Tests of Ctrl-C, exceptions, errors of threads, and the ends of engines."""
