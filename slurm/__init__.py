"""Templates of the batch scripts that `mixtron submit` and `mixtron prep submit` write."""
