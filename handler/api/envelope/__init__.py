"""What stands around every route: who asks, bodies and forms, pages, errors."""
