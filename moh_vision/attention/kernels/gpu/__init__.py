"""The operators in Triton, for GPUs; importing `library` imports Triton. `moh_vision.attention.kernels` says what they mean."""
