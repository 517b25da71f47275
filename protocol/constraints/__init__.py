"""Constraints of answers: schemas, grammars, choices and tags, checked without a model."""
