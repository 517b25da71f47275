"""The inference engine: requests in, responses out. It is independent of any cloud.

Importing this package imports no other module, and no torch.
"""
