"""`mixtron bench`: how fast a training step, the ops and the input pipeline are."""
