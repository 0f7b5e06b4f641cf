"""The pager of one of several ranks."""
