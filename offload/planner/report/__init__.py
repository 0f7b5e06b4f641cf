"""What `offload plan` prints: text, tables and JSON of a plan."""
