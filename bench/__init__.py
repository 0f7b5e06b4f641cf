"""Benchmarks for a checkout: one script each, `python -m bench.<name>`, which prints one JSON object last.

Each states its bound, and compares what is measured in turns in the same run, as the median of the ratios: memory and
drives of shared machines vary twofold within minutes. `offload.bench` has the measurements, these scripts the
questions.
"""
