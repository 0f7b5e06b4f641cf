"""The pager, the update worker and the machine, simulated."""
