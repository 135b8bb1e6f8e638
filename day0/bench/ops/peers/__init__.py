"""Kernels of other projects at our shapes, used where they are installed; an adapter is a module with `peers()`."""
