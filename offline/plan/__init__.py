"""Plan of a file: what is known of its lines before any runs, and the order that follows."""
