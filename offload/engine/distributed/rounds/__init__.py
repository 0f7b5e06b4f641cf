"""What ranks announce to each other, and what is decided from it."""
