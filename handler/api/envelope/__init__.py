"""Request handling around every route: authentication, bodies, forms and errors."""
