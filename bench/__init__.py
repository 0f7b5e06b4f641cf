"""Benchmarks: one file each, `python -m bench.<name>`. Each states its bound and prints one JSON object last, but for
`bench.gpu`, which is `offload bench gpu`: it writes a file and prints a table.

Memory and drives of shared machines vary twofold within minutes, so what is compared is measured in turns and
reported as the median of the ratios.
"""
