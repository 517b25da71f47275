"""Requests in, responses out: the inference engine. Knows nothing of any cloud.

Importing this package imports nothing else; `engine.protocol` never needs torch.
"""
