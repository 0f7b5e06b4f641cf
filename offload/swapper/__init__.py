"""Weights between DISK, HOST and DEVICE, within two budgets."""
