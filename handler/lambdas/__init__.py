"""Lambda handlers: each parses its event, makes one call and returns."""
