"""Programs that generate files of the repository; not part of any wheel."""
