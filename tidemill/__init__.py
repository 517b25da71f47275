"""LLM batch inference in your own cloud.

In a checkout its packages are links to folders of the root (docs/adr/0001).
"""
