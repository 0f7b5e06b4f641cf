"""The processes that train together: process group, agreement, and joint success or failure."""
