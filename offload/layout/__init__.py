"""Pure decisions about bytes: units, segments, tiers, placement."""
