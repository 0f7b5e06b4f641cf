"""Models from folders and into folders."""
