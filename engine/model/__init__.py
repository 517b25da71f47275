"""The model: loading, verification, and attention over paged memory."""
