"""Networks, in torch: pooling heads, the paper's theory, the encoder, attention, and GPU kernels for narrow layers."""
