"""Tests of ranks on several hosts: `offload launch`, torchrun, Slurm, Kubernetes."""
