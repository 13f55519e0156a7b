"""`autocast`: mixed precision for any JAX function, and the loss scaling that float16 needs."""
