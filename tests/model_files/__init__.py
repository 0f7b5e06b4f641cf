"""Tests of models that come from a folder and go into one."""
