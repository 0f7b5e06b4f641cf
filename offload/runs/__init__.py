"""Runs that are stored on disk: inspection, verification, export.

Functions raise `StoreError` for a folder that is damaged, incomplete or of another kind, and for an output that cannot
be used or has no room, and `IoError` if something cannot be read or written.
"""
