"""Networks, in torch: pooling heads, the paper's theory, the transformer encoder, distributions, and GPU kernels."""
