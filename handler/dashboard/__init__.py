"""The dashboard: one page, what it loads, and the pieces of HTML that it is filled with.

Nothing here but `routes` is imported by a request that is not for the dashboard.
"""
