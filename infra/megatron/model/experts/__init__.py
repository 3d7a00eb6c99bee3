"""The experts of a mixture: the layer, its matrix products, and their kernels."""
