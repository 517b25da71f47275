"""Models that read images: their image settings, and their vision towers."""
