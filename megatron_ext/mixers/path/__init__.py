"""PaTH attention, with or without a forget gate (PaTH-FoX)."""
