"""Tests of several ranks: ZeRO stages, replicas, tensor, sequence and pipeline parallelism."""
