"""Tables of measured kernels, and the fits made of them."""
