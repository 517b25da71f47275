"""Tables: rows rendered into requests by a recipe, and results written back as columns."""
