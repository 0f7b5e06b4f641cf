"""Tests of swap files: commits, kills, power cuts, damage, drives."""
