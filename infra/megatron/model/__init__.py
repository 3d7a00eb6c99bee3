"""The base model as megatron-core modules: layout over ranks, weights, kernels."""
