"""One router per kind of object, with the schemas of its objects."""
