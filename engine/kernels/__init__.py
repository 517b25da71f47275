"""The tensor operations that the engine owns; each works on plain tensors and knows no scheduler.

The torch versions are the reference and run on every device. Faster versions for one kind of device
lie beside them (`cpu`: numba) and are held to them by tests.
"""
