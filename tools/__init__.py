"""Programs that made what the repository ships; in no wheel."""
