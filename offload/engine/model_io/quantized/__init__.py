"""Folders whose weights another library has quantized."""
