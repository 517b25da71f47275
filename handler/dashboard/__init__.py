"""The dashboard: one page, its assets, and HTML fragments that fill it.

Requests that are not for the dashboard import only `routes` from this package.
"""
