"""Hosts that somebody else names: which may be dialled, and what is fetched from them."""
