"""The kernels of NVIDIA GPUs, in Triton; each beside the function in torch that it is held to."""
