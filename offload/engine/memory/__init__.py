"""What an engine takes of host and device: reports of it, and its return while others need it."""
