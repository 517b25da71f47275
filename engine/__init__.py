"""Requests in, responses out: the inference engine. Knows nothing of any cloud.

Importing this package imports nothing else. What handles batches (`batchfile`, `contract`,
`errors`, `process`, `protocol`) never needs torch.
"""
