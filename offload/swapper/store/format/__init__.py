"""Bytes of the swap files: commit record, manifest, checksums, blob."""
