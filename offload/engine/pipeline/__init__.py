"""Pipeline parallelism: the stages of one process, which a schedule of `torch.distributed.pipelining` runs."""
