"""The web page of a deployment and of a local server: templates, their values and its files.

It reads no store: its callers pass API objects and send the text. No file is from npm, so
an installed package serves it as it is.
"""
