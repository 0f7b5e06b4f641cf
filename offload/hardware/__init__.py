"""This machine: description, and a probe of its rates.

Functions raise `ConfigError` for a wrong setting, and `IoError` if a file cannot be written or read.
"""
