"""Networks, in torch: pooling heads, the theory of the paper, attention, and kernels for narrow layers on a GPU."""
