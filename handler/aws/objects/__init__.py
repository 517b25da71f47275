"""Bytes in S3: an object as a stream of lines, and many objects joined to one."""
