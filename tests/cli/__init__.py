"""Tests of commands: their options, output, exit codes and signals."""
