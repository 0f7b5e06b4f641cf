"""Benchmarks of the components, each against a bound or a peer measured in the same run: `offload bench …`.

A wrong setting is a `ConfigError` before a file is created; then the drive raises `IoError`, an engine `OffloadError`.
"""
