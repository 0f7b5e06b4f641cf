"""Tables of a vocabulary in pieces of rows: lookups, products and losses that need one piece on the device at once."""
