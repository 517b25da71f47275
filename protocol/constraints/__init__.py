"""Output constraints: schemas, grammars, choices and tags, checked without a model."""
